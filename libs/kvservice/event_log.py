"""Numbered events of a process's block changes, for placement's index. Pure; owned by the process's loop.

`seq` and `digest` move together, so a heartbeat with both lets a listener tell a lost last event from one under way.
The digest covers stored and removed blocks alike, not entries kept, so a listener with a bounded index can compare it;
as the two alternate, it is also that of the held blocks with their tiers. `plain_digest`, without tiers, is for old
listeners.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from kvproto.block_hash import digest_term, in_tier
from kvproto.messages import KvEvents, Snapshot, Tier, TierEvents

KEPT_DIGESTS = 4096
IDLE_PERIOD_S = 0.05  # between two events while no step runs anything
HASHES_PER_PART = 768 * 1024 // 16  # of a snapshot: below what one NATS message takes


class EventLog:
    """Events of one epoch. `seq` is the last event's, 0 before the first. `now` is monotonic seconds."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.seq = 0
        self.digest = 0
        self.plain_digest = 0
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict({0: (0, 0)})  # by digest: seq and plain digest
        self._waiting: list[TierEvents] = []
        self._last_at = float("-inf")

    def note(self, changes: Iterable[TierEvents]) -> None:
        """Queue changes, in order, for the next event."""
        self._waiting += changes

    @property
    def due(self) -> float | None:
        """When the next event may leave; None if nothing waits."""
        return self._last_at + IDLE_PERIOD_S if self._waiting else None

    def flush(self, now: float) -> KvEvents | None:
        """The event of all waiting changes; None if there are none."""
        if not self._waiting:
            return None
        changes, self._waiting = tuple(self._waiting), []
        for change in changes:
            plain = 0
            for run in change.runs:
                for block_hash in run.hashes:
                    plain ^= digest_term(block_hash)
            self.plain_digest ^= plain
            self.digest ^= in_tier(plain, change.tier.number)
        self.seq += 1
        self._last_at = now
        self._known.pop(self.digest, None)  # a digest that comes back stands for its latest event
        self._known[self.digest] = self.seq, self.plain_digest
        if len(self._known) > KEPT_DIGESTS:
            self._known.popitem(last=False)
        return KvEvents(self.epoch, self.seq, changes)

    def snapshot(self, held: Mapping[Tier, Sequence[bytes]], digest: int, asked: Tier | None = None) -> list[Snapshot]:
        """What was `held` under `digest`, of all tiers or the `asked` one, in parts numbered across tiers. Parts of one
        tier have no digest of all tiers. Nothing held is one empty part, so that the listener learns of it; so are no
        states, of a hybrid model. Complete up to `seq`, the event that led to `digest`; 0 for a digest long gone: the
        listener takes every event after it."""
        seq, plain = self._known.get(digest, (0, 0))
        chunks = [
            (tier, b"".join(hashes[start : start + HASHES_PER_PART]))
            for tier, hashes in held.items()
            if asked in (None, tier)
            for start in range(0, max(len(hashes), tier is Tier.STATE), HASHES_PER_PART)
        ] or [(asked or Tier.DEVICE, b"")]
        return [
            Snapshot(self.epoch, seq, tier, part, len(chunks), plain, hashes, None if asked else digest)
            for part, (tier, hashes) in enumerate(chunks)
        ]
