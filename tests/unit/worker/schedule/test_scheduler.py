"""Who runs when: budgets, priorities, deadlines, fairness, preemption."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import pytest
from engine_rig import Clock, Transcript, expected_tokens, make_engine, spec

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import AGE_S, Sequence
from kvfleet.worker.schedule.step_plan import Slice
from kvfleet.worker.schedule.waiting_queue import Group, ServiceOrder
from kvproto.errors import DeadlineExceeded, OutOfMemory
from kvproto.messages import FinishReason, Sampling
from kvsampling.draw import Drawn


def test_decodes_go_first_and_prompts_are_chunked() -> None:
    engine = make_engine(token_budget=6)
    engine.add(spec("short", [1, 2, 3]))
    engine.step()
    engine.add(spec("long", range(20)))
    assert [engine.step().fed_tokens for _ in range(4)] == [6, 6, 6, 6]  # a decode and five tokens of the prompt each
    assert [part.computed for part in engine.scheduler.running] == [7, 20]


def test_first_come_first_served_within_a_priority() -> None:
    engine = make_engine(slots=1)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5)):
        engine.add(spec(name, [1, 2], max_tokens=2, priority=priority))
    order = [key[0] for key in Transcript().run(engine).ends]
    assert order == ["urgent", "a", "b"]


def test_youngest_of_least_priority_is_preempted() -> None:
    engine = make_engine(blocks=9, block_size=2, token_budget=64)
    engine.add(spec("old", [1, 2, 3], max_tokens=6))
    engine.add(spec("low", [4, 5, 6], max_tokens=6, priority=-1))
    engine.add(spec("young", [7, 8, 9], max_tokens=6))
    preempted = []
    transcript = Transcript()
    while engine.has_work:
        running = {s.spec.request for s in engine.scheduler.running}
        transcript.take(engine.step())
        engine.check_integrity()
        waiting = {s.spec.request for s in engine.scheduler.waiting}
        preempted += sorted(running & waiting)
    assert engine.scheduler.preemptions >= 1
    assert preempted[0] == "low"
    assert "old" not in preempted
    for name, prompt in (("old", [1, 2, 3]), ("low", [4, 5, 6]), ("young", [7, 8, 9])):
        assert transcript.tokens[name, 0] == expected_tokens(prompt, Sampling(6, temperature=0.0))


def test_sequence_that_alone_cannot_fit_fails_and_the_rest_go_on() -> None:
    engine = make_engine(blocks=4, block_size=4)
    engine.add(spec("huge", [1, 2, 3], max_tokens=100))
    engine.add(spec("small", [4, 5, 6], max_tokens=3))
    transcript = Transcript().run(engine)
    assert isinstance(transcript.ends["huge", 0], OutOfMemory)
    assert "5 blocks, this worker has 4" in str(transcript.ends["huge", 0])
    assert transcript.ends["small", 0] is FinishReason.LENGTH
    assert engine.pool.used == 0


def test_waiting_past_the_deadline_fails() -> None:
    clock = Clock()
    engine = make_engine(slots=1, clock=clock)
    engine.add(spec("first", [1, 2], max_tokens=20))
    engine.add(spec("late", [3, 4], deadline=clock.now + 1.0))
    transcript = Transcript()
    transcript.take(engine.step())
    clock.now += 1.0
    transcript.take(engine.step())
    assert isinstance(transcript.ends["late", 0], DeadlineExceeded)
    assert ("late", 0) not in transcript.started


def test_same_prefix_arriving_together_is_computed_once() -> None:
    engine = make_engine(token_budget=512, block_size=4, slots=16)
    prefix = list(range(100, 140))
    for at in range(8):
        engine.add(spec(f"r{at}", [*prefix, at], max_tokens=1))
    transcript = Transcript().run(engine)
    assert transcript.fed == 41 + 7
    assert [transcript.started[f"r{at}", 0].cached_tokens for at in range(8)] == [0] + [40] * 7


def test_who_waits_for_a_prefix_gives_its_turn_to_who_computes_it() -> None:
    """Else a request of high priority would wait for one that nobody serves."""
    engine, transcript = make_engine(token_budget=4, block_size=4), Transcript()
    prefix = list(range(100, 116))
    engine.add(spec("low", [*prefix, 1], max_tokens=1, priority=-1))
    transcript.take(engine.step())
    engine.add(spec("high", [*prefix, 2], max_tokens=1, priority=1))
    for at in range(4):
        engine.add(spec(f"between{at}", range(200 + at * 20, 220 + at * 20), max_tokens=1))
    transcript.run(engine)
    assert set(list(transcript.ends)[:2]) == {("low", 0), ("high", 0)}
    assert transcript.started["high", 0].cached_tokens == 16


def test_nobody_is_admitted_beyond_what_the_step_can_feed() -> None:
    """Whoever is admitted holds blocks, so those whom the pace leaves nothing for go on waiting."""
    clock = Clock()

    class Slow(FakeRunner):
        def run(self, slices: Items[Slice]) -> list[Drawn]:
            clock.now += 0.02 + 0.002 * sum(len(part.ids) for part in slices if len(part.ids) > 1)
            return super().run(slices)

    runner = Slow(num_blocks=512, block_size=4, vocab_size=1000, context_length=512)
    engine, transcript = make_engine(runner=runner, token_budget=512, slots=64, clock=clock), Transcript()
    engine.add(spec("stream", [1, 2, 3], max_tokens=200))
    for _ in range(5):
        transcript.take(engine.step())
    for at in range(20):
        engine.add(spec(f"r{at}", range(at * 20, at * 20 + 20), max_tokens=1))
    while len(transcript.ends) < 20:
        result = engine.step()
        transcript.take(result)
        assert result.sequences >= len(engine.scheduler.running)
        assert result.seconds <= 0.02 * 4
    transcript.run(engine)


# ---------------------------------------------------------------------- priorities


def test_higher_priority_takes_a_slot_from_a_lower_one() -> None:
    engine, transcript = make_engine(slots=2), Transcript()
    for at in range(3):
        engine.add(spec(f"low{at}", [at, 1, 2]))
    transcript.take(engine.step())
    engine.add(spec("high", [7, 8, 9], priority=1))
    transcript.take(engine.step())
    assert ("high", 0) in transcript.started
    assert {s.spec.request for s in engine.scheduler.running} == {"low0", "high"}
    transcript.run(engine)
    assert [key[0] for key in transcript.ends][:2] == ["low0", "high"]
    assert engine.scheduler.preemptions == 1
    for at in range(3):
        assert transcript.tokens[f"low{at}", 0] == expected_tokens([at, 1, 2], Sampling(8, temperature=0.0))


def test_higher_priority_takes_blocks_but_not_in_vain() -> None:
    engine, transcript = make_engine(blocks=12, block_size=4, token_budget=64), Transcript()
    engine.add(spec("same", range(16), max_tokens=9, priority=1))
    engine.add(spec("low", range(100, 116), max_tokens=9))
    transcript.take(engine.step())
    engine.add(spec("huge", range(200, 240), max_tokens=1, priority=1))  # 10 blocks: not even without the low one
    transcript.take(engine.step())
    assert {s.spec.request for s in engine.scheduler.running} == {"same", "low"}
    engine.cancel("huge", 0)
    engine.add(spec("high", range(300, 316), max_tokens=1, priority=1))
    transcript.take(engine.step())
    assert {s.spec.request for s in engine.scheduler.running} | {"high"} == {"same", "high"}
    transcript.run(engine)
    assert transcript.tokens["low", 0] == expected_tokens(range(100, 116), Sampling(9, temperature=0.0))


def test_prompt_of_higher_priority_goes_before_one_already_begun() -> None:
    engine, transcript = make_engine(token_budget=8), Transcript()
    engine.add(spec("begun", range(60), max_tokens=1))
    transcript.take(engine.step())
    engine.add(spec("high", range(100, 108), max_tokens=1, priority=1))
    transcript.take(engine.step())
    assert ("high", 0) in transcript.ends
    transcript.run(engine)


def test_long_waiting_outranks_any_priority_in_the_end() -> None:
    """High ones keep coming, each after the one before; the low one gets its turn, and keeps it."""
    clock = Clock()
    engine, transcript = make_engine(slots=1, clock=clock), Transcript()
    engine.add(spec("high", [0, 1], priority=2, max_tokens=4))
    engine.add(spec("low", [2, 3]))
    for at in range(60):
        engine.add(spec(f"high{at}", [at, 1], priority=2, max_tokens=4))
        for _ in range(4):
            clock.now += 1.0
            transcript.take(engine.step())
        if ("low", 0) in transcript.ends:
            break
    waited = transcript.started["low", 0].queue_seconds
    assert 2 * AGE_S <= waited <= 2 * AGE_S + 10
    assert engine.scheduler.preemptions == 0


# ---------------------------------------------------------------------- deadlines


def test_earliest_deadline_goes_first_within_a_priority() -> None:
    clock = Clock()
    engine = make_engine(slots=1, clock=clock)
    for name, deadline in (("a", 50.0), ("plain", None), ("b", 30.0), ("c", 40.0)):
        due = None if deadline is None else clock.now + deadline
        engine.add(spec(name, [1, 2], max_tokens=2, deadline=due))
    order = [key[0] for key in Transcript().run(engine).ends]
    assert order == ["b", "plain", "c", "a"]  # the one without a deadline keeps its place


@pytest.mark.parametrize("paused", [False, True])
def test_running_past_the_deadline_fails_at_the_next_step(paused: bool) -> None:
    clock = Clock()
    engine, transcript = make_engine(clock=clock), Transcript()
    engine.add(spec("late", [1, 2], max_tokens=100, deadline=clock.now + 1.0))
    engine.add(spec("other", [3, 4], max_tokens=10, deadline=clock.now + 9.0))
    for _ in range(3):
        transcript.take(engine.step())
    if paused:
        engine.pause("late", 0)
    clock.now += 1.0
    if paused:
        engine.resume("late", 0)
    transcript.take(engine.step())
    end = transcript.ends["late", 0]
    assert isinstance(end, DeadlineExceeded)
    assert "1.000 s after arrival, after 3 tokens" in str(end)
    assert transcript.run(engine).ends["other", 0] is FinishReason.LENGTH
    assert engine.pool.used == 0


def looked_at(waiting: int, monkeypatch: pytest.MonkeyPatch, **fields: object) -> int:
    """How many waiting sequences a step looks at that has room for none of them."""
    clock = Clock()
    engine = make_engine(blocks=8, block_size=4, token_budget=64, clock=clock, **fields)  # type: ignore[arg-type]
    engine.add(spec("runs", range(28), max_tokens=4))
    engine.step()
    for at in range(waiting):
        engine.add(spec(f"w{at}", [1, 2, at, *range(20)], deadline=clock.now + 9 + at % 3 if at % 2 else None))
    looks = 0
    key, group = ServiceOrder._key, Group.__iter__

    def counted(order: ServiceOrder, sequence: Sequence) -> object:
        nonlocal looks
        looks += 1
        return key(order, sequence)

    def each(of: Group) -> Iterator[Sequence]:
        nonlocal looks
        for sequence in group(of):
            looks += 1
            yield sequence

    with monkeypatch.context() as patched:
        patched.setattr(ServiceOrder, "_key", counted)
        patched.setattr(Group, "__iter__", each)
        engine.step()
    assert len(engine.scheduler.waiting) == waiting
    engine.check_integrity()
    return looks


@pytest.mark.parametrize("slots", [1, 8])
def test_a_step_without_room_looks_at_few_of_those_that_wait(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(400, monkeypatch, slots=slots) == looked_at(20, monkeypatch, slots=slots) < 10


def test_those_that_wait_can_leave_while_they_are_gone_through() -> None:
    """In the order of service, whoever has left since: the rest neither twice nor skipped."""
    for leaving in range(1, 4):
        engine = make_engine()
        for at in range(12):
            engine.add(spec(f"s{at}", [1, at], deadline=1e9 - at if at % 3 else None))
        (group,) = engine.scheduler.waiting.groups()
        expected = [sequence.spec.request for sequence in group]
        assert expected == ["s0", "s11", "s10", "s3", "s8", "s7", "s6", "s5", "s4", "s9", "s2", "s1"]
        seen = []
        for at, sequence in enumerate(group):
            seen.append(sequence.spec.request)
            if at % leaving == 0:
                engine.scheduler.waiting.remove(sequence)
        assert seen == expected


# ---------------------------------------------------------------------- tenants


def test_a_tenant_that_floods_does_not_starve_another() -> None:
    engine, transcript = make_engine(slots=4, blocks=256), Transcript()
    for at in range(60):
        engine.add(spec(f"flood{at}", [at % 7, at, 1], tenant="flood"))
    for _ in range(10):
        transcript.take(engine.step())
    engine.add(spec("guest", [900, 901], tenant="guest"))
    done = len(transcript.ends)
    transcript.take(engine.step())
    while ("guest", 0) not in transcript.ends:
        transcript.take(engine.step())
    assert len(transcript.ends) - done <= 4 + 4  # those that ran, and those beside it
    transcript.run(engine)


def test_two_busy_tenants_are_served_alike_whatever_they_ask_for() -> None:
    engine = make_engine(slots=6, blocks=1024, token_budget=24)
    for at in range(150):
        engine.add(spec(f"long{at}", range(at, at + 30), tenant="long", max_tokens=4))
        engine.add(spec(f"short{at}", [at, at + 1], tenant="short", max_tokens=12))
    shares = {s.spec.tenant: s.share for s in engine.scheduler.waiting}
    for _ in range(150):
        engine.step()
    served = {tenant: share.served for tenant, share in shares.items()}
    assert sum(served.values()) > 1500
    assert abs(served["long"] - served["short"]) <= 6 * 33
    engine.cancel("nobody", 0)


def test_prompts_of_two_tenants_take_turns() -> None:
    engine, transcript = make_engine(token_budget=8), Transcript()
    engine.add(spec("one", range(200), tenant="one", max_tokens=1))
    transcript.take(engine.step())
    engine.add(spec("two", range(300, 340), tenant="two", max_tokens=1))
    for _ in range(11):
        transcript.take(engine.step())
    assert ("two", 0) in transcript.ends
    assert ("one", 0) not in transcript.ends


def test_cached_and_repeated_tokens_are_not_charged() -> None:
    engine = make_engine(slots=1)
    for at in range(2):
        engine.add(spec(f"r{at}", range(16), tenant=f"t{at}", max_tokens=1))
    shares = {s.spec.tenant: s.share for s in engine.scheduler.waiting}
    Transcript().run(engine)
    assert {tenant: share.served for tenant, share in shares.items()} == {"t0": 16, "t1": 1}
    engine.add(spec("p", range(50, 70), tenant="t", max_tokens=9))
    for _ in range(4):
        engine.step()
    (sequence,) = engine.scheduler.running
    share = sequence.share
    engine.scheduler._preempt(sequence)
    while engine.has_work:
        engine.step()
    assert share.served == 20 + 8


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(("budget", "slots"), [(0, 1), (1, 0)])
def test_refuses_a_scheduler_that_could_do_nothing(budget: int, slots: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Scheduler(BlockPool(1, 1), token_budget=budget, slots=slots)
