"""The data plane: one pair of processes, blocks of 2 MB, TCP and Unix socket, get and put.

    python -m benchmarks.data_plane [--quick]

In turn, round by round: a bare `recv_into` loop, ours (keys proven, headers, each block's checksum found again on
arrival), and Mooncake's TCP engine where it is installed (`mooncake` under KVFLEET_PEERS_DIR, see `_peer_mooncake`).
All move the same number of blocks from memory to memory. Medians; CPU seconds are those of both processes. The value
is the worst ratio of ours to the bare loop; ours must also move a share of what one thread of this machine copies,
and more than Mooncake.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.peers import NOT_OURS, PeerFailed, interpreter
from benchmarks.harness.processes import cpu_seconds
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.harness.yardstick_machine import measure_machine
from benchmarks.tiers._data_plane_end import (
    ASK,
    BLOCK_BYTES,
    DISTINCT,
    IDENTITY,
    ROOT,
    made_blocks,
    receive,
)
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.client import DataPlaneClient, GetStatus, PutStatus
from kvproto.dataplane.keys import KeyRing

REPOSITORY = Path(__file__).resolve().parents[2]
OF_BARE, OF_COPY = 0.6, 0.15
LINKS = ("tcp", "unix")
WORKS = ("get", "put")
ROUNDS, BLOCKS = 15, 128
Mover = Callable[[str, int], None]  # (get or put, blocks)


class Other:
    """The other process, asked in JSON lines."""

    def __init__(self, arguments: list[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            arguments,
            cwd=REPOSITORY,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hello: dict[str, Any] = self._read()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended")
        read: dict[str, Any] = json.loads(line)
        return read


@dataclass(frozen=True, slots=True)
class Sample:
    gb_per_s: float
    cpu_s_per_gb: float


class Bare:
    """The client's side of the bare loop."""

    def __init__(self, sock: socket.socket, blocks: list[tuple[BlockHeader, memoryview]]) -> None:
        self._sock = sock
        self._payloads = [payload for _, payload in blocks]
        self._landing = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(DISTINCT)]

    def __call__(self, work: str, count: int) -> None:
        self._sock.sendall(ASK.pack(work[:1].encode(), count))
        if work == "get":
            for at in range(count):
                receive(self._sock, self._landing[at % DISTINCT])
        else:
            for at in range(count):
                self._sock.sendall(self._payloads[at % DISTINCT])
            receive(self._sock, memoryview(bytearray(1)))


class Ours:
    def __init__(self, client: DataPlaneClient, blocks: list[tuple[BlockHeader, memoryview]]) -> None:
        self._client = client
        self._blocks = blocks
        self._wanted = [header.hash for header, _ in made_blocks(1)]
        self._landing = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(DISTINCT)]

    def __call__(self, work: str, count: int) -> None:
        deadline = time.monotonic() + 60
        if work == "get":
            names = [self._wanted[at % DISTINCT] for at in range(count)]
            got = self._client.get(ROOT, names, True, self._sink, lambda at, header, view: True, deadline)
            assert got == [GetStatus.OK] * count
        else:
            put = self._client.put(ROOT, [self._blocks[at % DISTINCT] for at in range(count)], deadline)
            assert put == [PutStatus.STORED] * count

    def _sink(self, at: int, header: BlockHeader) -> memoryview:
        return self._landing[at % DISTINCT]


class Mooncake:
    """Two engines in processes of their own; here they are only told when."""

    def __init__(self) -> None:
        python = interpreter("mooncake")
        library = str(Path(python).parent.parent / "lib")
        env = {"LD_LIBRARY_PATH": library, "PYTHONPATH": "", "MC_FORCE_TCP": "true"}
        start = [python, "-m", "benchmarks.peers._peer_mooncake", str(DISTINCT * BLOCK_BYTES)]
        self._there = Other([*start, "aa" * 4096], env)
        self._here = Other([*start, "bb" * 4096], env)
        self.engine = str(self._here.hello["engine"])
        self.move("get", 1)
        if self._here.ask(do="peek", at=0)["bytes"] != "aa" * 16:
            raise PeerFailed("Mooncake moved nothing")

    def move(self, work: str, count: int) -> Sample:
        before = self._cpu_s()
        answer = self._here.ask(
            do={"get": "read", "put": "write"}[work],
            segment=self._there.hello["segment"],
            address=self._there.hello["address"],
            block=BLOCK_BYTES,
            distinct=DISTINCT,
            count=count,
        )
        gigabytes = count * BLOCK_BYTES / 1e9
        return Sample(gigabytes / answer["seconds"], (self._cpu_s() - before) / gigabytes)

    def close(self) -> None:
        self._there.close()
        self._here.close()

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(end.hello["pid"]) for end in (self._there, self._here))


def measured(mover: Mover, other: Other, work: str, count: int) -> Sample:
    cpu = other.ask(do="cpu")["cpu_s"] + time.process_time()
    began = time.perf_counter()
    mover(work, count)
    seconds = time.perf_counter() - began
    cpu = other.ask(do="cpu")["cpu_s"] + time.process_time() - cpu
    gigabytes = count * BLOCK_BYTES / 1e9
    return Sample(gigabytes / seconds, cpu / gigabytes)


@contextmanager
def movers() -> Iterator[tuple[Other, dict[str, Mover]]]:
    """The other process, and how to move blocks to and from it: bare and ours, each by TCP and Unix socket."""
    with ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="data-plane-")))
        secret = secrets.token_bytes(32)
        command = [sys.executable, "-m", "benchmarks.tiers._data_plane_end", str(folder), secret.hex()]
        other = Other(command, {"PYTHONPATH": os.pathsep.join(sys.path)})
        closing.callback(other.close)
        blocks = made_blocks(2)
        bare = {"tcp": socket.create_connection(("127.0.0.1", other.hello["bare_tcp"]))}
        bare["unix"] = socket.socket(socket.AF_UNIX)
        bare["unix"].connect(str(folder / "bare.sock"))
        made: dict[str, Mover] = {}
        for link in LINKS:
            client = DataPlaneClient.connect(
                other.hello["ours"],
                KeyRing({"k": secret}),
                identity="benchmark",
                expect=IDENTITY,
                same_host=link == "unix",
            )
            assert client.address.startswith(link)
            closing.callback(client.close)
            closing.callback(bare[link].close)
            made[f"bare {link}"] = Bare(bare[link], blocks)
            made[f"ours {link}"] = Ours(client, blocks)
        yield other, made


def ratio(ours: list[Sample], theirs: list[Sample]) -> float:
    """Median of the rounds' ratios: what disturbs the machine disturbs both of a round."""
    return median(our.gb_per_s / their.gb_per_s for our, their in zip(ours, theirs, strict=True))


def report(samples: list[Sample]) -> dict[str, Any]:
    return {
        "gb_per_s": spread(each.gb_per_s for each in samples),
        "cpu_s_per_gb": round(median(each.cpu_s_per_gb for each in samples), 3),
    }


def main() -> None:
    rounds, count = (5, BLOCKS) if parse_quick(__doc__) else (ROUNDS, BLOCKS)
    samples: dict[str, list[Sample]] = defaultdict(list)
    with ExitStack() as closing:
        try:
            mooncake = Mooncake()
            closing.callback(mooncake.close)
        except NOT_OURS as error:
            mooncake = None
            progress(f"without Mooncake: {error}")
        other, all_movers = closing.enter_context(movers())
        for turn in range(-1, rounds):  # the first is to warm up: pages are touched, socket buffers grow
            for work in WORKS:
                measurements = {name: measured(mover, other, work, count) for name, mover in all_movers.items()}
                if mooncake is not None:
                    measurements["mooncake tcp"] = mooncake.move(work, count)
                if turn >= 0:
                    for name, sample in measurements.items():
                        samples[f"{name} {work}"].append(sample)
    speed = {name: median(each.gb_per_s for each in found) for name, found in samples.items()}
    for name, found in samples.items():
        progress(f"{name}: {speed[name]:.2f} GB/s, {report(found)['cpu_s_per_gb']} CPU s/GB")
    lanes = [f"{link} {work}" for link in LINKS for work in WORKS]
    ratios = {lane: ratio(samples[f"ours {lane}"], samples[f"bare {lane}"]) for lane in lanes}
    slowest = min(speed[f"ours {lane}"] for lane in lanes)
    of_mooncake = {
        work: ratio(samples[f"ours tcp {work}"], samples[f"mooncake tcp {work}"])
        for work in WORKS
        if mooncake is not None
    }
    worst = min(ratios.values())
    machine = measure_machine(1)
    copy = machine.copy / 1e9
    finish(
        "data_plane",
        round(worst, 3),
        "of a bare loop",
        floor=OF_BARE,
        ok=worst >= OF_BARE and slowest >= OF_COPY * copy and all(times > 1 for times in of_mooncake.values()),
        peer=mooncake.engine if mooncake is not None else None,
        slowest_gb_per_s=round(slowest, 3),
        of_copy=round(slowest / copy, 3),
        of_copy_floor=OF_COPY,
        machine=machine.report(),
        of_bare={lane: round(share, 3) for lane, share in ratios.items()},
        of_mooncake={work: round(times, 3) for work, times in of_mooncake.items()},
        parts={name: report(found) for name, found in samples.items()},
        **({} if mooncake is not None else {"skipped_peer": "mooncake is not installed"}),
    )


if __name__ == "__main__":
    main()
