"""Cancelled work ends: in no step that begins later, and in the one under way as soon as it is for nobody else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from engine_rig import expected_tokens, make_engine, spec
from test_engine_thread import Desk

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.base import StepAborted
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import Cancelled
from kvproto.messages import FinishReason, Sampling
from kvsampling.draw import Draw, Drawn
from tests.support.waiting import LIMIT_S

SHAPE = {"num_blocks": 64, "block_size": 4, "vocab_size": 1000, "context_length": 512}
GREEDY = Sampling(8, temperature=0.0)


class LayeredRunner(FakeRunner):
    """Between two layers for as long as it is not let go on; what it has written by then is nobody's."""

    def __init__(self) -> None:
        super().__init__(**SHAPE)  # type: ignore[arg-type]
        self.entered, self.open = threading.Event(), threading.Event()
        self.shut_at: int | None = None
        self.steps: list[list[int]] = []  # where each slice of a step starts

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        self.steps.append([part.start for part in slices])
        if slices[0].start == self.shut_at:
            self.open.clear()
        for part in slices:
            for position in range(part.start, part.end):
                at, offset = divmod(position, self.block_size)
                self.slots[part.blocks[at] * self.block_size + offset] = 12345
        self.entered.set()
        end = time.monotonic() + 2 * LIMIT_S
        while not self.open.wait(0.001):
            self.abort.check()
            assert time.monotonic() < end
        return super().run(slices)


@pytest.fixture
async def runner() -> LayeredRunner:
    return LayeredRunner()


@pytest.fixture
async def desk(runner: LayeredRunner) -> AsyncIterator[Desk]:
    desk = Desk(make_engine(runner=runner, token_budget=18))
    desk.thread.start()
    yield desk
    runner.open.set()
    desk.thread.stop()


async def entered(runner: LayeredRunner, start: int = 0) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not (runner.entered.is_set() and runner.steps[-1][0] == start):
            await asyncio.sleep(0.001)


async def test_a_cancelled_prefill_stops_in_the_midst_of_its_chunk(desk: Desk, runner: LayeredRunner) -> None:
    prompt = list(range(30))
    desk.thread.submit(spec("gone", prompt))
    await entered(runner)
    desk.thread.cancel("gone", 0)
    await desk.ends(1)
    assert isinstance(desk.transcript.ends["gone", 0], Cancelled)
    assert desk.thread.counters.steps_aborted_total == 1
    pool = await desk.thread.call(lambda engine: engine.pool)
    assert (pool.used, pool.cached, pool.index.hashes()) == (0, 0, [])
    assert desk.thread.cancel_to_free.count == 1
    runner.open.set()
    desk.thread.submit(spec("again", prompt))
    await desk.ends(2)
    assert desk.transcript.tokens["again", 0] == expected_tokens(prompt, GREEDY)
    assert desk.transcript.started["again", 0].cached_tokens == 0
    assert desk.thread.counters.steps_aborted_total == 1


async def test_what_was_computed_before_that_chunk_stays_cached(desk: Desk, runner: LayeredRunner) -> None:
    """Its chunks end in the midst of blocks; the second one has begun to write behind the first."""
    prompt = list(range(45))
    runner.shut_at = 18
    runner.open.set()
    desk.thread.submit(spec("gone", prompt))
    await entered(runner, start=18)
    desk.thread.cancel("gone", 0)
    await desk.ends(1)
    runner.shut_at = None
    runner.open.set()
    desk.thread.submit(spec("again", prompt))
    await desk.ends(2)
    assert desk.transcript.started["again", 0].cached_tokens == 18
    assert desk.transcript.tokens["again", 0] == expected_tokens(prompt, GREEDY)


async def test_a_step_that_serves_others_too_is_finished(runner: LayeredRunner) -> None:
    desk = Desk(make_engine(runner=runner, token_budget=18))
    desk.thread.submit(spec("stays", [1, 2, 3]))
    desk.thread.submit(spec("gone", [4, 5, 6, 7]))
    desk.thread.start()
    await entered(runner)
    assert runner.steps == [[0, 0]]
    desk.thread.cancel("gone", 0)
    runner.open.set()
    await desk.ends(2)
    desk.thread.stop()
    assert isinstance(desk.transcript.ends["gone", 0], Cancelled)
    assert desk.transcript.tokens["stays", 0] == expected_tokens([1, 2, 3], GREEDY)
    assert desk.thread.counters.steps_aborted_total == 0
    assert all(len(step) == 1 for step in runner.steps[1:]), "cancelled, and in a later step"


async def test_an_attempt_ends_with_all_its_choices(desk: Desk, runner: LayeredRunner) -> None:
    desk.transcript._by_choice = True
    for choice in range(2):
        desk.thread.submit(spec("a", [1, 2, 3], sampling=Sampling(8, n=2), choice=choice))
    await entered(runner)
    desk.thread.cancel("somebody else", 0)
    await asyncio.sleep(0.02)
    assert desk.thread.counters.steps_aborted_total == 0
    desk.thread.cancel("a", 0)
    await desk.ends(2)
    assert desk.thread.counters.steps_aborted_total == 1
    assert desk.thread.cancel_to_free.count == 1, "of one that is not there nothing is freed"


class SlowTending(Engine):
    """Somebody cancels while it looks after its tiers."""

    def maintain(self) -> StepResult | None:
        if self.has_work and (cancel := self.cancels.pop("now", None)) is not None:
            cancel()
        return super().maintain()

    cancels: dict[str, Callable[[], None]]


async def test_what_is_cancelled_before_a_step_begins_is_not_in_it(runner: LayeredRunner) -> None:
    made = make_engine(runner=runner)
    engine = SlowTending(runner, made.pool, made.scheduler, made.sequences.detokenizer)
    desk = Desk(engine)
    runner.open.set()
    desk.thread.submit(spec("gone", [1, 2, 3]))
    engine.cancels = {"now": lambda: desk.thread.cancel("gone", 0)}
    desk.thread.start()
    await desk.ends(1)
    desk.thread.stop()
    assert isinstance(desk.transcript.ends["gone", 0], Cancelled)
    assert runner.steps == []
    assert engine.pool.used == 0


def test_simulated_seconds_end_early() -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > 1:
            engine.give_up("r", 0)

    pace = FakePace(prefill_tokens_per_s=10.0, clock=lambda: 10.0 + sum(slept), sleep=sleep)
    engine = make_engine(runner=FakeRunner(**SHAPE, pace=pace), token_budget=512)  # type: ignore[arg-type]

    engine.add(spec("r", range(100)))  # ten seconds
    engine.step()
    assert 1 < sum(slept) < 1.1
    assert engine.counters.steps_aborted_total == 1
    assert engine.cancel("r", 0) == 1
    assert engine.cancel("r", 0) == 0
    engine.add(spec("next", [1], max_tokens=1))
    slept.clear()
    while engine.has_work:
        engine.step()
    assert sum(slept) < 0.2, "what was not simulated is not made up for"


def test_a_whole_simulated_step_takes_what_it_should() -> None:
    slept: list[float] = []
    pace = FakePace(prefill_tokens_per_s=10.0, clock=lambda: 10.0 + 1.01 * sum(slept), sleep=slept.append)
    runner = FakeRunner(**SHAPE, pace=pace)  # type: ignore[arg-type]
    runner.run([Slice(range(50), 0, range(13), Draw(GREEDY, 0, 0))])
    assert 1.01 * sum(slept) == pytest.approx(5.0, abs=0.01), "overslept parts do not add up"


def test_an_abort_needs_everybody() -> None:
    engine = make_engine()
    abort = engine.runner.abort
    for attempt in range(2):
        abort.ask("a", attempt)
    abort.check()  # between steps there is nothing to give up
    for request, attempt in (("a", 0), ("a", 1), ("b", 0)):
        engine.add(spec(request, [1, 2], attempt=attempt))
    both = list(engine.scheduler.waiting)
    abort.begin(both[:2])
    with pytest.raises(StepAborted):
        abort.check()
    abort.begin(both)
    abort.check()
    abort.ask("b", 1)
    abort.check()
    abort.ask("b", 0)
    with pytest.raises(StepAborted):
        abort.check()
    for attempt in range(2):
        abort.obeyed("a", attempt)
    abort.check()
    abort.ask("a", 0)
    abort.check()
    abort.ask("a", 1)
    with pytest.raises(StepAborted):
        abort.check()
    abort.end()
    abort.check()


async def test_a_request_that_ends_by_itself_is_as_good_as_cancelled(desk: Desk, runner: LayeredRunner) -> None:
    runner.open.set()
    desk.thread.submit(spec("r", [1]))
    await desk.ends(1)
    desk.thread.cancel("r", 0)
    desk.thread.submit(spec("later", [2]))
    await desk.ends(2)
    assert desk.transcript.ends["later", 0] is FinishReason.LENGTH
    assert desk.thread.counters.steps_aborted_total == desk.thread.cancel_to_free.count == 0
