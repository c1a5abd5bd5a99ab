"""What every worker holds, in one index. Pure: says which snapshots it needs; the loop asks for them.

events ──▶ Follower (one per life of a worker) ──▶ PrefixIndex ◀── find_matches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvproto.errors import CodecError
from kvproto.messages import Heartbeat, Snapshot, Tier
from services.placement.index.changes import TIERS, Changes, read_changes
from services.placement.index.follower import Follower, Follows
from services.placement.index.prefix_index import Depths, Hashes, PrefixIndex, pack

MAX_BLOCKS = 1_000_000
HOLDERS_PER_WORKER = 2  # what it holds, and the snapshot that will replace it
PULLS_AT_ONCE = 8
CLEANED_PER_TICK = 20_000  # blocks of those gone: some milliseconds


@dataclass(frozen=True, slots=True)
class PullSnapshot:
    """Ask a worker for all it holds."""

    worker: str
    epoch: str


class KvIndexer:
    """At most `max_blocks` blocks of at most `max_workers` workers. Owned by the core."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_workers: int = 64) -> None:
        self.index = PrefixIndex(max_blocks, HOLDERS_PER_WORKER * max_workers, len(TIERS))
        self.malformed_total = 0
        self.unknown_total = 0  # events of workers, or lives, that are no members
        self.left_out_total = 0
        self._followers: dict[str, Follower] = {}

    # ------------------------------------------------------------------ workers

    def join(self, worker: str, epoch: str) -> None:
        """Follow this life of the worker; of more workers than there is room for, those who come last are left out."""
        known = self._followers.get(worker)
        if known is not None and known.epoch == epoch:
            return
        self.leave(worker)
        try:
            self._followers[worker] = Follower(self.index, epoch)
        except OverflowError:
            self.left_out_total += 1

    def leave(self, worker: str) -> None:
        gone = self._followers.pop(worker, None)
        if gone is not None:
            gone.end()

    # ------------------------------------------------------------------ what they say

    def on_events(self, worker: str, data: bytes, now: float) -> None:
        """Bytes from a worker's events subject. What cannot be read is a gap, which the next event shows."""
        try:
            self.on_changes(worker, read_changes(data), now)
        except CodecError:
            self.malformed_total += 1

    def on_changes(self, worker: str, changes: Changes, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is None or follower.epoch != changes.epoch:
            self.unknown_total += 1
            return
        follower.on_changes(changes, now)

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        follower = self._followers.get(beat.worker)
        if follower is not None and follower.epoch == beat.epoch:
            follower.on_heartbeat(beat.event_seq, beat.digest, now)

    def on_snapshot(self, worker: str, part: Snapshot, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is not None:
            follower.on_snapshot(part, now)

    def on_snapshot_refused(self, worker: str, epoch: str, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is not None and follower.epoch == epoch:
            follower.give_up_pull(now)

    def tick(self, now: float) -> list[PullSnapshot]:
        """Which snapshots to ask for now; also cleans up behind those gone, a piece at a time."""
        self.index.clean(CLEANED_PER_TICK)
        for follower in self._followers.values():
            follower.tick(now)
        pulling = sum(follower.state is Follows.PULLING for follower in self._followers.values())
        due = [(at, name) for name, one in self._followers.items() if (at := one.due(now)) is not None and at <= now]
        asked = []
        for _, name in sorted(due)[: max(0, PULLS_AT_ONCE - pulling)]:
            follower = self._followers[name]
            follower.begin_pull(now)
            asked.append(PullSnapshot(name, follower.epoch))
        return asked

    # ------------------------------------------------------------------ questions

    def find_matches(self, block_hashes: Sequence[bytes], tier: Tier = TIERS[-1]) -> dict[str, int]:
        """How many blocks from the start of the chain each worker has in `tier` or a faster one; those that have none
        are left out."""
        depths = self.index.find(pack(list(block_hashes)))[TIERS.index(tier)].tolist()
        return {name: depths[one.holder] for name, one in self._followers.items() if depths[one.holder]}

    def depths(self, hashes: Hashes, workers: Sequence[str]) -> Depths:
        """`[tiers, workers]`: how many blocks from the start of the chain each has in the tier or a faster one."""
        holders = [self._followers[name].holder if name in self._followers else -1 for name in workers]
        found = self.index.find(hashes)[:, holders]
        found[:, [number for number, holder in enumerate(holders) if holder < 0]] = 0
        return found

    def matches_by_tier(self, hashes: Hashes, workers: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
        """Of each worker, for each tier, how many blocks of the chain it has there or in a faster one."""
        depths = self.index.find(hashes).T.tolist()
        followers = self._followers
        return {name: tuple(depths[followers[name].holder]) for name in workers if name in followers}

    def state_of(self, worker: str) -> Follows | None:
        follower = self._followers.get(worker)
        return None if follower is None else follower.state

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self.index.check_integrity()
        holders = [one.holder for one in self._followers.values()]
        assert len(set(holders)) == len(holders)
