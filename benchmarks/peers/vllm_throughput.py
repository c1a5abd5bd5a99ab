"""What the fleet costs in front of vLLM: tokens/s of 16 streams, and TTFT, against the same vLLM server asked straight.

    python -m benchmarks.vllm_throughput [--quick]

One vLLM server (GPT-2's shape, random weights), a kvfleet worker beside it, placement and ingress. Straight and through
the fleet alternate, with the same prompts (another tenant's cache, so neither finds the other's blocks):

| part | work | floor |
| --- | --- | --- |
| throughput | 16 streams of `vllm bench serve`, and 16 of a bare client: the lesser of both ratios counts | 0.95 |
| TTFT | one short request at a time: what the fleet adds, p50, over what it adds to our engine | 1.5 |

Our engine is that of `overhead`, a fake model paced to 10,000 tokens/s, at a worker of the same fleet.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.engine._engine_models import Name, model_folder
from benchmarks.harness.http import Connection
from benchmarks.harness.live_fleet import Fleet, one_server
from benchmarks.harness.processes import cpu_seconds, name_of
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.ingress.overhead import RATE, BareEngine
from benchmarks.ingress.overhead import body as own_body
from benchmarks.peers._vllm_servers import FLEET_READY_S, BenchServe, need_vllm, one_vllm, worker_beside
from tests.support.vllm_server import VllmServer

NAME, UNIT = "vllm_throughput", "of straight vLLM's tokens/s"
MODEL: Name = "gpt2"
VOCAB, CONTEXT = 50_257, 1024
STREAMS, PROMPT, SHORT_PROMPT = 16, 32, 16
FLOOR, TTFT_FLOOR = 0.95, 1.5
MARK = b'"text":"'


@dataclass
class Pair:
    """Two ways of the same work, measured in turn."""

    straight: list[float] = field(default_factory=list)
    fleet: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return median(fleet / straight for fleet, straight in zip(self.fleet, self.straight, strict=True))

    @property
    def added_ms(self) -> float:
        return 1e3 * median(fleet - straight for fleet, straight in zip(self.fleet, self.straight, strict=True))


def prompts(number: int) -> list[list[int]]:
    chance = Random(number)
    return [[chance.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(STREAMS)]


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
    return asked | {"temperature": 0, "ignore_eos": True, "stream": True}


async def rate(base: str, number: int, tokens: int) -> float:
    """Tokens/s of a bare client's streams."""
    connections = [Connection(base) for _ in range(STREAMS)]
    bodies = [body(prompt, tokens) for prompt in prompts(number)]
    began = time.perf_counter()
    await asyncio.gather(
        *(one.stream("/v1/completions", body, MARK) for one, body in zip(connections, bodies, strict=True))
    )
    seconds = time.perf_counter() - began
    for connection in connections:
        await connection.close()
    return STREAMS * tokens / seconds


@dataclass
class CpuTime:
    """Of each process, in microseconds for a token of the fleet's."""

    pids: dict[int, str]
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def of(self, work: Awaitable[float], tokens: int) -> float:
        before = {pid: cpu_seconds(pid) for pid in self.pids}
        done = await work
        for pid, name in self.pids.items():
            self.spent[name].append((cpu_seconds(pid) - before[pid]) / tokens * 1e6)
        return done

    def medians(self) -> dict[str, float]:
        return {name: round(median(values), 1) for name, values in self.spent.items()}


async def in_turn(pair: Pair, way: Callable[[str], Awaitable[float]], straight: str, fleet: str, number: int) -> None:
    """Who comes first alternates."""
    for base in (straight, fleet) if number % 2 == 0 else (fleet, straight):
        (pair.straight if base == straight else pair.fleet).append(await way(base))


async def throughput(straight: str, fleet: str, bench: BenchServe, cpu: CpuTime, rounds: int) -> tuple[Pair, Pair]:
    """Of `vllm bench serve` and of the bare client."""
    by_bench, by_client = Pair(), Pair()
    for number in range(rounds):

        async def benched(base: str, number: int = number) -> float:
            return await asyncio.to_thread(bench.rate, base, number)

        async def asked(base: str, number: int = number) -> float:
            work = rate(base, number, bench.output)
            return await (work if base == straight else cpu.of(work, STREAMS * bench.output))

        for pair, way, name in ((by_bench, benched, "vllm bench serve"), (by_client, asked, "a bare client")):
            await in_turn(pair, way, straight, fleet, number)
            told = f"straight {pair.straight[-1]:.0f} tokens/s, fleet {pair.fleet[-1]:.0f}"
            progress(f"round {number + 1}, {name}: {told}")
    return by_bench, by_client


async def ttft(straight: str, fleet: str, requests: int) -> tuple[Pair, Pair]:
    """Of vLLM and of our engine, one request at a time; the four ways in turn."""
    vllm, own, bare = Pair(), Pair(), BareEngine()
    connections = {base: Connection(base) for base in (straight, fleet)}

    async def first(base: str, asked: dict[str, Any]) -> float:
        await asyncio.sleep(0.01)
        return (await connections[base].stream("/v1/completions", asked, MARK))[0]

    for number in range(-10, requests):
        if number == 0:  # they are warm
            vllm, own = Pair(), Pair()
        asked = body(prompts(1_000_000 + number)[0][:SHORT_PROMPT], 4)
        await in_turn(vllm, lambda base, asked=asked: first(base, asked), straight, fleet, number)  # type: ignore[misc]
        own.straight.append(bare.ttft(1_000 + number, SHORT_PROMPT))
        own.fleet.append(await first(fleet, own_body(1_000 + number, 4, SHORT_PROMPT)))
    for connection in connections.values():
        await connection.close()
    progress(f"TTFT added: to vLLM {vllm.added_ms:.2f} ms, to our engine {own.added_ms:.2f} ms")
    return vllm, own


def processes(fleet: Fleet, server: VllmServer, nats: int | None) -> CpuTime:
    assert nats is not None
    services = {service.pid: name_of(service.pid) for name, service in fleet.services.items() if name != "own"}
    return CpuTime(services | {nats: "nats-server"} | {pid: name for name, pid in server.pids.items()})


async def measure(straight: str, fleet: str, bench: BenchServe, cpu: CpuTime, *, quick: bool) -> list[Pair]:
    for base in (straight, fleet):
        await rate(base, 1_000, 8)
    added = await ttft(straight, fleet, 40 if quick else 150)
    return [*await throughput(straight, fleet, bench, cpu, 3 if quick else 7), *added]


def main() -> None:
    quick = parse_quick(__doc__)
    need_vllm(NAME, UNIT, FLOOR)
    model = model_folder(MODEL)
    with one_server() as (nats, folder), one_vllm(model, folder, f"--max-model-len={CONTEXT}", name=MODEL) as server:
        fleet = Fleet(nats.url, folder, f"--fake-tokens-per-s={RATE}")
        fleet.init()
        try:
            fleet.start("placement", "p0")
            fleet.ingress()
            fleet.worker("own")
            fleet.wait_ready(1, FLEET_READY_S)
            worker_beside(fleet, "w0", server)
            fleet.wait_ready(2, FLEET_READY_S)
            progress("the fleet is ready")
            bench = BenchServe(MODEL, model, Path(folder), STREAMS, PROMPT, 64 if quick else 128)
            cpu = processes(fleet, server, nats.pid)
            by_bench, by_client, vllm, own = asyncio.run(measure(server.url, fleet.base, bench, cpu, quick=quick))
        finally:
            fleet.stop()
    ratio, ttft_ratio = min(by_bench.ratio, by_client.ratio), vllm.added_ms / own.added_ms
    finish(
        NAME,
        round(ratio, 3),
        UNIT,
        floor=FLOOR,
        ok=ratio >= FLOOR and ttft_ratio <= TTFT_FLOOR,
        peer="vllm, the same server",
        by_vllm_bench_serve=round(by_bench.ratio, 3),
        by_bare_client=round(by_client.ratio, 3),
        throughput_ok=ratio >= FLOOR,
        straight_tokens_per_s=spread(by_client.straight),
        fleet_tokens_per_s=spread(by_client.fleet),
        ttft_added_over_own=round(ttft_ratio, 2),
        ttft_floor=TTFT_FLOOR,
        ttft_ok=ttft_ratio <= TTFT_FLOOR,
        ttft_added_ms={"vllm": round(vllm.added_ms, 2), "own": round(own.added_ms, 2)},
        ttft_s={"straight": spread(vllm.straight), "fleet": spread(vllm.fleet), "own_fleet": spread(own.fleet)},
        cpu_us_per_token=cpu.medians(),
        cores=len(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
