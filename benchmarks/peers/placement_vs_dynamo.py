"""Placement's prefix index against that of NVIDIA Dynamo (`RadixTree` of ai-dynamo-runtime), on the same load.

    python -m benchmarks.placement_vs_dynamo [--quick]

| part | work | counted |
| --- | --- | --- |
| find | blocks of each of 64 workers, of prompts of 128 and 1,904 blocks, to 8 or 64 distinct depths | p50 of hits |
| events | 16 blocks stored and 16 removed, from the bytes of the message | block operations a second |

Both are full of the load of `_index_load`, in one tier, which the peer makes for itself from the same seed; each is
asked in its own process, in turn, round after round, and their medians are compared. Neither clock leaves anything out:
a question is a Python list of hashes (ours bytes, the peer's numbers) and its answer a dict by worker; an event is the
bytes that come from the wire (ours msgpack, the peer's JSON, the one form that its tree takes). All answers of both are
checked. Events are heard between look-ups, untimed. All runs on one core: the peer's tree lives in a thread of its own,
which is woken for every question, and on two cores that others use too that takes several times as long.

The peer is in an environment of its own under KVFLEET_PEERS_DIR, by default /opt/kvfleet-peers:

    python3 -m venv /opt/kvfleet-peers/dynamo
    /opt/kvfleet-peers/dynamo/bin/pip install ai-dynamo-runtime==1.6.1
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import IO, Any, NoReturn

from benchmarks.harness.peers import NOT_OURS, ROOT, PeerFailed, interpreter
from benchmarks.harness.report import finish, parse_quick, progress, skip, spread
from benchmarks.placement._index_load import DISTINCT, LENGTHS, Load, p50
from benchmarks.placement._index_ours import Ours

NAME, UNIT, FLOOR = "placement_vs_dynamo", "times as fast, least of all parts", 1.0
EVENTS = 2_000  # of a round


class Dynamo:
    """The peer's process, which waits except while it is asked."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process, self._log = process, log
        self.version = self._answer()["version"]

    def ask(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise PeerFailed(f"dynamo ended:\n{self._log.read()[-2_000:]}")
        return json.loads(line)


@contextmanager
def running(python: str) -> Iterator[Dynamo]:
    with (
        tempfile.TemporaryFile(mode="w+", prefix="peer-dynamo-") as log,
        subprocess.Popen(
            [python, "-m", "benchmarks.peers._peer_dynamo"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            yield Dynamo(process, log)
        finally:
            process.kill()


def compare(python: str, *, quick: bool) -> NoReturn:
    rounds, prompts = (3, 100) if quick else (9, 300)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the peer's process inherits it
    load = Load()
    ours = Ours(load)
    finds: dict[tuple[int, int], tuple[list[float], list[float]]] = {
        (length, distinct): ([], []) for length in LENGTHS for distinct in DISTINCT
    }
    rates: tuple[list[float], list[float]] = ([], [])
    with running(python) as peer:
        progress(f"ai-dynamo-runtime {peer.version} has the same blocks")
        for number in range(rounds):
            for (length, distinct), (our, their) in finds.items():
                hits, _ = ours.find(load.prompts(length, distinct, prompts), ours.indexer.find_matches, list, dict)
                our.append(p50(hits) * 1e6)
                their.append(p50(peer.ask(do="find", length=length, distinct=distinct, count=prompts)["hits"]) * 1e6)
            rates[0].append(ours.apply(EVENTS))
            rates[1].append(peer.ask(do="apply", count=EVENTS)["rate"])
            progress(f"round {number + 1} of {rounds}")
        version = peer.version
    parts: dict[str, dict[str, Any]] = {}
    for (length, distinct), (our, their) in finds.items():
        ratio = round(median(their) / median(our), 2)
        parts[f"find, {length} blocks, {distinct} depths"] = {
            "ratio": ratio,
            "ours_us": spread(our),
            "peer_us": spread(their),
        }
    our_rates, their_rates = rates
    ratio = round(median(our_rates) / median(their_rates), 2)
    parts["events"] = {"ratio": ratio, "ours_per_s": spread(our_rates), "peer_per_s": spread(their_rates)}
    for name, part in parts.items():
        progress(f"{name}: {part['ratio']} times")
    least = min(part["ratio"] for part in parts.values())
    finish(NAME, least, UNIT, floor=FLOOR, ok=least > FLOOR, peer=f"ai-dynamo-runtime {version}", parts=parts)


def main() -> None:
    quick = parse_quick(__doc__)
    try:
        compare(interpreter("dynamo"), quick=quick)
    except NOT_OURS as error:
        skip(NAME, UNIT, floor=FLOOR, peer="dynamo", why=str(error))


if __name__ == "__main__":
    main()
