"""What every worker holds, and what vaults hold together, in one index. Pure: says which snapshots it needs; the loop
asks for them.

events ──▶ Follower (one per life of a worker or vault) ──▶ PrefixIndex ◀── find_matches

Blocks are spread over vaults by runs, and a worker asks whichever has them: so vaults are one pool, and in the vault
tier each worker has what it holds itself and what the pool holds from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvfleet.placement.index.changes import TIERS, Changes
from kvfleet.placement.index.follower import Follower, Follows
from kvfleet.placement.index.prefix_index import Depths, Hashes, PrefixIndex, unpack
from kvproto.messages import Heartbeat, Snapshot, Tier

MAX_BLOCKS = 1_000_000
MAX_WORKERS = 112
MAX_VAULTS = 4  # in places of their own; more of them take places of workers that are not there
PULLS_AT_ONCE = 8
SPARE_HOLDERS = 12  # snapshots that are coming, and what they replaced until it is cleaned up
CLEANED_PER_TICK = 20_000  # blocks of those gone: some milliseconds


@dataclass(frozen=True, slots=True)
class PullSnapshot:
    """Ask a worker for all it holds; parts come back to `on_snapshot`. An action of the core as it is."""

    worker: str
    epoch: str
    pull: int  # what comes back is told by it from what an earlier one asked for


class KvIndexer:
    """At most `max_blocks` blocks of at most `max_workers` workers, and some vaults. Owned by the core."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_workers: int = MAX_WORKERS) -> None:
        self.max_workers = max_workers
        self.index = PrefixIndex(max_blocks, max_workers + MAX_VAULTS + SPARE_HOLDERS, len(TIERS))
        self.unknown_total = 0  # events of workers, or lives, that are no members
        self.left_out_total = 0
        self._followers: dict[str, Follower] = {}
        self._pulls = 0
        self._generation = -1  # of the index, when these were noted:
        self._asked: tuple[str, ...] = ()
        self._holders = np.empty(0, dtype=np.intp)
        self._strangers = False  # whether somebody of them is not followed

    # ------------------------------------------------------------------ who is followed

    def join(self, member: str, epoch: str, *, vault: bool = False) -> None:
        """Follow this life of a worker or vault; of more than there is room for, those who come last are left out."""
        known = self._followers.get(member)
        if known is not None and (known.epoch, known.pooled) == (epoch, vault):
            return
        self.leave(member)
        if not self._follow(member, epoch, vault):
            self.left_out_total += 1

    def _follow(self, member: str, epoch: str, vault: bool) -> bool:
        """Whether there was room: the spare holders are for snapshots."""
        workers = sum(not one.pooled for one in self._followers.values())
        if len(self._followers) >= self.max_workers + MAX_VAULTS or (not vault and workers >= self.max_workers):
            return False
        self._followers[member] = Follower(self.index, epoch, pooled=vault)
        return True

    def leave(self, member: str) -> None:
        gone = self._followers.pop(member, None)
        if gone is not None:
            gone.end()

    # ------------------------------------------------------------------ what they say

    def on_changes(self, worker: str, changes: Changes, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is None or follower.epoch != changes.epoch:
            self.unknown_total += 1
            return
        follower.on_changes(changes, now)

    def on_heartbeat(self, beat: Heartbeat, now: float, *, vault: bool = False) -> None:
        """Of a living worker or vault."""
        follower = self._followers.get(beat.worker)
        if follower is None and self._follow(beat.worker, beat.epoch, vault):  # it was left out, and now there is room
            follower = self._followers[beat.worker]
        if follower is not None and follower.epoch == beat.epoch:
            follower.on_heartbeat(beat.event_seq, beat.digest, now, beat.tier_digest)

    def on_snapshot(self, worker: str, part: Snapshot, now: float, pull: int | None = None) -> None:
        follower = self._followers.get(worker)
        if follower is not None:
            follower.on_snapshot(part, now, pull)

    def on_snapshot_refused(self, worker: str, pull: int | None, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is not None:
            follower.give_up_pull(now, pull)

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
            try:
                follower.begin_pull(self._pulls + 1, now)
            except OverflowError:
                break  # no room for one more snapshot now: what is known goes on being served
            self._pulls += 1
            asked.append(PullSnapshot(name, follower.epoch, self._pulls))
        return asked

    # ------------------------------------------------------------------ questions

    def find_matches(self, block_hashes: Sequence[bytes], tier: Tier = TIERS[-1]) -> dict[str, int]:
        """How many blocks from the start of the chain each worker has in `tier` or a faster one; those that have none
        are left out. Raises ValueError if the hashes do not have 16 bytes each."""
        # Their lengths one by one, as `pack` checks them, would take as long as all else together: in a question, a
        # wrong one costs its asker an answer and nobody else anything.
        hashes = unpack(b"".join(block_hashes))
        if len(hashes) != len(block_hashes):
            raise ValueError("block hashes have 16 bytes")
        depths = self.index.find(hashes)[TIERS.index(tier)].tolist()
        return {name: depths[one.holder] for name, one in self._followers.items() if depths[one.holder]}

    def depths(self, hashes: Hashes, workers: tuple[str, ...]) -> Depths:
        """`[tiers, workers]`: how many blocks from the start of the chain each has in the tier or a faster one; who is
        not followed has what vaults have."""
        found = self.index.find(hashes)
        holders = self._holders_of(workers)
        depths = found.take(holders, axis=1)
        if self._strangers:
            depths[:, holders < 0] = 0
            depths[-1, holders < 0] = self.index.pooled
        return depths

    def holder_of(self, member: str) -> int | None:
        """Its number in the index; another one after each snapshot."""
        follower = self._followers.get(member)
        return None if follower is None else follower.holder

    def _holders_of(self, workers: tuple[str, ...]) -> npt.NDArray[np.intp]:
        """The holders that stand for them, -1 for those not followed; kept, as a decision asks as the last one did."""
        if workers is not self._asked or self._generation != self.index.generation:
            at = {name: one.holder for name, one in self._followers.items()}
            self._asked, self._generation = workers, self.index.generation
            self._holders = np.array([at.get(name, -1) for name in workers], dtype=np.intp)
            self._strangers = bool((self._holders < 0).any())
        return self._holders

    def state_of(self, worker: str) -> Follows | None:
        follower = self._followers.get(worker)
        return None if follower is None else follower.state

    def vaults(self) -> tuple[int, int]:
        """How many are followed, and blocks that they hold, those held by several counted several times."""
        blocks = [self.index.held_by(one.holder) for one in list(self._followers.values()) if one.pooled]
        return len(blocks), sum(blocks)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self.index.check_integrity()
        holders = [one.holder for one in self._followers.values()]
        assert len(set(holders)) == len(holders)
