"""Seconds from a cancel to when the blocks of what it ends are free, as a share of the step that it interrupts.

    python -m benchmarks.cancel_to_free [--quick] [--threads N]

Random weights in the shape of Qwen2-0.5B (bf16), behind the thread that a worker has. A prompt of 2,048 tokens is
computed as one chunk; every other one is cancelled after a tenth to a half of what a whole one takes. The value is the
median of cancel to free over the whole chunk's seconds: what is not given up midway comes to 0.7. Beside it, eight
streams decode, and one of them at a time is cancelled: that step serves others and is finished, so it waits for it.
"""

from __future__ import annotations

import asyncio
from random import Random
from statistics import median, quantiles

from benchmarks.engine._engine import CORES, ROOT, Ours, fresh_prompts
from benchmarks.engine._engine_models import model_folder
from benchmarks.harness.report import finish, parser, progress
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.port.outputs import SequenceFailed, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvproto.errors import Cancelled
from kvproto.messages import ChoiceFinished, Sampling, Tokens

CHUNK, STREAMS, PROMPT, OUTPUT = 2_048, 8, 128, 3_900
EARLIEST, LATEST = 0.1, 0.5
FLOOR = 0.25
WAIT_S = 60.0


class Desk:
    """What a worker's loop does with the engine's thread, without NATS."""

    def __init__(self, ours: Ours) -> None:
        self.chunks: list[float] = []  # seconds of steps that carried a whole one
        self.decodes: list[float] = []  # of those without prompt tokens
        self.ended: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.thread = EngineThread(ours.engine, self._on_results, asyncio.get_running_loop())
        self._numbers = iter(range(1_000_000))

    def _on_results(self, results: list[StepResult]) -> None:
        for result in results:
            if result.prefill_tokens >= CHUNK:
                self.chunks.append(result.seconds)
            elif result.sequences and not result.prefill_tokens:
                self.decodes.append(result.seconds)
            for output in result.outputs:
                if isinstance(output, Tokens):
                    self.tokens[output.request] = self.tokens.get(output.request, 0) + len(output.ids)
                elif isinstance(output, ChoiceFinished | SequenceFailed):
                    if isinstance(output, SequenceFailed) and not isinstance(output.error, Cancelled):
                        raise output.error
                    self.ended.add(output.request)

    def submit(self, prompt: list[int], max_tokens: int) -> str:
        name = str(next(self._numbers))
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        self.thread.submit(SequenceSpec(name, 0, tuple(prompt), sampling, ROOT))
        return name

    async def end(self, name: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while name not in self.ended:
                await asyncio.sleep(0.0005)

    async def cancel(self, name: str) -> float:
        """Returns the seconds until its blocks were free."""
        before = self.thread.cancel_to_free.sum
        self.thread.cancel(name, 0)
        await self.end(name)
        return self.thread.cancel_to_free.sum - before


async def prefills(desk: Desk, prompts: list[list[int]], chance: Random) -> list[float]:
    """Every other one is cancelled midway; the first two are the warm-up."""
    for prompt in prompts[:2]:
        await desk.end(desk.submit(prompt, 1))
    freed = []
    for at, prompt in enumerate(prompts[2:]):
        name = desk.submit(prompt, 1)
        if at % 2 == 0:
            await desk.end(name)
            continue
        async with asyncio.timeout(WAIT_S):
            while not desk.thread.step_age_s:
                await asyncio.sleep(0)
        await asyncio.sleep(chance.uniform(EARLIEST, LATEST) * median(desk.chunks[1:]))
        freed.append(await desk.cancel(name))
        progress(f"chunk {median(desk.chunks[1:]):.3f} s, free {freed[-1]:.4f} s after a cancel")
    return freed


async def decodes(desk: Desk, prompts: list[list[int]], chance: Random) -> list[float]:
    """One stream after the other is cancelled, and another one begun."""
    streams = [desk.submit(prompt, OUTPUT) for prompt in prompts[:STREAMS]]
    freed = []
    for prompt in prompts[STREAMS:]:
        async with asyncio.timeout(WAIT_S):
            while any(desk.tokens.get(name, 0) < 3 for name in streams):
                await asyncio.sleep(0.001)
        await asyncio.sleep(chance.uniform(0.0, median(desk.decodes)))
        freed.append(await desk.cancel(streams.pop(chance.randrange(STREAMS))))
        streams.append(desk.submit(prompt, OUTPUT))
    for name in streams:
        await desk.cancel(name)
    progress(f"decode step {median(desk.decodes):.4f} s, free {median(freed):.4f} s after a cancel")
    return freed


async def measure(ours: Ours, rounds: int) -> tuple[Desk, list[float], list[float]]:
    chance = Random(11)
    desk = Desk(ours)
    desk.thread.start()
    try:
        chunked = await prefills(desk, fresh_prompts(chance, 2 + 2 * rounds, CHUNK, ours.vocab_size), chance)
        decoded = await decodes(desk, fresh_prompts(chance, STREAMS + 4 * rounds, PROMPT, ours.vocab_size), chance)
    finally:
        desk.thread.stop()
    return desk, chunked, decoded


def centiles(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 4), "p99": round(cuts[98], 4)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    ours = Ours(
        model_folder("qwen2-0.5b"), "bfloat16", threads=options.threads, sequences=STREAMS + 1, token_budget=CHUNK
    )
    pacer = ours.engine.scheduler.pacer
    pacer.observe = lambda *step: None  # type: ignore[method-assign]  # one chunk, however long it takes here
    rounds = 6 if options.quick else 20
    desk, chunked, decoded = asyncio.run(measure(ours, rounds))
    ours.engine.check_integrity()
    chunk_s, step_s = median(desk.chunks[1:]), median(desk.decodes)
    shares = [seconds / chunk_s for seconds in chunked]
    aborted = desk.thread.counters.steps_aborted_total
    finish(
        "cancel_to_free",
        round(median(shares), 4),
        "of the chunk's seconds, at most",
        floor=FLOOR,
        ok=median(shares) <= FLOOR and aborted >= rounds and ours.engine.pool.used == 0,
        peer="the same chunk to its end",
        prefill_s=centiles(chunked),
        prefill_of_chunk=centiles(shares),
        chunk_s=round(chunk_s, 4),
        decode_s=centiles(decoded),
        decode_of_step=centiles([seconds / step_s for seconds in decoded]),
        decode_step_s=round(step_s, 4),
        cancelled=[len(chunked), len(decoded)],
        steps_aborted=aborted,
        chunk_tokens=CHUNK,
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
