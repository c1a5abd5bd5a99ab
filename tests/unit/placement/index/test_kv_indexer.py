"""The indexer follows workers through lost, doubled, reordered and forged events, restarts and snapshots."""

from __future__ import annotations

import hashlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.index.kv_indexer import (
    AHEAD_GRACE_S,
    KEPT_EVENTS,
    PULL_LIMIT_S,
    PULLS_AT_ONCE,
    Follows,
    KvIndexer,
    PullSnapshot,
)
from kvfleet.placement.index.prefix_index import pack
from kvproto import codec
from kvproto.block_hash import digest_term
from kvproto.errors import CodecError
from kvproto.messages import BlockRun, Heartbeat, KvEvents, Snapshot, State, Tier, TierEvents
from kvservice.event_log import EventLog

PART = 50  # hashes of a snapshot's part


def name(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class Publisher:
    """A worker as its events, heartbeats and snapshots show it."""

    def __init__(self, worker: str, epoch: str = "e1") -> None:
        self.worker, self.epoch = worker, epoch
        self.seq = self.digest = 0
        self.held: dict[bytes, Tier] = {}

    def event(self, *, stored: list[bytes] = (), removed: list[bytes] = (), tier: Tier = Tier.DEVICE) -> bytes:  # type: ignore[assignment]
        self.seq += 1
        changes = []
        for is_removal, hashes in ((True, removed), (False, stored)):
            if hashes:
                changes.append(TierEvents(tier, is_removal, (BlockRun(b"", tuple(hashes)),)))
            for one in hashes:
                self.digest ^= digest_term(one)
                if is_removal:
                    self.held.pop(one, None)
                else:
                    self.held[one] = tier
        return codec.encode_events(KvEvents(self.epoch, self.seq, tuple(changes)))

    def beat(self) -> Heartbeat:
        return Heartbeat(self.worker, self.epoch, State.READY, event_seq=self.seq, digest=self.digest)

    def snapshot(self) -> list[Snapshot]:
        chunks = []
        for tier in Tier:
            hashes = [one for one, where in self.held.items() if where is tier]
            chunks += [(tier, hashes[at : at + PART]) for at in range(0, len(hashes), PART)]
        chunks = chunks or [(Tier.DEVICE, [])]
        return [
            Snapshot(self.epoch, self.seq, tier, part, len(chunks), self.digest, b"".join(hashes))
            for part, (tier, hashes) in enumerate(chunks)
        ]


def follow(worker: Publisher) -> KvIndexer:
    indexer = KvIndexer(10_000, 8)
    indexer.join(worker.worker, worker.epoch)
    return indexer


def test_events_from_the_first_on_need_no_snapshot() -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    chain = [name(at) for at in range(40)]
    indexer.on_changes("w", read_changes(worker.event(stored=chain[:20])), 0)
    indexer.on_changes("w", read_changes(worker.event(stored=chain[20:30], tier=Tier.HOST)), 0)
    indexer.on_heartbeat(worker.beat(), 1)
    assert indexer.tick(1) == []
    assert indexer.find_matches(chain) == {"w": 30}
    assert indexer.find_matches(chain, Tier.DEVICE) == {"w": 20}
    indexer.on_changes("w", read_changes(worker.event(removed=chain[10:20])), 2)
    assert indexer.find_matches(chain) == {"w": 10}
    assert indexer.find_matches(chain[1:]) == {"w": 9}
    assert indexer.find_matches([name(99)]) == {}
    indexer.check_integrity()


def pull(indexer: KvIndexer, worker: Publisher, now: float) -> None:
    assert indexer.tick(now) == [PullSnapshot(worker.worker, worker.epoch, 1)]
    for part in worker.snapshot():
        indexer.on_snapshot(worker.worker, part, now)


@pytest.mark.parametrize("how", ["gap", "lost-last", "malformed", "late-join", "lying-digest"])
def test_what_was_missed_is_pulled_and_meanwhile_the_rest_is_served(how: str) -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    chain = [name(at) for at in range(200)]
    first = worker.event(stored=chain[:50])
    if how != "late-join":
        indexer.on_changes("w", read_changes(first), 0)
        assert indexer.find_matches(chain) == {"w": 50}
    missed = worker.event(stored=chain[50:120])
    if how == "malformed":
        with pytest.raises(CodecError):
            read_changes(missed[:-3])
    if how in ("gap", "malformed", "late-join"):
        indexer.on_changes("w", read_changes(worker.event(stored=chain[120:150])), 1)
    elif how == "lost-last":
        indexer.on_heartbeat(worker.beat(), 1)
        assert indexer.tick(1) == [], "it may be under way"
        indexer.on_heartbeat(worker.beat(), 1 + 2 * AHEAD_GRACE_S)
    else:
        indexer.on_changes("w", read_changes(missed), 1)
        worker.digest ^= 12345
        indexer.on_heartbeat(worker.beat(), 1)
    assert indexer.state_of("w") is Follows.BEHIND
    if how not in ("late-join", "lying-digest"):
        assert indexer.find_matches(chain) == {"w": 50}, "what is known is served"
    assert indexer.tick(2) == [PullSnapshot("w", "e1", 1)]
    parts = worker.snapshot()
    later = worker.event(stored=chain[len(worker.held) :])  # after the snapshot was taken
    indexer.on_changes("w", read_changes(later), 2)
    for part in reversed(parts):
        indexer.on_snapshot("w", part, 2)
    assert indexer.state_of("w") is Follows.EXACT
    assert indexer.find_matches(chain) == {"w": 200}
    indexer.on_heartbeat(worker.beat(), 2)
    assert indexer.state_of("w") is Follows.EXACT
    indexer.tick(3)
    indexer.check_integrity()


def test_doubled_and_late_events_change_nothing() -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    events = [worker.event(stored=[name(at)]) for at in range(10)]
    removal = worker.event(removed=[name(9)])
    for event in events:
        indexer.on_changes("w", read_changes(event), 0)
        indexer.on_changes("w", read_changes(event), 0)
    indexer.on_changes("w", read_changes(removal), 0)
    indexer.on_changes("w", read_changes(events[9]), 0)
    indexer.on_heartbeat(worker.beat(), 0)
    assert indexer.state_of("w") is Follows.EXACT
    assert indexer.find_matches([name(at) for at in range(10)]) == {"w": 9}


def test_a_worker_restarted_in_place_holds_nothing() -> None:
    """And the last events of its former life are nobody's."""
    worker = Publisher("w")
    indexer = follow(worker)
    indexer.on_changes("w", read_changes(worker.event(stored=[name(1)])), 0)
    indexer.join("w", "e1")
    assert indexer.find_matches([name(1)]) == {"w": 1}
    late = worker.event(stored=[name(2)])
    worker = Publisher("w", "e2")
    indexer.join("w", "e2")
    assert indexer.find_matches([name(1)]) == {}
    indexer.on_changes("w", read_changes(late), 1)
    assert indexer.unknown_total == 1
    indexer.on_changes("w", read_changes(worker.event(stored=[name(3)])), 1)
    assert indexer.find_matches([name(3)]) == {"w": 1}
    indexer.leave("w")
    indexer.leave("w")
    assert indexer.find_matches([name(3)]) == {}
    indexer.on_changes("w", read_changes(worker.event(stored=[name(4)])), 2)
    assert indexer.unknown_total == 2
    indexer.tick(3)
    assert len(indexer.index) == 0


def test_an_index_that_restarts_is_complete_again_after_one_round_of_snapshots() -> None:
    workers = [Publisher(f"w{number}") for number in range(20)]
    for number, worker in enumerate(workers):
        for at in range(5):
            worker.event(stored=[name(1000 * number + 10 * at + one) for one in range(10)])
    indexer = KvIndexer(10_000, 20)
    for worker in workers:
        indexer.join(worker.worker, worker.epoch)
        indexer.on_heartbeat(worker.beat(), 0)
    rounds = 0
    while asked := indexer.tick(0):
        rounds += 1
        assert len(asked) <= PULLS_AT_ONCE
        for one in asked:
            for part in next(w for w in workers if w.worker == one.worker).snapshot():
                indexer.on_snapshot(one.worker, part, 0)
    assert rounds == 3
    for number, worker in enumerate(workers):
        assert indexer.find_matches([name(1000 * number + at) for at in range(50)]) == {worker.worker: 50}
    assert all(indexer.state_of(worker.worker) is Follows.EXACT for worker in workers)
    indexer.check_integrity()


def test_a_snapshot_that_does_not_come_is_asked_for_again_ever_more_rarely() -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    worker.event(stored=[name(1)])
    indexer.on_changes("w", read_changes(worker.event(stored=[name(2)])), 0)
    asked = [now / 10 for now in range(600) if indexer.tick(now / 10)]
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert asked[0] == 0
    assert all(wait > PULL_LIMIT_S for wait in waits)
    assert waits == sorted(waits)
    assert 3 <= len(asked) <= 8
    pull_again = indexer.tick(80) or indexer.tick(100)
    assert pull_again
    for part in worker.snapshot():
        indexer.on_snapshot("w", part, 100)
    assert indexer.state_of("w") is Follows.EXACT
    indexer.tick(101)
    assert len(indexer.index) == 2
    indexer.check_integrity()


def far_behind(parts: int) -> tuple[Publisher, KvIndexer, list[Snapshot]]:
    """A worker with so many parts to tell, of which nothing is known."""
    worker = Publisher("w")
    worker.event(stored=[name(at) for at in range(PART * parts)])
    indexer = follow(worker)
    indexer.on_heartbeat(worker.beat(), 0)
    return worker, indexer, worker.snapshot()


def test_a_snapshot_that_goes_on_arriving_may_take_as_long_as_it_takes() -> None:
    _, indexer, parts = far_behind(6)
    (asked,) = indexer.tick(0)
    for number, part in enumerate(parts):
        now = (number + 1) * (PULL_LIMIT_S - 1)
        assert indexer.tick(now) == []
        indexer.on_snapshot("w", part, now, asked.pull)
    assert indexer.state_of("w") is Follows.EXACT
    assert indexer.find_matches([name(at) for at in range(300)]) == {"w": 300}


def test_late_parts_of_a_pull_that_was_given_up_are_not_those_of_the_next() -> None:
    worker, indexer, old = far_behind(2)
    (first,) = indexer.tick(0)
    worker.event(stored=[name(at) for at in range(PART * 2, PART * 3)])
    new, now = worker.snapshot(), PULL_LIMIT_S + 1
    indexer.tick(now)
    (second,) = indexer.tick(now + 1)
    assert second.pull != first.pull
    indexer.on_snapshot("w", old[0], now + 1, first.pull)
    indexer.on_snapshot_refused("w", first.pull, now + 1)
    for part in new:
        indexer.on_snapshot("w", part, now + 1, second.pull)
    assert indexer.state_of("w") is Follows.EXACT
    assert indexer.find_matches([name(at) for at in range(PART * 3)]) == {"w": PART * 3}


def a_log() -> tuple[EventLog, list[bytes]]:
    """One block stored on the device and then on the host, as a worker that knows digests by tier tells it."""
    log, told = EventLog("e1"), []
    for tier in (Tier.DEVICE, Tier.HOST):
        log.note([TierEvents(tier, False, (BlockRun(b"", (name(1),)),))])
        event = log.flush(0.0)
        assert event is not None
        told.append(codec.encode_events(event))
    return log, told


def beat_of(log: EventLog) -> Heartbeat:
    return Heartbeat("w", "e1", State.READY, event_seq=log.seq, digest=log.plain_digest, tier_digest=log.digest)


def test_a_block_in_two_tiers_is_not_nothing() -> None:
    """So a listener that was told of nothing, and a snapshot of nothing, are not taken for up to date."""
    log, told = a_log()
    assert log.plain_digest == 0 != log.digest
    assert [(part.seq, part.tier_digest) for part in log.snapshot({}, 0)] == [(0, 0)]
    indexer = KvIndexer(10_000, 8)
    indexer.join("w", "e1")
    for event in told:
        indexer.on_changes("w", read_changes(event), 0)
    indexer.on_heartbeat(beat_of(log), 0)
    assert indexer.state_of("w") is Follows.EXACT
    other = EventLog("e1")
    for one in (2, 3):
        other.note([TierEvents(Tier.DEVICE, False, (BlockRun(b"", (name(one),)),))])
        other.flush(0.0)
    assert (beat_of(other).event_seq, beat_of(other).digest) != (2, 0)
    indexer.on_heartbeat(beat_of(other), 1)
    assert indexer.state_of("w") is Follows.BEHIND


@pytest.mark.parametrize("is_right", [True, False])
def test_a_snapshot_is_taken_over_if_it_is_what_its_digest_says(is_right: bool) -> None:
    log, _ = a_log()
    indexer = KvIndexer(10_000, 8)
    indexer.join("w", "e1")
    indexer.on_heartbeat(beat_of(log), 0)
    (asked,) = indexer.tick(0)
    held = {Tier.DEVICE: [name(1)], Tier.HOST: [name(1)]} if is_right else {Tier.DEVICE: [name(1)]}
    for part in log.snapshot(held, log.digest):
        indexer.on_snapshot("w", part, 0, asked.pull)
    assert indexer.state_of("w") is (Follows.EXACT if is_right else Follows.BEHIND)
    indexer.on_heartbeat(beat_of(log), 0)
    assert indexer.state_of("w") is (Follows.EXACT if is_right else Follows.BEHIND)


@pytest.mark.parametrize("how", ["odd-bytes", "other-epoch", "part-out-of-range", "unasked", "two-snapshots"])
def test_snapshots_that_make_no_sense_harm_nobody(how: str) -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    indexer.on_changes("w", read_changes(worker.event(stored=[name(1)])), 0)
    lost = worker.event(stored=[name(at) for at in range(2, 120)])
    assert lost
    indexer.on_changes("w", read_changes(worker.event(stored=[name(200)])), 0)
    if how != "unasked":
        assert indexer.tick(0)
    part = worker.snapshot()[0]
    wrong = {
        "odd-bytes": Snapshot("e1", 3, Tier.DEVICE, 0, 1, 0, b"odd"),
        "other-epoch": Snapshot("e0", 3, Tier.DEVICE, 0, 1, 0, name(7)),
        "part-out-of-range": Snapshot("e1", 3, Tier.DEVICE, 5, 2, 0, name(7)),
        "unasked": part,
        "two-snapshots": Snapshot("e1", part.seq + 1, Tier.DEVICE, 1, 2, 0, name(7)),
    }[how]
    if how == "two-snapshots":
        indexer.on_snapshot("w", part, 0)
    indexer.on_snapshot("w", wrong, 0)
    assert indexer.state_of("w") in (Follows.BEHIND, Follows.PULLING)
    assert indexer.find_matches([name(1)]) == {"w": 1}
    assert indexer.find_matches([name(7)]) == {}
    indexer.check_integrity()


def test_events_kept_for_a_snapshot_are_bounded() -> None:
    worker = Publisher("w")
    indexer = follow(worker)
    worker.event()
    for at in range(KEPT_EVENTS + 100):
        indexer.on_changes("w", read_changes(worker.event(stored=[name(at)])), 0)
    pull(indexer, worker, 0)
    indexer.on_changes("w", read_changes(worker.event(stored=[name(-1 + 2**40)])), 0)
    assert indexer.state_of("w") is Follows.EXACT
    assert len(indexer.index) == KEPT_EVENTS + 101


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 0.3), st.floats(0, 0.2), st.floats(0, 0.2))
def test_whatever_is_lost_doubled_or_swapped_it_ends_up_right(
    seed: int, lost: float, doubled: float, swapped: float
) -> None:
    chance = random.Random(seed)
    worker = Publisher("w")
    indexer = follow(worker)
    chain = [name(at) for at in range(60)]
    depth, now = 0, 0.0
    late: list[bytes] = []

    def hear(data: bytes) -> None:
        indexer.on_changes("w", read_changes(data), now)
        if chance.random() < doubled:
            indexer.on_changes("w", read_changes(data), now)

    for _ in range(80):
        now += 0.05
        after = chance.randint(0, 60)
        if after > depth:
            tier = list(Tier)[depth // 20]  # what lies further from the start lies in slower tiers
            after = min(after, depth // 20 * 20 + 20)
            event = worker.event(stored=chain[depth:after], tier=tier)
        else:
            several = [(tier, [one for one in chain[after:depth] if worker.held[one] is tier]) for tier in Tier]
            for tier, hashes in several[1:]:
                if hashes:
                    hear(worker.event(removed=hashes, tier=tier))
            event = worker.event(removed=several[0][1])
        depth = after
        if chance.random() < lost:
            continue
        if chance.random() < swapped:
            late.append(event)
            continue
        hear(event)
        while late:
            hear(late.pop())
        if chance.random() < 0.2:
            indexer.on_heartbeat(worker.beat(), now)
        for _ in indexer.tick(now):
            parts = worker.snapshot()
            chance.shuffle(parts)
            for part in parts:
                indexer.on_snapshot("w", part, now)
    for _ in range(80):
        now += 1
        indexer.on_heartbeat(worker.beat(), now)
        if indexer.tick(now):
            for part in worker.snapshot():
                indexer.on_snapshot("w", part, now)
    assert indexer.state_of("w") is Follows.EXACT
    assert indexer.find_matches(chain) == ({"w": depth} if depth else {})
    while indexer.index.clean(1000):
        pass
    assert len(indexer.index) == depth
    indexer.check_integrity()


def test_of_a_hybrid_model_a_hit_counts_to_the_last_snapshot() -> None:
    chain, log = [name(number) for number in range(12)], EventLog("e1")
    indexer = KvIndexer(max_workers=4)
    indexer.join("w", "e1")
    indexer.join("plain", "e1")

    def tell(*changes: tuple[Tier, bool, list[bytes]]) -> None:
        log.note(TierEvents(tier, removed, (BlockRun(b"", tuple(hashes)),)) for tier, removed, hashes in changes)
        event = log.flush(log.seq)
        assert event is not None
        indexer.on_changes("w", read_changes(codec.encode_events(event)), 0.0)

    def found(blocks: list[bytes]) -> tuple[int, int]:
        row = indexer.depths(pack(blocks), ("w", "nobody"))
        return indexer.find_matches(blocks).get("w", 0), int(row[-1, 0])

    tell((Tier.DEVICE, False, chain[:10]), (Tier.STATE, False, [chain[3], chain[7]]))
    assert found(chain) == (8, 8)
    assert found([*chain[:7], *[name(99)] * 3]) == (4, 4)
    assert found([*chain[:3], *[name(99)] * 3]) == (0, 0)
    tell((Tier.STATE, True, [chain[3]]))
    assert found([*chain[:7], *[name(99)] * 3]) == (0, 0)
    assert found(chain) == (8, 8)
    tell((Tier.DEVICE, True, chain[7:10]), (Tier.STATE, True, [chain[7]]))
    assert found(chain) == (0, 0)
    tell((Tier.STATE, False, [chain[1]]))
    beat = Heartbeat("w", "e1", State.READY, event_seq=log.seq, digest=log.plain_digest, tier_digest=log.digest)
    indexer.on_heartbeat(beat, 1.0)
    assert indexer.state_of("w") is Follows.EXACT

    late = KvIndexer(max_workers=4)  # learns it from a snapshot of all that the worker holds
    late.join("w", "e1")
    late.on_heartbeat(beat, 1.0)
    (asked,) = late.tick(2.0)
    held = {Tier.DEVICE: chain[:7], Tier.STATE: [chain[1]]}
    for part in log.snapshot(held, log.digest):
        late.on_snapshot("w", part, 2.0, asked.pull)
    assert late.state_of("w") is Follows.EXACT
    assert late.find_matches(chain) == {"w": 2}

    bare = KvIndexer(max_workers=4)  # a worker of such a model that has no state counts for nothing
    bare.join("w", "e1")
    bare.on_heartbeat(beat, 1.0)
    (asked,) = bare.tick(2.0)
    tell((Tier.STATE, True, [chain[1]]))
    for part in log.snapshot({Tier.DEVICE: chain[:7], Tier.STATE: []}, log.digest):
        bare.on_snapshot("w", part, 2.0, asked.pull)
    assert bare.state_of("w") is Follows.EXACT
    assert bare.find_matches(chain) == {}


def test_of_a_hybrid_model_vaults_count_to_the_last_state_that_is_here_or_there() -> None:
    chain, indexer = [name(number) for number in range(12)], KvIndexer(max_workers=4)
    logs = {who: EventLog("e1") for who in ("w", "other", "plain", "v", "v2")}
    for who in logs:
        indexer.join(who, "e1", vault=who.startswith("v"))

    def tell(who: str, tier: Tier, blocks: list[bytes], *, removed: bool = False) -> None:
        log = logs[who]
        log.note([TierEvents(tier, removed, (BlockRun(b"", tuple(blocks)),))])
        event = log.flush(log.seq)
        assert event is not None
        indexer.on_changes(who, read_changes(codec.encode_events(event)), 0.0)

    def priced(worker: str) -> list[int]:
        depths: list[int] = indexer.depths(pack(chain), (worker, "nobody"))[:, 0].tolist()
        assert indexer.find_matches(chain).get(worker, 0) == depths[-1]
        assert indexer.pooled <= depths[-1]
        return depths

    tell("v", Tier.VAULT, chain[:8])
    tell("w", Tier.STATE, [])  # that is all it has to tell: its model needs states
    assert priced("w") == [0, 0, 0], "blocks without a state are of no use to it"
    assert priced("plain") == [0, 0, 8]
    tell("v", Tier.STATE, [chain[3], chain[5]])
    assert priced("w") == [0, 0, 6]
    assert indexer.pooled == 6
    tell("v2", Tier.STATE, [chain[6], chain[9]])
    assert priced("w") == [0, 0, 7], "the other vault has a later one, and one behind what is held"
    tell("w", Tier.DEVICE, chain[:2])
    tell("w", Tier.STATE, [chain[1]])
    assert priced("w") == [2, 2, 7]
    tell("w", Tier.STATE, [chain[7]])
    assert priced("w") == [2, 2, 8], "a state of its own, behind blocks that a vault has"
    assert indexer.pooled == 7, "which is all that vaults alone are good for"
    assert priced("other") == [0, 0, 8]
    assert indexer.pooled == 8
    tell("v2", Tier.STATE, [chain[6]], removed=True)
    tell("w", Tier.STATE, [chain[7]], removed=True)
    assert priced("w") == [2, 2, 6]
    indexer.leave("v")
    assert priced("w") == [2, 2, 2]
