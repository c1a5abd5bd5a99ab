"""Schedules at random: nothing is lost, starved, computed on wrong blocks, announced wrongly or left behind.

Small pools, shared prefixes, choices, priorities, deadlines, tenants, cancels (some of all that a step computes, which
ends it), pauses, attempts that go on, sliding windows and contexts, and a runner that runs out of memory: all at once,
with the books checked after every step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from engine_rig import ROOT, Clock, Transcript, WindowedRunner, expected_tokens, make_engine, spec

from kvfleet.worker.model.fake import FakeRunner
from kvfleet.worker.port.outputs import StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import Cancelled, ContextLengthExceeded, DeadlineExceeded, KvfleetError, OutOfMemory
from kvproto.messages import FinishReason, Overflow, Sampling, Tier
from kvsampling.draw import Drawn

SCHEDULES = 2000
MOST_STEPS = 3000
Key = tuple[str, int]


class Schedule:
    """One random schedule: an engine, what it was asked, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.clock = Clock()
        self.window = chance.choice([None, None, None, 1, 3, 7])
        self.context = chance.choice([64, 64, 12])
        self.memory_errors = chance.choice([0.0, 0.0, 0.0, 0.02])
        self.aborts = chance.choice([0.0, 0.0, 0.02])
        self.given_up: list[str] = []
        shape = {
            "num_blocks": chance.randint(4, 24),
            "block_size": chance.choice([1, 2, 4]),
            "vocab_size": 5,
            "context_length": self.context,
            "num_states": 0 if seed % 4 else 1 + seed // 4 % 12,  # of a hybrid model
        }
        runner = WindowedRunner(window=self.window, **shape) if self.window else FakeRunner(**shape)  # type: ignore[arg-type]
        runner.overlaps = chance.random() < 0.5
        self._run = runner.run
        runner.run = self.run_slices  # type: ignore[method-assign]
        self.engine = make_engine(
            runner=runner,
            token_budget=chance.choice([1, 3, 8, 64]),
            slots=chance.choice([1, 2, 5, 16]),
            clock=self.clock,
            every=1 + seed % 3,
        )
        self.stems = [[chance.randrange(5) for _ in range(chance.randint(1, 20))] for _ in range(2)]
        self.transcript = Transcript(by_choice=True)
        self.specs: dict[Key, SequenceSpec] = {}
        self.expected: dict[Key, list[int]] = {}
        self.paused: set[str] = set()
        self.cancelled: set[str] = set()
        self.parents: dict[bytes, bytes] = {}  # of announced blocks

    def attempt_of(self, request: str) -> int:
        return self.specs[request, 0].attempt

    def run_slices(self, slices: Sequence[Slice]) -> list[Drawn]:
        """Steps take time, so that the pacer has something to measure."""
        self.clock.now += 0.002 + 0.0005 * sum(len(part.ids) for part in slices)
        if self.chance.random() < self.memory_errors:
            raise OutOfMemory("not this time")
        if self.chance.random() < self.aborts:
            self.abort(slices)
        return self._run(slices)

    def abort(self, slices: Sequence[Slice]) -> None:
        """All that this step computes is cancelled while it runs; what it wrote so far may be anything."""
        runner = self.engine.runner
        assert isinstance(runner, FakeRunner)
        for part in slices:
            for position in range(part.start, part.end):
                at, offset = divmod(position, runner.block_size)
                runner.slots[part.blocks[at] * runner.block_size + offset] = self.chance.randrange(2**60)
        self.given_up = sorted({sequence.spec.request for sequence in runner.abort._sequences})
        for request in self.given_up:
            self.engine.give_up(request, self.attempt_of(request))

    # ------------------------------------------------------------------ what happens

    def arrive(self, name: str) -> None:
        chance = self.chance
        overflow = Overflow.ERROR if self.context == 64 else chance.choice(list(Overflow))
        sampling = Sampling(
            chance.randint(1, 14),
            temperature=chance.choice([0.0, 1.0]),
            seed=chance.randrange(3),
            ignore_eos=True,
            n=chance.choice([1, 1, 1, 2, 4]),
            overflow=overflow,
        )
        stem = chance.choice(self.stems)
        prompt = stem[: chance.randint(1, len(stem))] + [chance.randrange(3) for _ in range(chance.randint(0, 6))]
        asked = spec(
            name,
            prompt,
            sampling=sampling,
            priority=chance.choice([0, 0, 0, 1, 3]),
            deadline=self.clock.now + chance.choice([0.03, 0.3, 30.0]) if chance.random() < 0.2 else None,
            tenant=chance.choice("abc"),
        )
        resumed = chance.random() < 0.15
        for choice in range(sampling.n):
            one = replace(asked, choice=choice)
            try:
                self.engine.add(one)
            except ContextLengthExceeded:
                return
            except OutOfMemory:
                assert self.blocks_at_once(one, 0) > self.engine.pool.num_blocks
                return
            key = name, choice
            self.specs[key] = one
            self.expected[key] = expected_tokens(
                prompt, sampling, vocab_size=5, choice=choice, context=self.context, window=self.window,
                recurrent=self.engine.runner.num_states > 0,
            )  # fmt: skip
        if resumed:  # the same again as a later attempt, under another name
            for choice in range(sampling.n):
                done = tuple(self.expected[name, choice][: chance.randint(0, sampling.max_tokens)])
                again = replace(asked, request=f"{name}again", attempt=1, choice=choice, output_ids=done)
                try:
                    self.engine.add(again)
                except OutOfMemory:
                    assert self.blocks_at_once(again, 0) > self.engine.pool.num_blocks
                    return
                key = again.request, choice
                self.specs[key], self.expected[key] = again, self.expected[name, choice][len(done) :]

    def meddle(self) -> None:
        victim = self.chance.choice(list(self.specs))[0]
        match self.chance.choice(["cancel", "pause", "resume"]):
            case "cancel":
                self.engine.cancel(victim, self.attempt_of(victim))
                self.cancelled.add(victim)
            case "pause":
                self.engine.pause(victim, self.attempt_of(victim))
                self.paused.add(victim)
            case "resume":
                self.engine.resume(victim, self.attempt_of(victim))

    def step(self) -> None:
        busy, before = self.engine.has_work, self.progress()
        result = self.engine.step()
        self.transcript.take(result)
        self.engine.check_integrity()
        self.check_announced(result)
        self.obey()
        assert before != self.progress() or not busy or self.engine.counters.steps_aborted_total, (
            "a step without progress"
        )

    def obey(self) -> None:
        for request in self.given_up:
            self.engine.cancel(request, self.attempt_of(request))
            self.cancelled.add(request)
            self.engine.check_integrity()
        self.given_up = []

    def progress(self) -> tuple[int, int, int]:
        transcript = self.transcript
        return len(transcript.ends), sum(map(len, transcript.tokens.values())), transcript.fed

    def run(self) -> None:
        to_come = self.chance.randint(1, 9)
        for _ in range(MOST_STEPS):
            self.clock.now += 0.01
            while to_come and (self.chance.random() < 0.4 or not self.engine.has_work):
                to_come -= 1
                self.arrive(f"r{to_come}")
            if self.specs and self.chance.random() < 0.1:
                self.meddle()
            if not self.engine.has_work and not to_come:
                for request in self.paused:
                    self.engine.resume(request, self.attempt_of(request))
                if not self.engine.has_work:
                    return
            self.step()
        raise AssertionError("never ends")

    # ------------------------------------------------------------------ what must hold

    def check_announced(self, result: StepResult) -> None:
        """Who follows the events knows what is in the index, and all that comes before it."""
        self.follow(result, Tier.DEVICE, self.parents)
        assert set(self.engine.pool.index.hashes()) == set(self.parents)
        assert all(parent == ROOT or parent in self.parents for parent in self.parents.values())

    def follow(self, result: StepResult, tier: Tier, known: dict[bytes, bytes]) -> None:
        """`known`: the parent of each block that the tier has."""
        for change in result.changes:
            for run in change.runs if change.tier is tier else ():
                parent = run.parent
                for block_hash in run.hashes:
                    if change.removed:
                        del known[block_hash]
                    else:
                        assert block_hash not in known
                        known[block_hash] = parent
                        parent = block_hash

    def blocks_at_once(self, asked: SequenceSpec, generated: int) -> int:
        tokens = len(asked.prompt_ids) + len(asked.output_ids) + generated
        return self.engine.scheduler.tables.at_once(min(tokens, self.context))

    def check_end(self, key: Key, end: FinishReason | KvfleetError) -> None:
        expected, got = self.expected[key], self.transcript.tokens[key]
        assert got == expected[: len(got)], "computed on wrong blocks"
        if isinstance(end, FinishReason):
            assert len(got) == len(expected)
        elif isinstance(end, OutOfMemory):
            too_large = self.blocks_at_once(self.specs[key], len(got)) > self.engine.pool.num_blocks
            assert too_large or self.memory_errors
        elif isinstance(end, DeadlineExceeded):
            assert self.specs[key].deadline is not None
        else:
            assert isinstance(end, Cancelled)
            assert key[0] in self.cancelled

    def check(self) -> None:
        assert set(self.transcript.ends) == set(self.specs)
        assert self.engine.pool.used == 0
        for key, end in self.transcript.ends.items():
            self.check_end(key, end)


@pytest.mark.parametrize("part", range(4))
def test_random_schedules(part: int) -> None:
    aborted = 0
    for seed in range(part, SCHEDULES, 4):
        schedule = Schedule(seed)
        try:
            schedule.run()
            schedule.check()
            aborted += schedule.engine.counters.steps_aborted_total
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert aborted > 20  # else this does not test it
