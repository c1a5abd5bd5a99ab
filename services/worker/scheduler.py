"""Decides what each step runs. Pure: sequences in, a plan out; time is passed in. The engine thread owns it.

Per step: waiting sequences past their deadline fail; every running sequence that needs one token decodes; what is left
of the token budget goes to prompts in rank order, first those begun, then newly admitted ones.

Rank is (priority, arrival). Why this never livelocks: blocks are only ever taken from sequences of worse rank, so the
best-ranked running sequence advances in every step until it ends; a preempted one keeps its rank and is admitted again
only when all its known tokens fit beside what runs; and a sequence that cannot grow although it runs alone fails.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from kvproto.errors import DeadlineExceeded, KvfleetError, OutOfMemory
from services.worker.block_pool import BlockPool, Match
from services.worker.sequence import Sequence, State
from services.worker.step_plan import Draw, Slice, StepPlan

_rank = attrgetter("rank")


class Scheduler:
    """`token_budget`: tokens per step at most, `slots`: sequences that run at the same time at most."""

    def __init__(self, pool: BlockPool, *, token_budget: int = 512, slots: int = 64) -> None:
        if token_budget < 1 or slots < 1:
            raise ValueError(f"token_budget {token_budget} and slots {slots} must be positive")
        self.pool = pool
        self.token_budget = token_budget
        self.slots = slots
        self.preemptions = 0
        self.waiting: list[Sequence] = []  # both sorted by rank
        self.running: list[Sequence] = []

    # ------------------------------------------------------------------ queue

    def enqueue(self, sequence: Sequence) -> None:
        """Add a new or resumed sequence."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_rank)

    def pause(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue; its blocks become evictable, and are found again if they survive."""
        self._leave(sequence)
        sequence.state = State.PAUSED

    def finish(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Take a sequence out for good; what it computed stays cached."""
        self._leave(sequence, keep_tail=keep_tail)
        sequence.state = State.FINISHED

    # ------------------------------------------------------------------ step

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan()
        self._expire(plan, now)
        self._plan_decodes(plan)
        budget = self.token_budget - len(plan.slices)
        budget = self._plan_prefills(plan, budget)
        self._admit(plan, budget)
        return plan

    def _expire(self, plan: StepPlan, now: float) -> None:
        late = [s for s in self.waiting if s.spec.deadline is not None and s.spec.deadline <= now]
        for sequence in late:
            waited = now - sequence.enqueued
            self._fail(plan, sequence, DeadlineExceeded(f"deadline passed {waited:.3f} s after arrival, in the queue"))

    def _plan_decodes(self, plan: StepPlan) -> None:
        for sequence in tuple(self.running):
            if sequence.state is State.RUNNING and sequence.remaining == 1 and self._grow(plan, sequence):
                self._plan_slice(plan, sequence, 1)

    def _grow(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Make sure that the next token has a slot, at the cost of worse-ranked sequences, in the end of itself."""
        if self.pool.blocks_for(sequence.computed + 1) <= len(sequence.blocks):
            return True
        while not self.pool.available:
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                self._fail(plan, sequence, self._out_of_memory(len(sequence.ids)))
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1)
        return True

    def _plan_prefills(self, plan: StepPlan, budget: int) -> int:
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.remaining > 1:
                budget -= self._plan_chunk(plan, sequence, budget)
        return budget

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit in rank order while budget, slots and blocks last.

        A sequence whose next block another one computes in this very step waits for it instead of computing it too;
        those behind it may pass, it loses one step.
        """
        if not self.waiting:
            return
        computing = self._blocks_computed_by(plan)
        at = 0
        while budget > 0 and len(self.running) < self.slots and at < len(self.waiting):
            sequence = self.waiting[at]
            if self.pool.blocks_for(len(sequence.ids)) > self.pool.num_blocks:
                self._fail(plan, sequence, self._out_of_memory(len(sequence.ids)))
                continue
            match = self._match(sequence)
            full = len(match.blocks)
            if full < len(sequence.hashes) and sequence.hashes[full] in computing:
                at += 1
                continue
            if not self._fits(sequence, match):
                break
            del self.waiting[at]
            self._hold(plan, sequence, match)
            chunk = self._plan_chunk(plan, sequence, budget)
            computing.update(self._completed_by(sequence, chunk))
            budget -= chunk

    def _match(self, sequence: Sequence) -> Match:
        """What is cached of a sequence, its last token aside: that one is run again, for its logits."""
        return self.pool.match(sequence.spec.root, sequence.hashes, sequence.ids, limit=len(sequence.ids) - 1)

    def _fits(self, sequence: Sequence, match: Match) -> bool:
        """Whether all known tokens fit beside what runs, each of which may need a block to grow soon."""
        needed = self.pool.blocks_for(len(sequence.ids)) - len(match.blocks)
        return needed + len(self.running) <= self.pool.available - self.pool.idle_among(match.blocks)

    def _hold(self, plan: StepPlan, sequence: Sequence, match: Match) -> None:
        """Make a sequence a running one on the blocks that it matched and new ones for the rest."""
        full = len(match.blocks)
        self.pool.acquire(match.blocks)
        sequence.blocks = match.blocks + self.pool.allocate(self.pool.blocks_for(len(sequence.ids)) - full)
        if match.donor is not None:
            plan.copies.append((match.donor, sequence.blocks[full]))
        sequence.computed = match.tokens
        sequence.filled = full
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = match.tokens
            plan.started.append(sequence)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        chunk = min(sequence.remaining, budget)
        self._plan_slice(plan, sequence, chunk)
        plan.prefill_tokens += chunk
        return chunk

    def _plan_slice(self, plan: StepPlan, sequence: Sequence, count: int) -> None:
        start = sequence.computed
        last = count == sequence.remaining
        draw = Draw(sequence.spec.sampling, sequence.spec.choice, sequence.num_outputs) if last else None
        plan.slices.append(Slice(sequence.ids[start : start + count], start, sequence.blocks, draw))
        plan.sequences.append(sequence)

    # ------------------------------------------------------------------ inside

    def _blocks_computed_by(self, plan: StepPlan) -> set[bytes]:
        hashes: set[bytes] = set()
        for sequence, part in zip(plan.sequences, plan.slices, strict=True):
            hashes.update(self._completed_by(sequence, len(part.ids)))
        return hashes

    def _completed_by(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the blocks that are full once `count` more tokens are computed."""
        return sequence.hashes[sequence.filled : (sequence.computed + count) // self.pool.block_size]

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        self.enqueue(sequence)

    def _fail(self, plan: StepPlan, sequence: Sequence, error: KvfleetError) -> None:
        self.finish(sequence)
        plan.failed.append((sequence, error))

    def _leave(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        """Out of the queue it is in; its blocks go back to the pool, the partial last one kept where it is of use."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        size = self.pool.block_size
        last = sequence.computed // size
        if keep_tail and sequence.computed % size and sequence.filled == last:
            self.pool.keep_tail(sequence.blocks[last], sequence.parent_of(last), sequence.block_ids(last, size))
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.filled = 0

    def _out_of_memory(self, tokens: int) -> OutOfMemory:
        return OutOfMemory(
            f"{tokens} tokens need {self.pool.blocks_for(tokens)} blocks, this worker has {self.pool.num_blocks}"
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, sequences and pool disagree."""
        for queue, state in ((self.waiting, State.WAITING), (self.running, State.RUNNING)):
            assert all(sequence.state is state for sequence in queue)
            assert [s.rank for s in queue] == sorted(s.rank for s in queue)
        assert all(not sequence.blocks and not sequence.computed for sequence in self.waiting)
        assert len(self.running) <= self.slots
        size = self.pool.block_size
        for sequence in self.running:
            assert sequence.filled == sequence.computed // size
            assert len(sequence.blocks) * size >= sequence.computed
            assert len(sequence.hashes) == len(sequence.ids) // size
            assert sequence.computed < len(sequence.ids)
        self.pool.check_integrity([sequence.blocks for sequence in self.running])
