"""The gap in streams whose vLLM is killed, beyond what another vLLM takes to compute their tails.

    python -m benchmarks.vllm_death [--quick]

Two vLLM servers (a tiny Llama, random weights) on a core each, with a worker each. Eight streams, drawn with seeds, run
on both; the vLLM of one of them gets SIGKILL, all its processes at once. Its streams go on at the other one, which is
warm and knows other prompts. Tails as long, of other tokens, are then put straight to that vLLM, as many at once: the
time to their first tokens is what a gap may have beyond the floor. A new server and worker take the place of the dead
ones, and the streams run again undisturbed: all must have the same tokens. Value: p50.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.harness.live_fleet import Fleet, Seen, one_server, percentile, prompt, read_with_client
from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.peers._vllm_servers import FLEET_READY_S, READY_S, cores, need_vllm, start_server, worker_beside
from benchmarks.reliability.resume_gap import watch
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvproto.client import Client
from kvproto.messages import Sampling
from tests.support.tiny_llama import VOCAB, write_tiny_llama
from tests.support.vllm_server import VllmServer

NAME, UNIT, FLOOR_S = "vllm_death", "ms in a stream beyond the prefill of its tail after SIGKILL of its vLLM, p50", 0.5
MODEL, STREAMS, TOKENS, BEFORE = "tiny", 8, 160, 40
Notes = list[tuple[str, float]]  # what a client does, and when (monotonic seconds)


@dataclass
class Sites:
    """vLLM servers by the id of the worker beside each."""

    fleet: Fleet
    model: Path
    servers: dict[str, VllmServer] = field(default_factory=dict)
    _cores: dict[str, int] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def add(self, on: list[int]) -> None:
        """A server and a worker on each of these cores; returns when they are ready."""
        names = [f"w{next(self._numbers)}" for _ in on]
        for name, core in zip(names, on, strict=True):
            self._cores[name] = core
            self.servers[name] = start_server(self.model, self.fleet.folder, core, name=MODEL)
        for name in names:
            self.servers[name].wait_ready(READY_S)
            worker_beside(self.fleet, name, self.servers[name])
        self.fleet.wait_ready(len(self.servers), FLEET_READY_S)

    def replace(self, name: str) -> None:
        self.servers.pop(name)
        self.fleet.services.pop(name).stop()
        self.add([self._cores.pop(name)])

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@dataclass
class Struck:
    """What one kill did to the streams of that vLLM, in seconds."""

    gaps: list[float]
    prefills: list[float]
    detected: list[float]  # when the client turned to placing each again
    placed: list[float]

    @property
    def beyond(self) -> list[float]:
        return [gap - median(self.prefills) for gap in self.gaps]


def streams(kill: int) -> list[Seen]:
    return [Seen(prompt(1_000 * (kill + 1) + number), TOKENS) for number in range(STREAMS)]


def reading(client: Client, seen: list[Seen]) -> list[asyncio.Task[Seen]]:
    """Seeds are of a stream's place."""
    return [
        asyncio.create_task(
            read_with_client(
                client, one, model=MODEL, sampling=Sampling(TOKENS, 0.8, top_p=0.95, seed=at, ignore_eos=True)
            )
        )
        for at, one in enumerate(seen)
    ]


async def ended(tasks: list[asyncio.Task[Seen]]) -> None:
    for seen in await asyncio.gather(*tasks):
        if seen.error or len(seen.ids) != TOKENS:
            raise SystemExit(f"a stream was broken: {seen.error}, {len(seen.ids)} of {TOKENS} tokens")


async def strike(client: Client, sites: Sites, seen: list[Seen], notes: Notes) -> tuple[str, Struck]:
    """Kill the vLLM of the first stream. Also whose it was. `notes` grows as the client places streams."""
    pids = {name: list(server.pids.values()) for name, server in sites.servers.items()}  # finding them takes its time
    tasks = reading(client, seen)
    while len(seen[0].ids) < BEFORE and not tasks[0].done():
        await asyncio.sleep(0.005)
    victim = seen[0].worker
    assert victim is not None, seen[0].error
    moved = [one for one in seen if one.worker == victim and 0 < len(one.ids) < TOKENS]
    lengths = [len(one.prompt) + len(one.ids) for one in moved]
    struck = time.monotonic()
    for pid in pids[victim]:
        os.kill(pid, signal.SIGKILL)
    await ended(tasks)
    await asyncio.to_thread(sites.servers[victim].kill)  # what is left of it
    gaps = [max(after - before for before, after in pairwise(one.times) if after > struck) for one in moved]
    other = next(server for name, server in sites.servers.items() if name != victim)
    detected, placed = (
        [at - struck for what, at in notes if what == name and at > struck] for name in ("detected", "placed")
    )
    return victim, Struck(gaps, await prefills(other, lengths, Random(struck)), detected, placed)


async def prefills(server: VllmServer, lengths: list[int], chance: Random) -> list[float]:
    """Seconds to the first tokens of prompts that come at once, straight from vLLM; three times."""
    routes, numbers = TokenRoutes(server.url), count()
    await routes.open()

    async def first(length: int) -> float:
        ids = [chance.randrange(10, VOCAB) for _ in range(length)]
        body = {"request_id": f"tail-{next(numbers)}", "model": MODEL, "token_ids": ids, "stream": True}
        body["sampling_params"] = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
        began = time.monotonic()
        async for _ in routes.generate(body):
            break
        return time.monotonic() - began

    found: list[float] = []
    for _ in range(3):
        found += await asyncio.gather(*(first(length) for length in lengths))
    await routes.close()
    return found


async def measure(sites: Sites, kills: int) -> tuple[list[Struck], int]:
    """Also how many streams had the tokens of the undisturbed run."""
    struck, equal, notes = list[Struck](), 0, Notes()
    async with await Client.open(sites.fleet.nats_url) as client:
        watch(client, lambda what: notes.append((what, time.monotonic())))
        await ended(reading(client, streams(-1)))  # both are warm
        for kill in range(kills):
            seen, again = streams(kill), streams(kill)
            victim, found = await strike(client, sites, seen, notes)
            struck.append(found)
            gap, prefill = 1e3 * median(found.gaps), 1e3 * median(found.prefills)
            where = (
                f"detected after {1e3 * median(found.detected):.0f}, placed after {1e3 * median(found.placed):.0f} ms"
            )
            progress(f"kill {kill + 1}: {len(found.gaps)} streams, gap {gap:.0f} ms, {where}; prefill {prefill:.0f} ms")
            await asyncio.to_thread(sites.replace, victim)
            await ended(reading(client, again))
            equal += sum(one.ids == other.ids for one, other in zip(seen, again, strict=True))
    return struck, equal


def main() -> None:
    quick = parse_quick(__doc__)
    need_vllm(NAME, UNIT, 1e3 * FLOOR_S)
    kills = 2 if quick else 5
    with one_server() as (nats, folder):
        fleet = Fleet(nats.url, folder)
        fleet.init()
        sites = Sites(fleet, write_tiny_llama(folder / "model"))
        try:
            fleet.start("placement", "p0")
            fleet.ingress()
            sites.add((cores() * 2)[:2])
            progress("the fleet is ready")
            struck, equal = asyncio.run(measure(sites, kills))
        finally:
            sites.stop()
            fleet.stop()
    beyond = [one for found in struck for one in found.beyond]
    p50, total = percentile(beyond, 0.5), kills * STREAMS
    finish(
        NAME,
        round(1e3 * p50, 1),
        UNIT,
        floor=1e3 * FLOOR_S,
        ok=p50 <= FLOOR_S and equal == total,
        peer="vllm, asked straight for the tails",
        gap_ms=[round(1e3 * median(found.gaps)) for found in struck],
        detected_after_ms=[round(1e3 * median(found.detected)) for found in struck],
        placed_after_ms=[round(1e3 * median(found.placed)) for found in struck],
        prefill_ms=[round(1e3 * median(found.prefills)) for found in struck],
        worst_ms=round(1e3 * max(beyond), 1),
        kills=kills,
        streams_moved=len(beyond),
        streams_equal=f"{equal} of {total}",
    )


if __name__ == "__main__":
    main()
