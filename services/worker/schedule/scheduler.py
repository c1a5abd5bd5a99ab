"""Decides what each step runs. Pure: sequences in, a plan out; time is passed in. The engine thread owns it.

Per step: what is past its deadline fails; a waiting sequence of higher priority may push lower ones out; every running
sequence that needs one token decodes; then begun and waiting prompts share the pacer's tokens in the order of service.
Spare work (the lowest priority) sits out steps that have a prompt of other work, and is a small share of other steps:
see the pacer.

This never livelocks: blocks are only taken from sequences of worse rank, and ranks never change, so the best-ranked
running sequence advances to its end; a preempted one is admitted again only when all its known tokens fit; a sequence
that cannot grow although it runs alone fails; and only a higher priority pushes out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from operator import attrgetter

from kvfleet.worker.blocks.block_pool import BlockPool, Match
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.schedule.beam_tables import BeamTables
from kvfleet.worker.schedule.block_tables import BlockTables
from kvfleet.worker.schedule.sequence import BeamGroup, Sequence, SequenceState, level_of
from kvfleet.worker.schedule.step_pacer import Allowance, StepPacer
from kvfleet.worker.schedule.step_plan import Scoring, Slice, StepPlan
from kvfleet.worker.schedule.tenant_shares import TenantShares
from kvfleet.worker.schedule.waiting_queue import PromptLeaders, ServiceOrder, WaitingQueue
from kvproto.errors import DeadlineExceeded, KvfleetError, OutOfMemory
from kvproto.messages import SPARE_PRIORITY
from kvsampling.draw import Draw

_rank = attrgetter("rank")


class Scheduler:
    """`token_budget`: most tokens per step. `slots`: most running sequences. `itl_target_s`: how long a step beside
    running streams may always take. `window`: most tokens that a token attends to in every layer, itself included; None
    if any layer attends to all. `states`: slots for recurrent states, of models that have them."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int = 512,
        slots: int = 64,
        itl_target_s: float = 0.0,
        window: int | None = None,
        states: StateSlots | None = None,
    ) -> None:
        if token_budget < 1 or slots < 1:
            raise ValueError(f"token_budget {token_budget} and slots {slots} must be positive")
        self.pool = pool
        self.slots = slots
        if states is not None:
            self.slots = states.most_sequences = min(slots, states.most_sequences)
        self.preemptions = 0
        self.tables = BlockTables(pool, window, states)
        self.beams = BeamTables(self.tables)
        self._leading = 1 if states is None else states.every // pool.block_size
        self.pacer = StepPacer(token_budget, itl_target_s)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # sorted by rank
        self.rows = self.spare_rows = 0  # sequences that they run, where beams count; of them those of spare work
        # Set by the tiers below. `claims`: whether a sequence waits for blocks from there, leaving so many to others.
        self.claims: Callable[[Sequence, Match, int], bool] = lambda sequence, match, spare: False
        self.on_preempt: Callable[[Sequence], None] = lambda sequence: None
        self._rests = False  # whether spare work takes no part in this step: a prompt of other work is to be computed
        self._shares = TenantShares()
        self._next_deadline = float("inf")  # no earlier than this

    def enqueue(self, sequence: Sequence) -> None:
        sequence.share = self._shares.enter(sequence.spec.tenant)
        self.requeue(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """It was preempted, or its restore has ended."""
        sequence.state = SequenceState.WAITING
        self.waiting.add(sequence)
        if sequence.spec.deadline is not None:
            self._next_deadline = min(self._next_deadline, sequence.spec.deadline)

    def pause(self, sequence: Sequence) -> None:
        """Its blocks become evictable, and are found again if they survive."""
        self._leave(sequence, SequenceState.PAUSED)
        sequence.restores = 0

    def finish(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        self._leave(sequence, SequenceState.FINISHED, keep_tail=keep_tail)

    def slide(self, sequence: Sequence) -> None:
        self.tables.let_go(sequence)
        sequence.slide(self.pool.block_size)
        if self.tables.states is not None:
            self.tables.states.restart(sequence)

    def settled(self) -> None:
        """The step that was planned has run."""
        if self.tables.states is not None:
            self.tables.states.settled()

    def spoil(self, plan: StepPlan) -> None:
        """The step was given up, as all its sequences are cancelled; a part of it may have moved their states on."""
        if self.tables.states is not None:
            self.tables.states.spoil(plan.sequences)

    def queued(self) -> list[tuple[Sequence, int]]:
        size = self.pool.block_size
        waiting = [  # choices share their prompt
            (s, max(len(s.ids) - self._found(s) * size, 1) if s is s.siblings[0] else 0) for s in self.waiting
        ]
        return waiting + [(s, s.remaining if s.remaining > 1 else 0) for s in self.running]

    def holders(self) -> list[Sequence]:
        """Those with block tables: running sequences, and the beams of a search instead of their lead."""
        return [one for one in self._rows() if one.blocks]

    def _rows(self) -> list[Sequence]:
        return [beam for one in self.running for beam in (one, *(one.beams.running if one.beams is not None else ()))]

    def _found(self, sequence: Sequence) -> int:
        return self.pool.index.depth(sequence.hashes) if sequence.is_scored else 0

    def schedule(self, now: float) -> StepPlan:
        plan = StepPlan()
        if now >= self._next_deadline:
            self._expire(plan, now)
        self._rests = self._has_prompt_ahead()
        if self.waiting:
            self._push_out(now)
        self._plan(plan, now)
        if self._rests and not plan.slices:  # what is ahead cannot run now: no room, or it waits for a leader
            self._rests = False
            self._plan(plan, now)
        if self.tables.states is not None:
            self.tables.states.plan(plan)
        return plan

    def _plan(self, plan: StepPlan, now: float) -> None:
        begun = self._plan_decodes(plan)
        if begun or (self.waiting and self.rows < self.slots):
            self._plan_prompts(plan, begun, now)

    def _has_prompt_ahead(self) -> bool:
        """Of other than spare work, waiting or begun. It costs nothing where nothing waits and nothing is spare."""
        if self.waiting and self.waiting.highest_priority > SPARE_PRIORITY:
            return True
        running = self.running if self.waiting or self.spare_rows else ()
        return any(s.spec.priority > SPARE_PRIORITY and s.remaining > 1 for s in running)

    def _is_resting(self, sequence: Sequence) -> bool:
        return self._rests and sequence.spec.priority <= SPARE_PRIORITY

    def _expire(self, plan: StepPlan, now: float) -> None:
        live = [s for s in (*self.waiting, *self.running) if s.spec.deadline is not None]
        self._next_deadline = float("inf")
        for sequence in live:
            deadline = sequence.spec.deadline
            assert deadline is not None
            if deadline > now:
                self._next_deadline = min(self._next_deadline, deadline)
                continue
            where = "in the queue" if not sequence.started else f"after {sequence.drawn} tokens"
            took = now - sequence.enqueued
            self._fail(plan, sequence, DeadlineExceeded(f"deadline passed {took:.3f} s after arrival, {where}"))

    def _push_out(self, now: float) -> None:
        """Preempt running sequences of lower priority for the one to be served next."""
        lowest = min((s.spec.priority for s in self.running), default=None)
        if lowest is None or self.waiting.highest_priority <= lowest:
            return
        begun = [s for s in self.running if s.remaining > 1 and not self._is_resting(s)]
        first = ServiceOrder(begun, self.waiting.groups(), now).pop()
        if first is None or first.state is SequenceState.RUNNING:
            return
        match = self.tables.match(first)
        if first.is_scored and PromptLeaders(begun, self.pool.block_size, self._leading).find(first, match) is not None:
            return
        victims: list[Sequence] = []
        given, rows = 0, self.rows
        candidates = (s for s in reversed(self.running) if _may_push_out(first, s, now))
        while rows + first.width > self.slots or not self.tables.fits(first, match, rows, given):
            victim = next(candidates, None)
            if victim is None:
                return  # not even all of them would be enough
            victims.append(victim)
            rows -= victim.width
            given += self.pool.held_once(victim.held)
        for victim in victims:
            self._preempt(victim)

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Returns the sequences that need more than one token, each with room for one."""
        size = self.pool.block_size
        slices, sequences = plan.slices, plan.sequences
        begun = []
        room = self.pacer.spare_rows(self.rows - self.spare_rows) if self.spare_rows else 0
        for sequence in tuple(self.running):
            if sequence.spec.priority <= SPARE_PRIORITY:
                room -= sequence.width
                if self._rests or room < 0:
                    continue
            if sequence.beams is not None and sequence.beams.has_begun:
                self._plan_beams(plan, sequence, sequence.beams)
                continue
            computed = sequence.computed
            full = computed == len(sequence.blocks) * size
            if sequence.state is not SequenceState.RUNNING or (full and not self._grow(plan, sequence)):
                continue
            if computed + 1 < len(sequence.ids):
                begun.append(sequence)
                continue
            slices.append(Slice(sequence.ids[computed:], computed, sequence.blocks, _draw(sequence)))
            sequences.append(sequence)
            if computed >= sequence.charged:
                sequence.charged = computed + 1
                sequence.share.served += 1
        plan.decodes = len(slices)
        return begun

    def _plan_beams(self, plan: StepPlan, lead: Sequence, beams: BeamGroup) -> None:
        """All of them, or none."""
        if lead.state is not SequenceState.RUNNING:
            return
        missing = self.beams.missing(lead)
        if not self._make_room(plan, lead, lambda: self.pool.available >= missing):
            return
        plan.copies += self.beams.branch(lead)
        for beam in beams.running:
            plan.slices.append(Slice(beam.ids[beam.computed :], beam.computed, beam.blocks, _draw(beam)))
            plan.sequences.append(beam)
        if (computed := beams.running[0].computed) >= lead.charged:
            lead.charged = computed + 1
            lead.share.served += len(beams.running)

    def _grow(self, plan: StepPlan, sequence: Sequence) -> bool:
        return self._make_room(plan, sequence, lambda: bool(self.tables.extend(sequence, 1)))

    def _make_room(self, plan: StepPlan, sequence: Sequence, fits: Callable[[], bool]) -> bool:
        """Make room for the next token by preempting worse-ranked sequences, in the end itself."""
        while not fits():
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                if self.pool.used == len({block for block in sequence.held if block >= 0}):
                    self._fail_for_memory(plan, sequence)
                return False  # else blocks are being copied, and free soon
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _plan_prompts(self, plan: StepPlan, begun: list[Sequence], now: float) -> None:
        allowance = self.pacer.allowance(plan.decodes)
        if not self._rests and any(s.spec.priority <= SPARE_PRIORITY for s in begun or self.waiting):
            self.pacer.cut_for_spare(allowance, plan.decodes, beside_others=self.rows > self.spare_rows)
        waiting = self.waiting.groups() if self.rows < self.slots else []
        order = ServiceOrder(begun, waiting, now)
        leaders = PromptLeaders(begun, self.pool.block_size, self._leading)
        unplanned = {id(sequence) for sequence in begun}
        while allowance.grant(0) and (sequence := order.pop()) is not None:
            served: Sequence | None = sequence
            if self._is_resting(sequence):
                continue
            if sequence.state is SequenceState.WAITING:
                if self.rows + sequence.width > self.slots:
                    order.drop_waiting()
                    continue
                if self.tables.at_once(len(sequence.ids)) > self.pool.num_blocks:
                    self._fail_for_memory(plan, sequence)
                    continue
                served = self._admit(plan, sequence, leaders)
                if served is sequence and served.state is SequenceState.RUNNING:
                    unplanned.add(id(sequence))
            if served is None:
                order.drop_waiting()  # smaller ones do not overtake, else one that does not fit might never run
            elif id(served) in unplanned:
                unplanned.discard(id(served))
                self._plan_chunk(plan, served, allowance)

    def _admit(self, plan: StepPlan, sequence: Sequence, leaders: PromptLeaders) -> Sequence | None:
        """Returns whose turn it is: the sequence's, its leader's, or None: no room. One that waits for blocks from
        below leaves the queue, and its turn is over."""
        if (leader := leaders.known(sequence)) is not None and not self._is_resting(leader):
            return leader
        match = self.tables.match(sequence)
        reuses = sequence.is_scored  # else it computes its prompt whatever others have of it
        if reuses and (leader := leaders.find(sequence, match)) is not None:
            return leader
        if not self.tables.fits(sequence, match, self.rows):
            return None
        claimed = reuses and self.tables.window is None and self.claims(sequence, match, self.rows)
        self.waiting.remove(sequence)
        if claimed:
            sequence.state = SequenceState.RESTORING
            return sequence
        plan.copies += self.tables.hold(sequence, match)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_rank)
        self._count(sequence, sequence.width)
        leaders.add(sequence)
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = match.tokens
            plan.started.append(sequence)
        return sequence

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, allowance: Allowance) -> None:
        start = sequence.computed
        remaining = len(sequence.ids) - start
        wanted = max(1, allowance.grant(start, remaining))
        count = self.tables.extend(sequence, wanted, spare=self.rows - sequence.width)
        if not count:
            return
        draw = _draw(sequence) if count == remaining and sequence.window.max_tokens else None
        if (trace := sequence.spec.trace) is not None:
            trace.chunks, trace.fed_tokens = trace.chunks + 1, trace.fed_tokens + count
        scoring = None if sequence.is_scored else _scoring(sequence).between(start, start + count)
        plan.slices.append(Slice(sequence.ids[start : start + count], start, sequence.blocks, draw, scoring))
        plan.sequences.append(sequence)
        allowance.spend(start, count)
        if start + count > sequence.charged:
            sequence.share.served += start + count - max(start, sequence.charged)
            sequence.charged = start + count

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        if sequence.spec.trace is not None:
            sequence.spec.trace.preemptions += 1
        self.on_preempt(sequence)
        sequence.restores = 0
        self._withdraw(sequence)
        self.requeue(sequence)

    def _fail(self, plan: StepPlan, sequence: Sequence, error: KvfleetError) -> None:
        self.finish(sequence)
        plan.failed.append((sequence, error))

    def _leave(self, sequence: Sequence, state: SequenceState, *, keep_tail: bool = True) -> None:
        if sequence.state in (SequenceState.WAITING, SequenceState.RESTORING, SequenceState.RUNNING):
            self._shares.leave(sequence.spec.tenant)
        self._withdraw(sequence, keep_tail=keep_tail)
        sequence.state = state

    def _withdraw(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is SequenceState.RUNNING:
            at = bisect_left(self.running, sequence.rank, key=_rank)
            assert self.running[at] is sequence
            del self.running[at]
            self._count(sequence, -sequence.width)
        if sequence.beams is not None:
            self.beams.restart(sequence)
        self.tables.let_go(sequence, keep_tail=keep_tail)

    def _count(self, sequence: Sequence, rows: int) -> None:
        self.rows += rows
        self.spare_rows += rows * (sequence.spec.priority <= SPARE_PRIORITY)

    def _fail_for_memory(self, plan: StepPlan, sequence: Sequence) -> None:
        tokens, blocks = len(sequence.ids), self.tables.at_once(len(sequence.ids))
        why = f"{tokens} tokens need {blocks} blocks, this worker has {self.pool.num_blocks}"
        if sequence.beams is not None:
            why = f"{sequence.width} beams of {sequence.drawn} tokens need more than {self.pool.num_blocks} blocks"
        self._fail(plan, sequence, OutOfMemory(why))

    def check_integrity(self, others: Items[Items[int]] = ()) -> None:
        self.waiting.check_integrity()
        assert all(sequence.state is SequenceState.RUNNING for sequence in self.running)
        assert [s.rank for s in self.running] == sorted(s.rank for s in self.running)
        assert all(not sequence.blocks and not sequence.computed for sequence in self.waiting)
        assert self.rows == sum(sequence.width for sequence in self.running) <= self.slots
        assert self.spare_rows == sum(s.width for s in self.running if s.spec.priority <= SPARE_PRIORITY)
        self.tables.check_integrity(self.holders(), others)
        if self.tables.states is not None:
            self.tables.states.check_integrity(self._rows())


def _draw(sequence: Sequence) -> Draw:
    spec, index = sequence.spec, sequence.num_outputs
    banned = sequence.banned if index < spec.sampling.min_tokens else ()
    prompt, outputs = sequence.prompt_seen or (), sequence.outputs or ()
    group = sequence.whole.beams
    candidates = 0 if group is None else group.search.candidates
    return Draw(spec.sampling, spec.choice, index, prompt, outputs, banned, sequence.matcher, candidates)


def _scoring(sequence: Sequence) -> Scoring:
    """All that is left of it."""
    scored, alternatives = sequence.scored, sequence.spec.sampling.prompt_logprobs
    return Scoring(scored, sequence.ids[scored : sequence.num_prompt], alternatives or 0)


def _may_push_out(one: Sequence, other: Sequence, now: float) -> bool:
    """By every measure: a later arrival does not push out what came to its turn by waiting."""
    return (
        one.spec.priority > other.spec.priority
        and one.rank < other.rank
        and level_of(one.spec.priority, now - one.enqueued) > level_of(other.spec.priority, now - other.enqueued)
    )
