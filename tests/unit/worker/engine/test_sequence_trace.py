"""What the engine notes of a traced sequence: when it ran, what was fed and drawn; nothing of the others."""

from __future__ import annotations

import pytest
from engine_rig import Clock, make_engine, spec

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.port.sequence_spec import SequenceTrace
from kvproto.messages import ChoiceFinished


def run(engine: Engine, clock: Clock, steps: int = 1000) -> int:
    """Each step takes a second; returns how many there were."""
    for count in range(steps):
        if not engine.has_work:
            return count
        clock.now += 1.0
        engine.step()
        engine.check_integrity()
    return steps


def test_phases_of_a_sequence_that_waits_for_a_slot() -> None:
    clock, trace = Clock(), SequenceTrace()
    engine = make_engine(slots=1, token_budget=16, clock=clock)
    engine.add(spec("first", range(4), max_tokens=5))
    engine.add(spec("traced", range(100, 140), max_tokens=6, trace=trace))
    assert trace == SequenceTrace(enqueued=1000.0)
    first = 5  # steps of the other one
    run(engine, clock)
    assert (trace.enqueued, trace.admitted) == (1000.0, 1000.0 + first + 1)
    assert trace.admitted is not None
    assert trace.prefilled == trace.admitted + 2, "three steps of 16 tokens at most, and time stands still within one"
    assert trace.ended == trace.prefilled + 5
    assert (trace.chunks, trace.fed_tokens, trace.drawn_tokens, trace.steps) == (3, 40, 6, 5)
    assert (trace.preemptions, trace.restores) == (0, [])


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_answers(max_tokens: int) -> None:
    clock, trace = Clock(), SequenceTrace()
    engine = make_engine(clock=clock)
    engine.add(spec("traced", range(8), max_tokens=max_tokens, trace=trace))
    run(engine, clock)
    assert (trace.drawn_tokens, trace.steps, trace.chunks) == (max_tokens, max_tokens - 1, 1)
    assert trace.prefilled is not None
    assert trace.ended == trace.prefilled + max_tokens - 1


def test_a_continued_attempt_counts_what_it_draws_itself() -> None:
    clock, trace = Clock(), SequenceTrace()
    engine = make_engine(clock=clock)
    engine.add(spec("traced", range(8), max_tokens=6, output_ids=(1, 2, 3, 4), attempt=1, trace=trace))
    run(engine, clock)
    assert (trace.fed_tokens, trace.drawn_tokens, trace.steps) == (12, 2, 1)


def test_one_that_never_ran_has_an_end_alone() -> None:
    clock, trace = Clock(), SequenceTrace()
    engine = make_engine(slots=1, clock=clock)
    engine.add(spec("other", range(4), max_tokens=50))
    engine.add(spec("traced", range(4), trace=trace))
    run(engine, clock, steps=3)
    engine.cancel("traced", 0)
    assert (trace.admitted, trace.prefilled, trace.ended) == (None, None, 1003.0)
    assert not engine._traced.undrawn


def test_preemptions_and_what_is_computed_again() -> None:
    clock, traces = Clock(), [SequenceTrace() for _ in range(4)]
    engine = make_engine(blocks=12, block_size=4, clock=clock)
    for number, trace in enumerate(traces):
        engine.add(spec(f"r{number}", range(10 * number, 10 * number + 8), max_tokens=20, trace=trace))
    run(engine, clock)
    assert sum(trace.preemptions for trace in traces) == engine.scheduler.preemptions > 0
    for trace in traces:
        assert trace.drawn_tokens == 20
        assert (trace.chunks > 1) == (trace.preemptions > 0)
        assert trace.enqueued is not None
        assert trace.ended is not None
    assert not engine._traced.undrawn


def test_tracing_changes_nothing_that_is_generated() -> None:
    def outputs(*, traced: bool) -> list[object]:
        engine = make_engine(blocks=12, block_size=4, slots=3)
        for number in range(5):
            trace = SequenceTrace() if traced else None
            engine.add(spec(f"r{number}", range(7 * number, 7 * number + 9), max_tokens=12, trace=trace))
        found: list[object] = []
        while engine.has_work:
            found += [(type(one), one) for one in engine.step().outputs if isinstance(one, ChoiceFinished)]
        return found

    assert outputs(traced=True) == outputs(traced=False)
