"""Each sequence's slot for its recurrent state, and when snapshots are taken of it. Pure; the scheduler's.

    prompt   [ block | ... | block ]◀snapshot [ ... ]◀snapshot       [ tail ]◀its own slot, when it ends
                                     every N blocks; the end of a public prefix

A sequence begins from the longest snapshot within its cached prefix and computes what follows it again: those blocks
are found to be twins of cached ones. Its own slot becomes a snapshot when it ends, so a conversation's next turn goes
on from its last token. Choices of one request begin together one token before the prompt's end.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from kvfleet.worker.blocks.block_pool import BlockPool, Match
from kvfleet.worker.blocks.state_slots import StatePoint, StateSlots
from kvfleet.worker.schedule.sequence import Sequence
from kvfleet.worker.schedule.step_plan import StepPlan
from kvproto.block_hash import ForkedRoot, parent_of


@dataclass(eq=False, slots=True)
class StateTables:
    pool: BlockPool
    slots: StateSlots
    _under_way: set[int] = field(default_factory=set)  # sequences of the step, whose slots it writes to

    def __post_init__(self) -> None:
        self.pool.on_unlisted = self.slots.unlisted

    def cut(self, match: Match, sequence: Sequence) -> Match:
        """As much of the match as a snapshot stands behind."""
        tokens, slot = self.slots.find(
            sequence.root, sequence.hashes, sequence.ids, match.tokens, exact=sequence.spec.exact
        )
        full, rest = divmod(tokens, self.pool.block_size)
        donor = None
        if rest:
            donor = match.blocks[full] if full < len(match.blocks) else match.donor
        lossy = match.lossy or (slot >= 0 and self.slots[slot].lossy)
        return Match(match.blocks[:full], donor, rest, tokens, lossy and bool(tokens), slot)

    def begin(self, sequence: Sequence, match: Match) -> None:
        if match.state >= 0:
            self.slots.touch(match.state)
        sequence.state_slot = self.slots.take(match.state)

    def restart(self, sequence: Sequence) -> None:
        """It runs on, from no token."""
        sequence.state_slot = self.slots.take()

    def fork(self, sequence: Sequence, beam: Sequence) -> None:
        beam.state_slot = self.slots.take(sequence.state_slot)

    def plan(self, plan: StepPlan) -> None:
        """Give the step's slices their states, and slots for the snapshots that they pass."""
        size = self.pool.block_size
        self._under_way = {id(sequence) for sequence in plan.sequences}
        for sequence, part in zip(plan.sequences, plan.slices, strict=True):
            self._give_up(sequence)
            part.state = sequence.state_slot
            start, end = part.start, part.end
            points = {*self.slots.points(start, end)}
            if isinstance(sequence.root, ForkedRoot) and start < sequence.root.blocks * size <= end:
                points.add(sequence.root.blocks * size)
            last = end // size * size
            if self.slots.at_prompt_ends and part.draw is not None and end - start > 1 and last > start:
                points.add(last)
            if part.draw is not None and len(sequence.siblings) > 1 and sequence.beams is None and end - start > 1:
                points.add(end - 1)
            if sequence.private:  # beams are
                continue
            for point in sorted(points):
                slot = self.slots.take_empty()
                if slot is None:
                    break
                sequence.snapshots.append((point, slot))
            part.snapshots = tuple(sequence.snapshots)
        plan.state_copies = self.slots.take_copies()

    def spoil(self, sequences: Items[Sequence]) -> None:
        """Their states may be those of other tokens than they have."""
        for sequence in sequences:
            sequence.private = True
            self._give_up(sequence)

    def settled(self) -> None:
        """The step is over."""
        self._under_way = set()

    def computed(self, sequence: Sequence) -> None:
        """The snapshots of its last slice are there, and its full blocks are listed."""
        snapshots, sequence.snapshots = sequence.snapshots, []
        for tokens, slot in snapshots:
            if sequence.private or tokens > sequence.computed or not self._is_reachable(sequence, tokens):
                self.slots.give_back(slot)
            else:
                self.slots.keep(slot, self._name(sequence, tokens))

    def end(self, sequence: Sequence, *, keep: bool) -> None:
        """It lets go of its slot. That of one in a step under way is not kept: it may be that of a token more."""
        self._give_up(sequence)
        if sequence.state_slot < 0:
            return
        keep = keep and sequence.computed > 0 and id(sequence) not in self._under_way
        if keep and not sequence.private and self._is_reachable(sequence, sequence.computed):
            self.slots.keep(sequence.state_slot, self._name(sequence, sequence.computed))
        else:
            self.slots.give_back(sequence.state_slot)
        sequence.state_slot = -1

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Raises AssertionError if a running sequence has no state, but the lead of beams, or a slot is lost."""
        for sequence in running:
            assert sequence.state_slot >= 0 or (sequence.beams is not None and sequence.beams.has_begun)
        held = [one.state_slot for one in running if one.state_slot >= 0]
        self.slots.check_integrity([*held, *(slot for one in running for _, slot in one.snapshots)])

    def _give_up(self, sequence: Sequence) -> None:
        """Snapshots of a step that came to nothing."""
        for _, slot in sequence.snapshots:
            self.slots.give_back(slot)
        sequence.snapshots = []

    def _is_reachable(self, sequence: Sequence, tokens: int) -> bool:
        full = tokens // self.pool.block_size
        return not full or self.pool.index.lists(sequence.hashes[full - 1])

    def _name(self, sequence: Sequence, tokens: int) -> StatePoint:
        full, rest = divmod(tokens, self.pool.block_size)
        if not rest:
            return StatePoint(sequence.hashes[full - 1], (), sequence.lossy)
        behind = tuple(sequence.ids[tokens - rest : tokens])
        return StatePoint(parent_of(sequence.root, sequence.hashes, full), behind, sequence.lossy)
