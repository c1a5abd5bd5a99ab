"""Numbers what changed in what a process holds, for placement's index to follow. Pure; one owner per process: its loop.

`seq` and `digest` move together, so a heartbeat that carries both lets a listener tell a lost last event from an event
that is still under way. The digest covers operations received, stored and removed alike, not entries kept: a listener
may keep a bounded part of the index and still compare. Stored and removed take turns, so it is also that of what is
held, in which tier. `plain_digest` leaves the tier out, for listeners that know no other.
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
    """Events of one epoch. `seq` is that of the last event made, 0 before the first. `now` is monotonic seconds."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.seq = 0
        self.digest = 0
        self.plain_digest = 0
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict({0: (0, 0)})  # by digest: seq and plain digest
        self._waiting: list[TierEvents] = []
        self._last_at = float("-inf")

    def note(self, changes: Iterable[TierEvents]) -> None:
        """These happened, in this order; they wait for an event."""
        self._waiting += changes

    @property
    def due(self) -> float | None:
        """When what waits may leave; None if nothing does."""
        return self._last_at + IDLE_PERIOD_S if self._waiting else None

    def flush(self, now: float) -> KvEvents | None:
        """The event of all that waits; None if nothing does."""
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

    def seq_of(self, digest: int) -> int:
        """Which event led to `digest`: the one that a snapshot taken under it is complete up to.

        Of a digest that is long gone nothing is known: 0, so that a listener takes every event after it.
        """
        return self._known.get(digest, (0, 0))[0]

    def snapshot(self, held: Mapping[Tier, Sequence[bytes]], digest: int, asked: Tier | None = None) -> list[Snapshot]:
        """What was `held` under `digest`, of all tiers or the one `asked` for, in parts numbered across tiers.

        All parts are of one event; those of one tier alone have no digest of all tiers. Nothing held is one empty part:
        the asker is to hear that it is nothing.
        """
        seq, plain = self._known.get(digest, (0, 0))
        chunks = [
            (tier, b"".join(hashes[start : start + HASHES_PER_PART]))
            for tier, hashes in held.items()
            if asked in (None, tier)
            for start in range(0, len(hashes), HASHES_PER_PART)
        ] or [(asked or Tier.DEVICE, b"")]
        return [
            Snapshot(self.epoch, seq, tier, part, len(chunks), plain, hashes, None if asked else digest)
            for part, (tier, hashes) in enumerate(chunks)
        ]
