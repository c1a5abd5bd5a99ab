"""The engine's thread and the loop when something goes wrong: nobody waits for ever. The rest is in `tests/engines`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from engine_rig import Transcript, make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.fake import FakePace, FakeRunner
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import Sampling
from kvsampling.draw import Drawn
from tests.support.waiting import LIMIT_S


class Desk:
    """The loop's side."""

    def __init__(self, engine: Engine) -> None:
        self.transcript = Transcript()
        self.crashes: list[BaseException] = []
        self.thread = EngineThread(engine, self.on_result, asyncio.get_running_loop(), self.crashes.append)

    def on_result(self, results: list[StepResult]) -> None:
        for result in results:
            self.transcript.take(result)

    async def ends(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.transcript.ends) < count:
                await asyncio.sleep(0.001)


async def test_call_runs_on_the_engine_thread_and_carries_exceptions() -> None:
    desk = Desk(make_engine())
    desk.thread.start()
    assert await desk.thread.call(lambda engine: threading.get_ident()) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await desk.thread.call(lambda engine: 1 // 0)
    desk.thread.submit(spec("r", [1]))
    await desk.ends(1)
    desk.thread.stop()


class GatedRunner(FakeRunner):
    """Computes once it is let."""

    def __init__(self, **fake: object) -> None:
        super().__init__(**fake)  # type: ignore[arg-type]
        self.entered, self.gate = threading.Event(), threading.Event()

    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        self.entered.set()
        assert self.gate.wait(2 * LIMIT_S)
        return super().run(slices)


async def test_the_age_of_the_step_under_way() -> None:
    runner = GatedRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=64)
    desk = Desk(make_engine(runner=runner))
    desk.thread.start()
    try:
        assert desk.thread.step_age_s == 0.0
        desk.thread.submit(spec("r", [1]))
        assert await asyncio.to_thread(runner.entered.wait, 10)
        await asyncio.sleep(0.03)
        age = desk.thread.step_age_s
        assert age >= 0.03
        await asyncio.sleep(0.01)
        assert desk.thread.step_age_s > age
        runner.gate.set()
        await desk.ends(1)
        async with asyncio.timeout(LIMIT_S):
            while desk.thread.step_age_s:
                await asyncio.sleep(0.001)
    finally:
        runner.gate.set()
        desk.thread.stop()
    assert desk.thread.step_age_s == 0.0


class CrashingRunner(FakeRunner):
    def run(self, slices: Sequence[Slice]) -> list[Drawn]:
        if slices[0].start >= 3:
            raise RuntimeError("broken kernel")
        return super().run(slices)


async def test_crash_fails_everything_as_retryable_and_is_told() -> None:
    desk = Desk(make_engine(runner=CrashingRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=64)))
    desk.thread.start()
    for at in range(3):
        desk.thread.submit(spec(f"r{at}", [1, 2, at]))
    await desk.ends(3)
    for end in desk.transcript.ends.values():
        assert isinstance(end, EngineFailure)
        assert end.retryable
    async with asyncio.timeout(LIMIT_S):
        while not desk.crashes:
            await asyncio.sleep(0.001)
    assert str(desk.crashes[0]) == "broken kernel"
    desk.thread.submit(spec("late", [1]))
    await desk.ends(4)
    assert isinstance(desk.transcript.ends["late", 0], EngineFailure)
    with pytest.raises(EngineFailure):
        await desk.thread.call(lambda engine: 1)
    desk.thread.stop()


async def test_every_choice_ends_when_the_engine_crashes_or_refuses() -> None:
    desk = Desk(make_engine(runner=CrashingRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=64)))
    desk.transcript = Transcript(by_choice=True)
    desk.thread.start()
    for choice in range(3):
        desk.thread.submit(spec("refused", [], choice=choice))
    await desk.ends(3)
    for choice in range(3):
        desk.thread.submit(spec("r", [1, 2, 3], sampling=Sampling(8, n=3), choice=choice))
    await desk.ends(6)
    for choice in range(3):
        assert isinstance(desk.transcript.ends["refused", choice], InvalidRequest)
        end = desk.transcript.ends["r", choice]
        assert isinstance(end, EngineFailure)
        assert end.retryable
    desk.thread.stop()


async def test_stop_ends_what_runs() -> None:
    desk = Desk(make_engine(blocks=512, context_length=2_000, pace=FakePace(step_seconds=0.001)))
    desk.thread.start()
    desk.thread.submit(spec("r", [1], max_tokens=1_900))
    while not desk.transcript.started:
        await asyncio.sleep(0.001)
    desk.thread.stop()
    await desk.ends(1)
    assert isinstance(desk.transcript.ends["r", 0], EngineFailure)
    desk.thread.stop()


async def test_what_is_asked_as_it_stops_fails_as_retryable() -> None:
    """Also where `stop` runs on another thread, as it does in a worker: no future is touched there."""
    runner = GatedRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=64)
    desk = Desk(make_engine(runner=runner))
    desk.thread.start()
    desk.thread.submit(spec("r", [1]))
    assert await asyncio.to_thread(runner.entered.wait, LIMIT_S)
    asked = desk.thread.holdings()
    stopping = asyncio.create_task(asyncio.to_thread(desk.thread.stop))
    await asyncio.sleep(0.01)
    late = desk.thread.holdings()
    runner.gate.set()
    for question in (asked, late):
        with pytest.raises(EngineFailure, match="stopped"):
            await asyncio.wait_for(question, LIMIT_S)
    await stopping


async def test_one_that_never_ran_answers_once_it_is_stopped() -> None:
    desk = Desk(make_engine())
    asked = desk.thread.holdings()
    desk.thread.submit(spec("r", [1]))
    desk.thread.stop()
    with pytest.raises(EngineFailure, match="stopped"):
        await asyncio.wait_for(asked, LIMIT_S)
    await desk.ends(1)


async def test_results_that_cannot_be_taken_are_a_crash() -> None:
    """Streams would wait for them for ever. Nothing more is computed or taken then; who asks the engine is answered."""
    desk = Desk(make_engine(blocks=512, context_length=2_000, pace=FakePace(step_seconds=0.001)))
    taken = 0

    def take(results: list[StepResult]) -> None:
        nonlocal taken
        taken += 1
        if taken == 3:
            raise RuntimeError("broken frames")

    desk.thread.on_result = take
    desk.thread.start()
    desk.thread.submit(spec("r", [1], max_tokens=1_900))
    async with asyncio.timeout(LIMIT_S):
        while not desk.crashes:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineFailure):
            while True:
                await desk.thread.call(lambda engine: 1)
    assert [str(error) for error in desk.crashes] == ["broken frames"]
    assert taken == 3
    desk.thread.stop()


async def test_books_that_do_not_balance_are_a_crash() -> None:
    engine = make_engine()
    desk = Desk(engine)
    engine.pool.allocate(1)  # nobody's
    desk.thread.start()
    async with asyncio.timeout(LIMIT_S):
        while not desk.crashes:
            await asyncio.sleep(0.001)
    assert isinstance(desk.crashes[0], AssertionError)
    desk.thread.stop()
