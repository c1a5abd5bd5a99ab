"""What the fleet adds to an engine: TTFT through HTTP, ingress, placement, NATS and worker, against the bare engine.

    python -m benchmarks.overhead [--quick]

Both run the fake model paced to 10,000 tokens/s; bare and fleet requests alternate, one at a time, and what is added is
the difference of the medians. Milliseconds say as much of the machine as of the fleet, so as many requests go through a
yardstick in between: the same hops by the same server and NATS client, without kvfleet (`_yardsticks.Hops`). The value
is what is added in such hops. Then 16 streams at once show the CPU time that each process spends per token.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median, quantiles

from benchmarks.harness.http import Connection
from benchmarks.harness.processes import cpu_seconds, name_of
from benchmarks.harness.report import finish, parse_quick, progress, spread
from benchmarks.harness.yardsticks import Hops, tokens_per_s
from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvproto.messages import Sampling, Tokens
from tests.support.id_detokenizer import IdDetokenizer
from tests.support.up import Up

RATE, PROMPT, STREAMS = 10_000, 128, 16
FLOOR = 6.0  # times the bare hops
MARK = b'"text":"'


def prompt(number: int, length: int = PROMPT) -> list[int]:
    return [(number * 31 + i * 7) % 900 + 10 for i in range(length)]


class BareEngine:
    def __init__(self) -> None:
        runner = FakeRunner(num_blocks=8192, vocab_size=1024, context_length=4096, pace=FakePace(RATE))
        pool = BlockPool(runner.num_blocks, runner.block_size)
        self._engine = Engine(runner, pool, Scheduler(pool), IdDetokenizer())

    def ttft(self, number: int, length: int = PROMPT) -> float:
        began, first = time.perf_counter(), 0.0
        sampling = Sampling(8, temperature=0.0, ignore_eos=True)
        self._engine.add(SequenceSpec(f"r{number}", 0, tuple(prompt(number, length)), sampling, b"benchmark root16"))
        while self._engine.has_work:
            for output in self._engine.step().outputs:
                if isinstance(output, Tokens) and not first:
                    first = time.perf_counter() - began
        return first


def body(number: int, max_tokens: int, length: int = PROMPT) -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": prompt(number, length),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def measure_ttft(up: Up, hops: Hops, blocks: int, each: int) -> tuple[list[float], list[float], list[float]]:
    """Of the engine, of the fleet, of the hops alone."""
    bare, fleet = BareEngine(), []
    engine: list[float] = []
    yard: list[float] = []
    connection = Connection(up.base)
    for number in range(20):
        await connection.stream("/v1/completions", body(100_000 + number, 8), MARK)
        await hops.ttft(body(number, 8))
    for block in range(blocks):
        for i in range(each):
            engine.append(bare.ttft(block * each + i))
        for i in range(each):
            fleet.append((await connection.stream("/v1/completions", body(block * each + i, 8), MARK))[0])
            await asyncio.sleep(0.01)
            yard.append(await hops.ttft(body(block * each + i, 8)))
            await asyncio.sleep(0.01)
        medians = [f"{median(some) * 1e3:.2f} ms" for some in (engine, fleet, yard)]
        progress(f"block {block + 1}: engine {medians[0]}, fleet {medians[1]}, bare hops {medians[2]}")
    await connection.close()
    await hops.close()
    return engine, fleet, yard


async def measure_cpu(up: Up, tokens: int) -> tuple[float, dict[str, float]]:
    connections = [Connection(up.base) for _ in range(STREAMS)]
    pids = {pid: name_of(pid) for pid in up.descendants()}
    before = {pid: cpu_seconds(pid) for pid in pids}
    began = time.perf_counter()
    done = await asyncio.gather(
        *(c.stream("/v1/completions", body(500_000 + i, tokens), MARK) for i, c in enumerate(connections))
    )
    seconds = time.perf_counter() - began
    total = sum(count for _, count in done)
    spent: dict[str, float] = {}
    for pid, name in pids.items():
        spent[name] = spent.get(name, 0.0) + (cpu_seconds(pid) - before[pid]) / total * 1e6
    for connection in connections:
        await connection.close()
    return total / seconds, {name: round(value, 1) for name, value in spent.items()}


def main() -> None:
    quick = parse_quick(__doc__)
    progress("starting a fleet")
    up = Up("--port", "0", "--runner", "fake", "--fake-tokens-per-s", str(RATE), "--workers", "1").wait_ready()
    try:
        with Hops() as hops:
            engine, fleet, yard = asyncio.run(measure_ttft(up, hops, 2 if quick else 5, 40 if quick else 100))
        rate, spent = asyncio.run(measure_cpu(up, 1000 if quick else 3000))
    finally:
        up.stop()
    added = (median(fleet) - median(engine)) * 1e3
    ratio = added / (median(yard) * 1e3)
    plain_us = 1e6 / tokens_per_s()
    progress(f"a plain loop's CPU per token: {plain_us:.2f} us")
    progress(f"{rate:.0f} tokens/s with {STREAMS} streams; CPU us per token: {spent}")
    finish(
        "overhead",
        round(ratio, 2),
        "bare hops added to TTFT, p50",
        floor=FLOOR,
        ok=ratio < FLOOR,
        peer="the same engine in process; the same hops without kvfleet",
        added_ms=round(added, 3),
        bare_hops_s=spread(yard),
        engine_ttft_s=spread(engine),
        fleet_ttft_s=spread(fleet),
        fleet_ttft_p99_ms=round(quantiles(fleet, n=100)[98] * 1e3, 2),
        tokens_per_s=round(rate),
        cpu_us_per_token=spent,
        plain_loop_us_per_token=round(plain_us, 2),
    )


if __name__ == "__main__":
    main()
