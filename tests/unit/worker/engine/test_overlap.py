"""Where a device computes by itself, a step's tokens become text during the next step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine_rig import Clock, Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import Cancelled, DeadlineExceeded
from kvproto.messages import FinishReason, Sampling, Tokens
from kvsampling.draw import Ran

PROMPT = range(10)


def made(*, overlaps: bool = True, clock: Clock | None = None, runner: FakeRunner | None = None) -> Engine:
    runner = runner or FakeRunner(num_blocks=64, block_size=4, vocab_size=1000, context_length=512)
    runner.overlaps = overlaps
    return make_engine(runner=runner, clock=clock)


def drawn(count: int) -> list[int]:
    return expected_tokens(PROMPT, Sampling(count, temperature=0.0))


def told(result: StepResult) -> int:
    return sum(len(output.ids) for output in result.outputs if isinstance(output, Tokens))


def test_text_leaves_while_the_next_step_runs() -> None:
    delivered: list[StepResult] = []
    while_it_ran: list[int] = []

    class Noting(FakeRunner):
        def run(self, slices: Sequence[Slice]) -> list[Ran]:
            ran = super().run(slices)
            while_it_ran.append(sum(map(told, delivered)))
            return ran

    engine = made(runner=Noting(num_blocks=64, block_size=4, vocab_size=1000, context_length=512))
    engine.deliver = delivered.append
    engine.add(spec("r", PROMPT, max_tokens=4))
    transcript = Transcript()
    while engine.has_work:
        last = engine.step()
        for result in delivered:
            transcript.take(result)
        delivered.clear()
        transcript.take(last)
    assert while_it_ran == [0, 1, 1, 1], "each step's token in the next one"
    assert told(last) == 1, "the last one with its end"
    assert transcript.tokens["r", 0] == drawn(4)


@pytest.mark.parametrize("at", range(1, 9))
def test_what_ran_past_a_stop_string_is_taken_back(at: int) -> None:
    """Whatever block border it falls on: as if the step had waited."""
    stop = f" {drawn(9)[at]} "
    seen = []
    for overlaps in (False, True):
        engine = made(overlaps=overlaps)
        engine.add(spec("r", PROMPT, sampling=Sampling(12, temperature=0.0, stop=(stop,))))
        transcript = Transcript().run(engine)
        assert transcript.ends["r", 0] is FinishReason.STOP
        assert engine.pool.used == 0
        engine.check_integrity()
        again = [*PROMPT, *drawn(12)]
        engine.add(spec("again", again, max_tokens=1))
        cached = Transcript().run(engine).started["again", 0].cached_tokens
        costs = engine.counters.costs.of("")
        seen.append((transcript.text, transcript.finished, engine.kv.holdings(), cached, costs.generated_tokens))
    assert seen[0] == seen[1]


def test_a_drawn_token_whose_text_a_cancel_overtakes_is_not_told_and_not_kept() -> None:
    engine = made()
    engine.add(spec("r", PROMPT, max_tokens=8))
    transcript = Transcript()
    for _ in range(3):
        transcript.take(engine.step())
    engine.cancel("r", 0)
    transcript.run(engine)
    assert isinstance(transcript.ends["r", 0], Cancelled)
    assert transcript.tokens["r", 0] == drawn(2), "two of three drawn ones"
    assert engine.kv.inspect(spec("r", PROMPT).root, [*PROMPT, *drawn(8)]).cached_tokens <= len(PROMPT) + 2
    assert engine.pool.used == 0


def test_what_fails_in_a_plan_has_told_its_text_before() -> None:
    clock = Clock()
    engine = made(clock=clock)
    engine.add(spec("r", PROMPT, max_tokens=8, deadline=clock.now + 1))
    transcript = Transcript()
    for _ in range(3):
        transcript.take(engine.step())
    clock.now += 2
    transcript.run(engine)
    assert isinstance(transcript.ends["r", 0], DeadlineExceeded)
    assert transcript.tokens["r", 0] == drawn(3)


def test_what_is_paused_has_told_its_text() -> None:
    engine, delivered = made(), list[StepResult]()
    engine.deliver = delivered.append
    engine.add(spec("r", PROMPT, max_tokens=8))
    results = [engine.step() for _ in range(3)]
    engine.pause("r", 0)
    assert sum(map(told, delivered + results)) == 3
    assert not engine.has_work
    engine.resume("r", 0)
    while engine.has_work:
        results.append(engine.step())
    assert sum(map(told, delivered + results)) == 8
