"""Who is computing what others need next, so that no prefix is computed twice at the same time. Pure; lives for a step.

A sequence whose next block a running one is at does better to wait for it. It gives its turn to that one, its leader:
so a request of high priority never waits for one that nobody serves. Choices of one prompt follow the first of them to
the last token of the prompt, everybody else follows by the hash of the next full block.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvfleet.worker.blocks.block_pool import Match
from kvfleet.worker.schedule.sequence import Sequence, SequenceState


class PromptLeaders:
    """`begun` are the running sequences that need more than one token."""

    def __init__(self, begun: Iterable[Sequence], block_size: int) -> None:
        self._block_size = block_size
        self._at_block: dict[bytes, Sequence] = {}
        for sequence in begun:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        if sequence.filled < len(sequence.hashes):
            self._at_block.setdefault(sequence.hashes[sequence.filled], sequence)

    def known(self, sequence: Sequence) -> Sequence | None:
        """The leader found in an earlier step, while it still is one."""
        leader = sequence.leader
        if leader is not None and leader.state is SequenceState.RUNNING and leader.computed < sequence.shared:
            return leader
        sequence.leader = None
        return None

    def find(self, sequence: Sequence, match: Match) -> Sequence | None:
        """A leader for what is not cached of a waiting sequence; noted in it, with how far it leads."""
        limit = len(sequence.ids) - 1  # the last token is run by each itself, for its logits
        if match.tokens == limit:
            return None
        for sibling in sequence.siblings:
            if sibling.state is SequenceState.RUNNING:
                shared = min(sequence.agrees_with(sibling), limit)
                if max(sibling.computed, match.tokens) < shared:
                    sequence.leader, sequence.shared = sibling, shared
                    return sibling
                break  # it has all that can be had from a sibling
        full = len(match.blocks)
        leader = self._at_block.get(sequence.hashes[full]) if full < len(sequence.hashes) else None
        if leader is not None:
            sequence.leader, sequence.shared = leader, min((leader.filled + 1) * self._block_size, limit)
        return leader
