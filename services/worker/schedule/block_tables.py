"""Each sequence's block table: what it holds in the pool, when it grows and lets go. Pure; the scheduler's.

        passed         shared          own, filled      own, partial     to grow into
    [ -1 | -1 | ... | full block | ... | full block | ... | tail ]- - - - - - - - - -
                                                              ^ computed

A sequence is admitted with blocks for all its known tokens. Where every layer attends to a window (`window` tokens,
each token itself included) it takes blocks as it goes and releases those that no later token reaches: it never needs
more than the window and one block.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvfleet.worker.blocks.block_pool import BlockPool, Match
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.blocks.state_slots import StateSlots
from kvfleet.worker.schedule.sequence import Sequence, SequenceState
from kvfleet.worker.schedule.state_tables import StateTables


@dataclass(eq=False)
class BlockTables:
    pool: BlockPool
    window: int | None = None
    slots: StateSlots | None = None  # of recurrent states

    def __post_init__(self) -> None:
        self.states = None if self.slots is None else StateTables(self.pool, self.slots)
        self._size = self.pool.block_size
        self.pool.windowed = self.pool.windowed or self.window is not None

    def at_once(self, tokens: int) -> int:
        """Fewest blocks with which a sequence can be computed."""
        blocks = self.pool.blocks_for(tokens)
        return blocks if self.window is None else min(blocks, self.pool.blocks_for(self.window - 1) + 1)

    def match(self, sequence: Sequence) -> Match:
        """What is cached of a sequence but its last token, which is run again for its logits. While its prompt is to be
        scored: what comes before the first logits that this takes."""
        limit = len(sequence.ids) - 1 if sequence.is_scored else sequence.scored - 1
        match = self.pool.match(sequence.root, sequence.hashes, sequence.ids, limit, exact=sequence.spec.exact)
        full = len(match.blocks)
        for sibling in sequence.siblings:  # a running one's partial block is not in the index, but can be copied
            if match.tokens == limit:
                break
            if sibling.state is SequenceState.RUNNING and sibling.computed > match.tokens:
                end = min(sequence.agrees_with(sibling), sibling.computed, limit, (full + 1) * self._size)
                if end > match.tokens and sibling.blocks[full] >= 0:
                    match = Match(match.blocks, sibling.blocks[full], end - full * self._size, end, sibling.lossy)
        return match if self.states is None else self.states.cut(match, sequence)

    def fits(self, sequence: Sequence, match: Match, others: int, given: int = 0) -> bool:
        """Whether it can run beside `others`, each of which may soon need a block, with `given` blocks more."""
        held = match.blocks[self._first_reached(match.tokens) :]
        needed = max(1, self.at_once(len(sequence.ids)) - len(held))
        if sequence.beams is not None:
            needed += sequence.width  # a tail of each
        return needed + others <= self.pool.available + given - self.pool.idle_among(held)

    def hold(self, sequence: Sequence, match: Match) -> list[tuple[int, int]]:
        """Start a sequence. Returns the block copies to make first."""
        full = len(match.blocks)
        if sequence.is_scored:
            here = max(0, full - sum(sequence.restored.values()) // self._size)
            self.pool.asked(sequence.hashes, (len(sequence.ids) - 1) // self._size, here)
        passed = min(self._first_reached(match.tokens), full)
        held = match.blocks[passed:]
        self.pool.acquire(held)
        if self.states is not None:  # before room is made: the donor may go, and the state behind it
            self.states.begin(sequence, match)
        new = self.pool.blocks_for(len(sequence.ids)) - full if self.window is None else int(match.donor is not None)
        sequence.blocks = [-1] * passed + held + self.pool.allocate(new)
        sequence.passed = passed
        sequence.computed = match.tokens
        sequence.filled = full
        sequence.lossy, sequence.private = match.lossy, False
        return [] if match.donor is None else [(match.donor, sequence.blocks[full])]

    def extend(self, sequence: Sequence, tokens: int, spare: int = 0) -> int:
        """Take blocks for the next `tokens`, leaving `spare` available. Returns for how many there is room."""
        room = len(sequence.blocks) * self._size - sequence.computed
        if room >= tokens:
            return tokens
        missing = self.pool.blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        taken = min(missing, max(self.pool.available - spare, 0))
        sequence.blocks += self.pool.allocate(taken)
        return min(tokens, room + taken * self._size)

    def fork(self, sequence: Sequence) -> tuple[Sequence, list[tuple[int, int]]]:
        """A beam that shares the full blocks and has the partial one as a copy, to be made first."""
        beam, full = sequence.fork(), sequence.computed // self._size
        if self.states is not None:
            self.states.fork(sequence, beam)
        self.pool.acquire(sequence.blocks[sequence.passed : full])
        beam.blocks = sequence.blocks[:full]
        if not sequence.computed % self._size:
            return beam, []
        beam.blocks += self.pool.allocate(1)
        return beam, [(sequence.blocks[full], beam.blocks[full])]

    def advance(self, sequence: Sequence, end: int) -> None:
        """KV of all tokens before `end` is there: list full blocks, release those out of reach."""
        sequence.computed = end
        size = self._size
        for at in range(sequence.filled, end // size):
            if self._is_findable(sequence, at):
                block, root, ids = sequence.blocks[at], sequence.root, sequence.block_ids(at, size)
                sequence.blocks[at] = self.pool.fill(block, root, sequence.hashes, at, ids, lossy=sequence.lossy)
                sequence.lossy = sequence.lossy or self.pool.is_lossy(sequence.hashes[at])
            sequence.filled = at + 1
        if self.window is not None and (reached := self._first_reached(end)) > sequence.passed:
            self.pool.release(sequence.blocks[sequence.passed : reached])
            sequence.blocks[sequence.passed : reached] = [-1] * (reached - sequence.passed)
            sequence.passed = reached
        if self.states is not None:
            self.states.computed(sequence)

    def publish(self, beam: Sequence, tokens: int) -> None:
        """List the full blocks of a beam's first tokens, if all before them are listed; it lets go of them next."""
        size = self._size
        for at in range(min(tokens, beam.computed) // size):
            block_hash, ids = beam.hashes[at], beam.block_ids(at, size)
            if self.pool.index.find(block_hash) is None:
                if at and not self.pool.index.lists(beam.hashes[at - 1]):
                    return
                self.pool.store(beam.blocks[at], beam.root, beam.hashes, at, ids, lossy=beam.lossy)
            beam.lossy = beam.lossy or self.pool.is_lossy(block_hash)
            if beam.lossy and beam.spec.exact:
                return

    def let_go(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        size = self._size
        last = sequence.computed // size
        keep_tail = keep_tail and bool(sequence.blocks)
        if keep_tail and sequence.computed % size and sequence.filled == last and self._is_findable(sequence, last):
            ids = sequence.block_ids(last, size)
            block, hashes = sequence.blocks[last], sequence.hashes
            self.pool.keep_tail(block, sequence.root, hashes, last, ids, lossy=sequence.lossy)
        if self.states is not None:
            self.states.end(sequence, keep=keep_tail and self._is_findable(sequence, last))
        self.pool.release(sequence.blocks[sequence.passed :])
        sequence.blocks = []
        sequence.computed = sequence.filled = sequence.passed = 0

    def _first_reached(self, computed: int) -> int:
        """Index of the first block that tokens from `computed` on attend to."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self._size

    def _is_findable(self, sequence: Sequence, at: int) -> bool:
        """The blocks before it must be in the index: a released one may have been evicted. Where the index has a lossy
        block, an exact sequence lists neither its own nor any after it."""
        if sequence.spec.exact and not sequence.private and at < len(sequence.hashes):
            sequence.private = self.pool.is_lossy(sequence.hashes[at])
        if sequence.private:
            return False
        return self.window is None or not at or self.pool.index.lists(sequence.hashes[at - 1])

    def check_integrity(self, sequences: list[Sequence], others: Items[Items[int]] = ()) -> None:
        size = self._size
        for sequence in sequences:
            assert sequence.filled == sequence.computed // size
            assert len(sequence.blocks) * size >= sequence.computed
            assert len(sequence.hashes) == len(sequence.ids) // size
            assert sequence.computed < len(sequence.ids) or sequence.whole.beams is not None
            assert sequence.blocks[: sequence.passed] == [-1] * sequence.passed
            assert -1 not in sequence.blocks[sequence.passed :]
            assert sequence.passed == min(self._first_reached(sequence.computed), len(sequence.blocks))
        check_integrity(self.pool, [*(sequence.blocks for sequence in sequences), *others])
