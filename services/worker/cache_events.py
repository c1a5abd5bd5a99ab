"""Numbers what changed in the content index, for placement's index to follow. Pure; one owner per worker: the loop.

`seq` and `digest` move together, so a heartbeat that carries both lets a listener tell a lost last event from an event
that is still under way. The digest covers operations received, stored and removed alike, not entries kept: a listener
may keep a bounded part of the index and still compare.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvproto.block_hash import digest_term
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from services.worker.outputs import StepResult

KEPT_DIGESTS = 4096


class CacheEvents:
    """Events of one epoch. `seq` is that of the last event made, 0 before the first."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.seq = 0
        self.digest = 0
        self._seq_of: OrderedDict[int, int] = OrderedDict({0: 0})

    def batch(self, results: Iterable[StepResult], tier: Tier = Tier.DEVICE) -> KvEvents | None:
        """One event for what the steps changed, in their order; None if that is nothing."""
        changes: list[TierEvents] = []
        for result in results:
            if result.removed:
                changes.append(TierEvents(tier, True, (BlockRun(b"", tuple(result.removed)),)))
            if result.stored:
                runs = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in result.stored)
                changes.append(TierEvents(tier, False, runs))
        if not changes:
            return None
        for change in changes:
            for run in change.runs:
                for block_hash in run.hashes:
                    self.digest ^= digest_term(block_hash)
        self.seq += 1
        self._seq_of.pop(self.digest, None)  # a digest that comes back stands for its latest event
        self._seq_of[self.digest] = self.seq
        if len(self._seq_of) > KEPT_DIGESTS:
            self._seq_of.popitem(last=False)
        return KvEvents(self.epoch, self.seq, tuple(changes))

    def seq_of(self, digest: int) -> int:
        """Which event led to `digest`: the one that a snapshot taken under it is complete up to.

        Of a digest that is long gone nothing is known: 0, so that a listener takes every event after it.
        """
        return self._seq_of.get(digest, 0)
