"""What every worker holds, and vaults together, followed through gaps, lost events and snapshots. Pure: it says which
snapshots it needs, and the loop asks for them. Vaults are one pool: in the vault tier each worker has what it holds
itself and what the pool holds from there on. There is a Follower for each life of a worker or vault; its states:

    NEW ──event 1, or a heartbeat that counts none──▶ EXACT ──gap, digest differs, heartbeat stays ahead──▶ BEHIND
      └──any other event or heartbeat──▶ BEHIND ──its turn──▶ PULLING ──all parts──▶ EXACT
                                           ▲                     │
                                           └─too late, unusable──┘

While it is behind, it keeps events, up to a limit, and still serves what it knows: a worker that lost one event has not
lost its blocks. A snapshot goes to a holder of its own, which takes the other's place when it is whole; then the kept
events that it does not cover are applied.

A hybrid model's worker can go on only from a snapshot of its recurrent state. It tells behind which blocks it has one,
and what it has of a prompt counts up to the last of those; with what vaults have, up to the last one here or there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvfleet.placement.index.changes import STATE, TIERS, Changes, digest_of
from kvfleet.placement.index.prefix_index import Depths, Hashes, PrefixIndex, unpack
from kvproto.block_hash import HASH_BYTES, in_tier
from kvproto.messages import Heartbeat, Snapshot, Tier

MAX_BLOCKS = 1_000_000
MAX_WORKERS = 112
MAX_VAULTS = 4  # in places of their own; more vaults take free places of workers
PULLS_AT_ONCE = 8
SPARE_HOLDERS = 12  # for snapshots that are coming, and replaced holders until they are cleaned up
CLEANED_PER_TICK = 20_000  # blocks: some milliseconds
AHEAD_GRACE_S = 0.2  # an event may arrive after the heartbeat that counts it
PULL_LIMIT_S = 5.0  # without a further part
NUMBERS = {tier: tier.number for tier in (*TIERS, Tier.STATE)}
RETRY_S = (0.0, 0.5, 1.0, 2.0, 5.0, 15.0)  # before a pull, by the number of pulls in a row
CALM_S = 30.0  # without a reason to pull: the row ends
KEPT_EVENTS = 4096  # while behind; a snapshot covers dropped ones


@dataclass(frozen=True, slots=True)
class PullSnapshot:
    """An action: ask a worker for all that it holds; parts come back to `on_snapshot`."""

    worker: str
    epoch: str
    pull: int  # names it in the answer, which may be to an earlier one


def single(hashes: Hashes) -> set[bytes]:
    raw = hashes.tobytes()
    return {raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)}


def state_ends(chain: Mapping[bytes, int], *places: set[bytes]) -> list[int]:
    """Behind how many blocks of a chain a state stands in one of the `places`, ascending, from 0 on. `chain`: numbers
    of its blocks, from 1 on. A set's own pace, as each worker of a decision is asked."""
    return [0, *sorted({chain[one] for states in places for one in chain.keys() & states})]


def last_end(ends: Sequence[int], depth: int) -> int:
    return ends[bisect_right(ends, depth) - 1]


class Follows(Enum):
    NEW = "new"
    EXACT = "exact"
    BEHIND = "behind"
    PULLING = "pulling"


@dataclass(slots=True)
class _Pull:
    holder: int  # collects the parts
    number: int  # unique
    heard_at: float  # the last part, or the start
    whole: tuple[int, int, int | None, int] | None = None  # what the first part to come says of all of them
    got: set[int] = field(default_factory=set)
    found: int = 0  # digest of the parts so far
    states: set[bytes] | None = None  # as a Follower's


@dataclass(eq=False, slots=True)
class Follower:
    """Owned by the KvIndexer, which gives pulls their turn."""

    index: PrefixIndex
    epoch: str
    pooled: bool = False
    state: Follows = Follows.NEW
    holder: int = field(init=False)
    seq: int = 0  # of the last event applied
    digest: int = 0
    tier_digest: int | None = 0  # None: unknown, as with older workers
    states: set[bytes] | None = None  # blocks with a snapshot behind them; None: the model needs none
    kept: dict[int, Changes] = field(default_factory=dict)
    pull: _Pull | None = None
    pulls: int = 0  # in a row
    ahead_since: float | None = None
    behind_since: float = 0.0

    def __post_init__(self) -> None:
        self.holder = self.index.add_holder(pooled=self.pooled)

    @property
    def due(self) -> float:
        """When to pull, if it is behind."""
        return self.behind_since + RETRY_S[min(self.pulls, len(RETRY_S) - 1)]

    def on_changes(self, changes: Changes, now: float) -> None:
        if changes.seq <= self.seq and self.state is not Follows.NEW:
            return  # heard twice
        if self.state is Follows.NEW and changes.seq == 1:
            self.state = Follows.EXACT
        if self.state is Follows.EXACT and changes.seq == self.seq + 1:
            self._apply(changes)
            return
        if len(self.kept) < KEPT_EVENTS:
            self.kept[changes.seq] = changes
        if self.state in (Follows.NEW, Follows.EXACT):
            self._fall_behind(now)

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        seq = beat.event_seq
        if self.state is Follows.NEW and not seq:
            self.state = Follows.EXACT
        elif self.state is Follows.NEW:
            self._fall_behind(now)
        elif self.state is Follows.EXACT and seq > self.seq:
            self.ahead_since = now if self.ahead_since is None else self.ahead_since
            if now - self.ahead_since > AHEAD_GRACE_S:
                self._fall_behind(now)
        elif self.state is Follows.EXACT:
            self.ahead_since = None
            by_tier = None not in (beat.tier_digest, self.tier_digest)
            agrees = beat.tier_digest == self.tier_digest if by_tier else beat.digest == self.digest
            if seq == self.seq and not agrees:
                self._fall_behind(now)

    def begin_pull(self, number: int, now: float) -> None:
        """Raises OverflowError if there is no room for the snapshot."""
        self.pull = _Pull(self.index.add_holder(pooled=self.pooled), number, now)
        self.pulls += 1
        self.state = Follows.PULLING

    def on_snapshot(self, part: Snapshot, now: float, number: int | None = None) -> None:
        """Take a part; they come in any order. Those of another life, snapshot or pull `number` are ignored."""
        pull = self.pull
        if pull is None or number not in (None, pull.number):
            return
        if part.epoch != self.epoch or not 0 <= part.part < part.parts or part.part in pull.got:
            return
        whole = part.seq, part.digest, part.tier_digest, part.parts
        pull.whole = pull.whole or whole
        if pull.whole != whole:
            return
        try:
            hashes, tier = unpack(part.hashes), NUMBERS[part.tier]
        except (ValueError, KeyError):
            self.give_up_pull(now)
            return
        pull.got.add(part.part)
        pull.heard_at = now
        pull.found ^= in_tier(digest_of(hashes), tier)
        if tier == STATE:
            pull.states = (pull.states or set()) | single(hashes)
        else:
            self.index.store(pull.holder, tier, hashes)
        if len(pull.got) < part.parts:
            return
        if part.tier_digest in (None, pull.found):
            self._take_over(pull.holder, part, now)
        else:  # the parts are not of the state that they name
            self.give_up_pull(now)

    def give_up_pull(self, now: float, number: int | None = None) -> None:
        """Drop a snapshot that is lost or unusable; with `number`, only that pull's."""
        if self.pull is not None and number in (None, self.pull.number):
            self.index.retire(self.pull.holder)
            self.pull = None
            self._fall_behind(now)

    def end(self) -> None:
        self.index.retire(self.holder)
        if self.pull is not None:
            self.index.retire(self.pull.holder)

    def _apply(self, changes: Changes) -> None:
        for change in changes.changes:
            if change.tier == STATE:
                self.states = set() if self.states is None else self.states
                (self.states.difference_update if change.removed else self.states.update)(single(change.hashes))
            elif change.removed:
                self.index.remove(self.holder, change.tier, change.hashes)
            else:
                self.index.store(self.holder, change.tier, change.hashes)
        self.digest ^= changes.digest
        if self.tier_digest is not None:
            self.tier_digest ^= changes.tier_digest
        self.seq = changes.seq
        self.ahead_since = None

    def _take_over(self, holder: int, snapshot: Snapshot, now: float) -> None:
        self.index.retire(self.holder)
        if self.pull is not None and (self.pull.states is not None or self.states is not None):
            self.states = self.pull.states or set()
        self.holder, self.seq = holder, snapshot.seq
        self.digest, self.tier_digest = snapshot.digest, snapshot.tier_digest
        self.pull = None
        self.state = Follows.EXACT
        kept, self.kept = self.kept, {}
        for seq in sorted(seq for seq in kept if seq > self.seq):
            self.on_changes(kept[seq], now)  # a gap among them puts it behind again

    def _fall_behind(self, now: float) -> None:
        if self.behind_since + CALM_S < now:
            self.pulls = 0
        self.state = Follows.BEHIND
        self.behind_since = now
        self.ahead_since = None


class KvIndexer:
    """At most `max_blocks` blocks of at most `max_workers` workers, and some vaults. Owned by the core."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_workers: int = MAX_WORKERS) -> None:
        self.max_workers = max_workers
        self.index = PrefixIndex(max_blocks, max_workers + MAX_VAULTS + SPARE_HOLDERS, len(TIERS))
        self.unknown_total = 0  # events of workers, or lives, that are no members
        self.left_out_total = 0
        self.pooled = 0  # as the index's, of the last `depths`; for a hybrid model to the last state in a vault
        self._followers: dict[str, Follower] = {}
        self._recurrent: dict[str, set[bytes]] = {}  # states of hybrid models' workers
        self._pulls = 0

    def join(self, member: str, epoch: str, *, vault: bool = False) -> None:
        """Follow this life of a worker or vault, if there is room."""
        known = self._followers.get(member)
        if known is not None and (known.epoch, known.pooled) == (epoch, vault):
            return
        self.leave(member)
        self.left_out_total += not self._follow(member, epoch, vault)

    def _follow(self, member: str, epoch: str, vault: bool) -> bool:
        """Returns whether there was room; spare holders are for snapshots."""
        workers = sum(not one.pooled for one in self._followers.values())
        if len(self._followers) >= self.max_workers + MAX_VAULTS or (not vault and workers >= self.max_workers):
            return False
        self._followers[member] = Follower(self.index, epoch, vault)
        return True

    def leave(self, member: str) -> None:
        self._recurrent.pop(member, None)
        if (gone := self._followers.pop(member, None)) is not None:
            gone.end()

    def on_changes(self, worker: str, changes: Changes, now: float) -> None:
        follower = self._followers.get(worker)
        if follower is None or follower.epoch != changes.epoch:
            self.unknown_total += 1
            return
        follower.on_changes(changes, now)
        self._note(worker, follower)

    def on_heartbeat(self, beat: Heartbeat, now: float, *, vault: bool = False) -> None:
        if beat.worker not in self._followers:
            self._follow(beat.worker, beat.epoch, vault)  # there may be room for it by now
        follower = self._followers.get(beat.worker)
        if follower is not None and follower.epoch == beat.epoch:
            follower.on_heartbeat(beat, now)

    def on_snapshot(self, worker: str, part: Snapshot, now: float, pull: int | None = None) -> None:
        if (follower := self._followers.get(worker)) is not None:
            follower.on_snapshot(part, now, pull)
            self._note(worker, follower)

    def _note(self, worker: str, follower: Follower) -> None:
        if follower.states is not None and not follower.pooled:
            self._recurrent[worker] = follower.states

    def on_snapshot_refused(self, worker: str, pull: int | None, now: float) -> None:
        if (follower := self._followers.get(worker)) is not None:
            follower.give_up_pull(now, pull)

    def tick(self, now: float) -> list[PullSnapshot]:
        """Returns the snapshots to ask for now; also cleans up a piece of the retired holders."""
        self.index.clean(CLEANED_PER_TICK)
        for follower in self._followers.values():
            if follower.pull is not None and now - follower.pull.heard_at > PULL_LIMIT_S:
                follower.give_up_pull(now)
        pulling = sum(follower.state is Follows.PULLING for follower in self._followers.values())
        behind = [(one.due, name) for name, one in self._followers.items() if one.state is Follows.BEHIND]
        due = sorted(one for one in behind if one[0] <= now)
        asked = []
        for _, name in due[: max(0, PULLS_AT_ONCE - pulling)]:
            follower = self._followers[name]
            try:
                follower.begin_pull(self._pulls + 1, now)
            except OverflowError:
                break  # no room for one more snapshot now
            self._pulls += 1
            asked.append(PullSnapshot(name, follower.epoch, self._pulls))
        return asked

    def find_matches(self, block_hashes: Sequence[bytes], tier: Tier = TIERS[-1]) -> dict[str, int]:
        """How many blocks from the start of the chain each worker has in `tier` or a faster one; workers with none
        are left out. Raises ValueError if the hashes do not have 16 bytes each."""
        # Only in the mean: to check each length takes as long as all else, and a wrong hash spoils only its own answer.
        joined = b"".join(block_hashes)
        hashes = unpack(joined)
        if len(hashes) != len(block_hashes):
            raise ValueError("block hashes have 16 bytes")
        depths = self.index.find(hashes)[TIERS.index(tier)].tolist()
        found = {name: depths[one.holder] for name, one in self._followers.items() if depths[one.holder]}
        chain = {one: number for number, one in enumerate(block_hashes, 1)} if self._recurrent else {}
        vaults = self._vault_states() if tier is TIERS[-1] else []
        for name, states in self._recurrent.items():
            if depth := last_end(state_ends(chain, states, *vaults), found.pop(name, 0)):
                found[name] = depth
        return found

    def depths(self, hashes: Hashes, workers: tuple[str, ...]) -> Depths:
        """As `PrefixIndex.depths`; workers not followed have what vaults have."""
        depths = self.index.depths(hashes, workers, self.holder_of)
        self.pooled = self.index.pooled
        recurrent = [(at, self._recurrent[name]) for at, name in enumerate(workers) if name in self._recurrent]
        if not recurrent:
            return depths
        raw = hashes.tobytes()
        chain = {raw[at : at + HASH_BYTES]: at // HASH_BYTES + 1 for at in range(0, len(raw), HASH_BYTES)}
        vaults = state_ends(chain, *self._vault_states())
        self.pooled = last_end(vaults, self.index.pooled)
        for at, states in recurrent:
            own, held = state_ends(chain, states), depths[:, at].tolist()
            depths[:, at] = [last_end(own, depth) for depth in held]
            depths[-1, at] = max(depths[-1, at], last_end(vaults, held[-1]))
        return depths

    def _vault_states(self) -> list[set[bytes]]:
        return [one.states for one in self._followers.values() if one.pooled and one.states]

    def holder_of(self, member: str) -> int | None:
        """Its number in the index; each snapshot changes it."""
        follower = self._followers.get(member)
        return None if follower is None else follower.holder

    def state_of(self, worker: str) -> Follows | None:
        follower = self._followers.get(worker)
        return None if follower is None else follower.state

    def vaults(self) -> tuple[int, int]:
        """How many are followed, and their blocks, each once for each vault."""
        blocks = [self.index.held_by(one.holder) for one in list(self._followers.values()) if one.pooled]
        return len(blocks), sum(blocks)

    def check_integrity(self) -> None:
        self.index.check_integrity()
        holders = [one.holder for one in self._followers.values()]
        assert len(set(holders)) == len(holders)
