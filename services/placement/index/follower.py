"""Follows one life of a worker or vault through gaps, lost events and snapshots. Pure: a state machine with a holder.

    NEW ──event 1, or a heartbeat that counts none──▶ EXACT ──gap, digest differs, heartbeat stays ahead──▶ BEHIND
      └──any other event or heartbeat──▶ BEHIND ──its turn──▶ PULLING ──all parts──▶ EXACT
                                           ▲                     │
                                           └─too late, unusable──┘

While it is behind, events are kept, up to a limit, and what is known is still served: a worker that lost one event has
not lost its blocks. A snapshot goes to a holder of its own, which takes the other's place when it is whole; of the
events kept meanwhile those that the snapshot covers are dropped and the others applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvfleet.placement.index.changes import TIERS, Changes, digest_of
from kvfleet.placement.index.prefix_index import PrefixIndex, unpack
from kvproto.block_hash import in_tier
from kvproto.messages import Snapshot

AHEAD_GRACE_S = 0.2  # an event may arrive after the heartbeat that counts it
PULL_LIMIT_S = 5.0  # without a further part
RETRY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0)  # before a pull, by how many there were since it was last calm
CALM_S = 30.0  # without a reason to pull
KEPT_EVENTS = 4096  # while behind; a snapshot covers what is dropped


class Follows(Enum):
    NEW = "new"
    EXACT = "exact"
    BEHIND = "behind"
    PULLING = "pulling"


@dataclass(slots=True)
class _Pull:
    holder: int  # collects the parts
    number: int  # no other pull's
    heard_at: float  # of the last part; before any, when it began
    seq: int = -1
    digest: int = 0
    tier_digest: int | None = None
    parts: int = 0
    got: set[int] = field(default_factory=set)
    found: int = 0  # digest of what came


class Follower:
    """Owned by the KvIndexer, which gives pulls their turn."""

    def __init__(self, index: PrefixIndex, epoch: str, *, pooled: bool = False) -> None:
        self.epoch = epoch
        self.pooled = pooled
        self.state = Follows.NEW
        self.holder = index.add_holder(pooled=pooled)
        self.seq = 0  # of the last event applied
        self._index = index
        self._digest = 0
        self._tier_digest: int | None = 0  # None: never told, as older workers know no such
        self._kept: dict[int, Changes] = {}
        self._pull: _Pull | None = None
        self._ahead_since: float | None = None
        self._pulls = 0  # in a row
        self._behind_since = 0.0

    def due(self, now: float) -> float | None:
        """When to ask for a snapshot; None if there is no need."""
        if self.state is not Follows.BEHIND:
            return None
        return self._behind_since + RETRY_S[min(self._pulls, len(RETRY_S) - 1)]

    # ------------------------------------------------------------------ events

    def on_changes(self, changes: Changes, now: float) -> None:
        if changes.seq <= self.seq and self.state is not Follows.NEW:
            return  # heard twice
        if self.state is Follows.NEW and changes.seq == 1:
            self.state = Follows.EXACT
        if self.state is Follows.EXACT and changes.seq == self.seq + 1:
            self._apply(changes)
            return
        if len(self._kept) < KEPT_EVENTS:
            self._kept[changes.seq] = changes
        if self.state in (Follows.NEW, Follows.EXACT):
            self._fall_behind(now)

    def on_heartbeat(self, seq: int, digest: int, now: float, tier_digest: int | None = None) -> None:
        if self.state is Follows.NEW:
            if seq:
                self._fall_behind(now)
            else:
                self.state = Follows.EXACT
        elif self.state is Follows.EXACT:
            if seq == self.seq and not self._agrees(digest, tier_digest):
                self._fall_behind(now)
            elif seq > self.seq:
                if self._ahead_since is None:
                    self._ahead_since = now
                elif now - self._ahead_since > AHEAD_GRACE_S:
                    self._fall_behind(now)
            else:
                self._ahead_since = None

    def begin_pull(self, number: int, now: float) -> None:
        """The snapshot is being asked for. Raises OverflowError if there is no room for it."""
        self._pull = _Pull(self._index.add_holder(pooled=self.pooled), number, now)
        self._pulls += 1
        self.state = Follows.PULLING

    def on_snapshot(self, part: Snapshot, now: float, number: int | None = None) -> None:
        """Parts come in any order; those of another life, snapshot or pull are not for us. `number`: of the pull that
        they answer, if that is known."""
        pull = self._pull
        if pull is None or part.epoch != self.epoch or not 0 <= part.part < part.parts:
            return
        if number not in (None, pull.number):
            return
        if pull.parts == 0:
            pull.seq, pull.digest, pull.tier_digest, pull.parts = part.seq, part.digest, part.tier_digest, part.parts
        whole = part.seq, part.digest, part.tier_digest, part.parts
        if whole != (pull.seq, pull.digest, pull.tier_digest, pull.parts) or part.part in pull.got:
            return
        try:
            hashes, tier = unpack(part.hashes), TIERS.index(part.tier)
        except ValueError:
            self.give_up_pull(now)
            return
        pull.got.add(part.part)
        pull.heard_at = now
        pull.found ^= in_tier(digest_of(hashes), tier)
        self._index.store(pull.holder, tier, hashes)
        if len(pull.got) < pull.parts:
            return
        if pull.tier_digest in (None, pull.found):
            self._take_over(pull, now)
        else:  # it is not what was held at the event that it names
            self.give_up_pull(now)

    def tick(self, now: float) -> None:
        if self._pull is not None and now - self._pull.heard_at > PULL_LIMIT_S:
            self.give_up_pull(now)

    def give_up_pull(self, now: float, number: int | None = None) -> None:
        """It does not come, or makes no sense. `number`: only if it is this one."""
        if self._pull is not None and number in (None, self._pull.number):
            self._index.retire(self._pull.holder)
            self._pull = None
            self._fall_behind(now)

    def end(self) -> None:
        """The life is over: it holds nothing any more."""
        for holder in (self.holder, *([self._pull.holder] if self._pull else [])):
            self._index.retire(holder)

    def _apply(self, changes: Changes) -> None:
        for change in changes.changes:
            if change.removed:
                self._index.remove(self.holder, change.tier, change.hashes)
            else:
                self._index.store(self.holder, change.tier, change.hashes)
        self._digest ^= changes.digest
        if self._tier_digest is not None:
            self._tier_digest ^= changes.tier_digest
        self.seq = changes.seq
        self._ahead_since = None

    def _agrees(self, digest: int, tier_digest: int | None) -> bool:
        if tier_digest is None or self._tier_digest is None:
            return digest == self._digest
        return tier_digest == self._tier_digest

    def _take_over(self, pull: _Pull, now: float) -> None:
        self._index.retire(self.holder)
        self.holder, self.seq = pull.holder, pull.seq
        self._digest, self._tier_digest = pull.digest, pull.tier_digest
        self._pull = None
        self.state = Follows.EXACT
        kept, self._kept = self._kept, {}
        for seq in sorted(seq for seq in kept if seq > self.seq):
            self.on_changes(kept[seq], now)  # a gap among them puts it behind again

    def _fall_behind(self, now: float) -> None:
        if self._behind_since + CALM_S < now:
            self._pulls = 0
        self.state = Follows.BEHIND
        self._behind_since = now
        self._ahead_since = None
