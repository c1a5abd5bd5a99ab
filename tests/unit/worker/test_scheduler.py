"""Schedules at random: nothing is lost, starved, computed on wrong blocks or left behind."""

from __future__ import annotations

import random

import pytest
from engine_rig import Clock, Transcript, expected_tokens, make_engine, spec

from kvproto.errors import Cancelled, DeadlineExceeded, OutOfMemory
from kvproto.messages import FinishReason, Sampling
from services.worker.block_pool import BlockPool
from services.worker.scheduler import Scheduler

SCHEDULES = 1500


def prompt_of(chance: random.Random, stems: list[list[int]]) -> list[int]:
    """Prompts that share prefixes of any length."""
    stem = chance.choice(stems)
    return stem[: chance.randint(1, len(stem))] + [chance.randrange(3) for _ in range(chance.randint(0, 6))]


def run_schedule(seed: int) -> None:
    chance = random.Random(seed)
    clock = Clock()
    engine = make_engine(
        blocks=chance.randint(4, 24),
        block_size=chance.choice([1, 2, 4]),
        token_budget=chance.choice([1, 3, 8, 64]),
        slots=chance.choice([1, 2, 5, 16]),
        vocab_size=5,
        context_length=64,
        clock=clock,
    )
    stems = [[chance.randrange(5) for _ in range(chance.randint(1, 20))] for _ in range(2)]
    transcript, specs, paused, cancelled = Transcript(), {}, set(), set()
    to_come = chance.randint(1, 12)
    for step in range(2000):
        clock.now += 0.01
        while to_come and (chance.random() < 0.4 or not engine.has_work):
            to_come -= 1
            sampling = Sampling(
                chance.randint(1, 20), temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(3), ignore_eos=True
            )
            request = spec(
                f"r{to_come}",
                prompt_of(chance, stems),
                sampling=sampling,
                priority=chance.choice([0, 0, 1]),
                deadline=clock.now + 0.05 if chance.random() < 0.1 else None,
            )
            try:
                engine.add(request)
            except OutOfMemory:
                assert engine.pool.blocks_for(len(request.prompt_ids)) > engine.pool.num_blocks
                continue
            specs[request.request, 0] = request
        if specs and chance.random() < 0.1:
            victim = chance.choice(list(specs))[0]
            match chance.choice(["cancel", "pause", "resume"]):
                case "cancel":
                    engine.cancel(victim, 0)
                    cancelled.add((victim, 0))
                case "pause":
                    engine.pause(victim)
                    paused.add(victim)
                case "resume":
                    engine.resume(victim)
        if not engine.has_work and not to_come:
            for request in paused:
                engine.resume(request)
            if not engine.has_work:
                break
        busy = engine.has_work
        before = len(transcript.ends), sum(map(len, transcript.tokens.values())), transcript.fed
        transcript.take(engine.step())
        engine.check_integrity()
        after = len(transcript.ends), sum(map(len, transcript.tokens.values())), transcript.fed
        assert before != after or not busy, f"seed {seed}, step {step}: a step without progress"
    else:
        raise AssertionError(f"seed {seed}: never ends")
    assert set(transcript.ends) == set(specs), f"seed {seed}"
    assert engine.pool.used == 0
    for key, request in specs.items():
        expected = expected_tokens(request.prompt_ids, request.sampling, vocab_size=5)
        end, got = transcript.ends[key], transcript.tokens[key]
        assert got == expected[: len(got)], f"seed {seed}: {key} computed on wrong blocks"
        if isinstance(end, FinishReason):
            assert len(got) == len(expected)
        elif isinstance(end, OutOfMemory):
            assert engine.pool.blocks_for(len(request.prompt_ids) + len(got)) > engine.pool.num_blocks
        else:
            assert (isinstance(end, Cancelled) and key in cancelled) or isinstance(end, DeadlineExceeded)


def test_random_schedules() -> None:
    for seed in range(SCHEDULES):
        run_schedule(seed)


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


@pytest.mark.parametrize(("budget", "slots"), [(0, 1), (1, 0)])
def test_refuses_a_scheduler_that_could_do_nothing(budget: int, slots: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Scheduler(BlockPool(1, 1), token_budget=budget, slots=slots)
