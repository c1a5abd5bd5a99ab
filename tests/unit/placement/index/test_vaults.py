"""Vaults are one pool of blocks that every worker can have, followed like workers."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_rig import RATE, Rig, tokens

from kvfleet.placement.events import Tick
from kvfleet.placement.index.changes import Changes, read_changes
from kvfleet.placement.index.kv_indexer import MAX_VAULTS, Follows, KvIndexer, PullSnapshot
from kvfleet.placement.index.prefix_index import PrefixIndex, pack
from kvfleet.placement.workers.feedback import Belief
from kvproto import codec
from kvproto.messages import BlockRun, Heartbeat, KvEvents, Passed, Snapshot, State, Tier, TierEvents

TIERS = 3
RESTORE = {"host": 4e9, "vault": 2e9, "peer": 1e9}


def name(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


# ---------------------------------------------------------------------------------------------- the index


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(0, 130),
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_what_vaults_have_together_goes_on_where_each_worker_ends(
    seed: int, workers: int, vaults: int, length: int, missing: float
) -> None:
    """Gaps anywhere: in the middle of a run, at its start, where a worker ends."""
    chance = random.Random(seed)
    index = PrefixIndex(1_000, 136, TIERS)
    chain = [name(at) for at in range(length)]
    own = {}
    for _ in range(workers):
        holder = index.add_holder()
        device = chance.randint(0, length)
        host = chance.randint(device, length)
        index.store(holder, 0, pack(chain[:device]))
        index.store(holder, 1, pack(chain[device:host]))
        own[holder] = device, host
    vaulted: set[int] = set()
    for vault in [index.add_holder(pooled=True) for _ in range(vaults)]:
        has = [at for at in range(length) if at // 8 % vaults == vault % vaults and chance.random() >= missing]
        index.store(vault, 2, pack([chain[at] for at in has]))
        vaulted.update(has)
    for asked in (chain, chain[: length // 2], [*chain, name(10**9)], [name(10**9), *chain]):
        depths = index.find(pack(asked))
        strange = asked[:1] == [name(10**9)]
        end = 0 if strange else min(len(asked), length)

        def reach(at: int, end: int = end) -> int:
            while at < end and at in vaulted:
                at += 1
            return at

        assert index.pooled == reach(0)
        for holder, (device, host) in own.items():
            device, host = min(device, end), min(host, end)
            assert depths[:, holder].tolist() == [device, host, max(host, reach(host))]
    index.check_integrity()


def test_a_vault_that_retires_is_found_no_more_at_once() -> None:
    index = PrefixIndex(200, 8, TIERS)
    worker, one, other = index.add_holder(), index.add_holder(pooled=True), index.add_holder(pooled=True)
    chain = pack([name(at) for at in range(100)])
    index.store(worker, 0, chain[:10])
    index.store(one, 2, chain[:50])
    index.store(other, 2, chain[50:])
    assert index.find(chain)[:, worker].tolist() == [10, 10, 100]
    assert index.find(chain)[:, one].tolist() == [0, 0, 0], "a vault is nobody to give a request to"
    index.retire(other)
    assert index.find(chain)[:, worker].tolist() == [10, 10, 50]
    index.retire(one)
    assert index.find(chain)[:, worker].tolist() == [10, 10, 10]
    assert index.pooled == 0
    while index.clean(30):
        pass
    assert len(index) == 10
    index.check_integrity()


def test_a_lookup_of_many_blocks_that_share_half_a_hash_is_still_exact() -> None:
    """The table knows blocks by 32 bits; these have them in common."""
    index = PrefixIndex(2_000, 8, TIERS)
    chance = random.Random(3)
    same = chance.randbytes(4)
    chain = [same + chance.randbytes(12) for _ in range(300)]
    vault = index.add_holder(pooled=True)
    worker = index.add_holder()
    index.store(vault, 2, pack([one for at, one in enumerate(chain) if at != 200]))
    assert index.find(pack(chain))[:, worker].tolist() == [0, 0, 200]
    index.store(worker, 0, pack(chain[:201]))
    assert index.find(pack(chain))[:, worker].tolist() == [201, 201, 300]


# ---------------------------------------------------------------------------------------------- who is followed


def test_vaults_have_places_of_their_own_and_take_those_of_absent_workers() -> None:
    indexer = KvIndexer(1_000, 2)
    for number in range(MAX_VAULTS + 3):
        indexer.join(f"v{number}", "e1", vault=True)
    assert indexer.vaults()[0] == MAX_VAULTS + 2
    assert indexer.left_out_total == 1
    indexer.leave("v0")
    for number in range(3):
        indexer.join(f"w{number}", "e1")
    assert indexer.state_of("w0") is Follows.NEW
    assert indexer.state_of("w1") is None
    indexer.leave("v1")
    indexer.on_heartbeat(Heartbeat("w1", "e1", State.READY), 1.0)
    assert indexer.state_of("w1") is Follows.EXACT, "whoever was left out is followed as soon as there is room"
    indexer.check_integrity()


def test_a_worker_that_is_not_followed_has_what_vaults_have() -> None:
    indexer = KvIndexer(1_000, 1)
    indexer.join("v", "e1", vault=True)
    indexer.join("w0", "e1")
    indexer.join("w1", "e1")
    chain = [name(at) for at in range(20)]
    event = KvEvents("e1", 1, (TierEvents(Tier.VAULT, False, (BlockRun(b"", tuple(chain[:12])),)),))
    indexer.on_changes("v", read_changes(codec.encode_events(event)), 0.0)
    assert indexer.depths(pack(chain), ("w0", "w1")).tolist() == [[0, 0], [0, 0], [12, 12]]
    assert indexer.find_matches(chain) == {"w0": 12}
    assert indexer.find_matches(chain, Tier.HOST) == {}


def test_a_snapshot_part_of_no_tier_of_the_index_is_refused() -> None:
    indexer = KvIndexer(1_000, 1)
    indexer.join("w", "e1")
    indexer.on_heartbeat(Heartbeat("w", "e1", State.READY, event_seq=3), 0.0)
    assert indexer.tick(0.0) == [PullSnapshot("w", "e1", 1)]
    indexer.on_snapshot("w", Snapshot("e1", 3, Tier.PEER, 0, 1, 0, name(1)), 0.0)
    assert indexer.state_of("w") is Follows.BEHIND
    indexer.check_integrity()


# ---------------------------------------------------------------------------------------------- placement


def a_rig(*vaults: str) -> Rig:
    rig = Rig()
    rig.join_tiered("w0", "w1", restore=RESTORE)
    rig.join_vault(*vaults)
    return rig


def test_what_vaults_have_is_expected_from_them() -> None:
    rig = a_rig("v0", "v1")
    ids = tokens(1, 1600)
    rig.store("w0", ids[:160])
    rig.store("v0", ids, tier=Tier.VAULT, blocks=slice(64))
    rig.store("v1", ids, tier=Tier.VAULT, blocks=slice(64, 90))
    placed = rig.place("r", ids)
    assert (placed.worker, placed.expected_hit) == ("w0", {"device": 160, "vault": 80 * 16})
    assert placed.source == ""
    assert placed.expected_ttft_s == pytest.approx(80 * 1e6 / 2e9 + 160 / RATE)
    assert rig.core.indexer.vaults() == (2, 90)
    rig.store("v0", ids, tier=Tier.VAULT, blocks=slice(30, 31), removed=True)
    assert rig.place("r2", tokens(2, 1600)).expected_hit == {}
    rig.core.check_integrity()


def test_a_vault_that_leaves_or_begins_a_new_life_has_nothing() -> None:
    rig = a_rig("v0")
    ids = tokens(1, 1600)
    rig.store("v0", ids, tier=Tier.VAULT)
    assert rig.place("r1", ids).expected_hit == {"vault": 1599}
    rig.join_vault("v0")
    assert rig.place("r2", ids, excluded=("w0", "w1")[:1]).expected_hit, "heard of twice changes nothing"
    rig.join_vault("v0", epoch="e2")
    assert rig.core.indexer.vaults() == (1, 0)
    rig.core.indexer.on_changes("v0", Changes("e1", 2, (), 0), rig.now)
    assert rig.core.indexer.unknown_total == 1, "the last events of its former life are nobody's"
    rig.core.leave_vault("v0")
    rig.core.leave_vault("v0")
    assert rig.core.indexer.vaults() == (0, 0)
    rig.core.check_integrity()


def test_what_a_vault_says_is_made_good_by_a_snapshot_after_a_gap() -> None:
    rig = a_rig("v0")
    chain = rig.hashes(tokens(1, 1600))
    rig.tell(Heartbeat("v0", "e1", State.READY, event_seq=7))
    assert PullSnapshot("v0", "e1", 1) in rig.core.handle(Tick(), rig.now)
    for part, piece in enumerate((chain[:50], chain[50:])):
        snapshot = Snapshot("e1", 7, Tier.VAULT, part, 2, 5, piece.tobytes())
        rig.core.indexer.on_snapshot("v0", snapshot, rig.now)
    assert rig.core.indexer.state_of("v0") is Follows.EXACT
    assert rig.place("r", tokens(1, 1600)).expected_hit == {"vault": 1599}
    rig.tell(Heartbeat("v0", "e0", State.READY, event_seq=70))
    assert rig.core.indexer.state_of("v0") is Follows.EXACT, "of another life"
    rig.tell(Heartbeat("v0", "e1", State.READY, event_seq=7, digest=6))
    assert rig.core.indexer.state_of("v0") is Follows.BEHIND
    rig.core.check_integrity()


def test_a_vault_named_as_a_worker_is_nobody() -> None:
    rig = a_rig("w0", "v")
    ids = tokens(1, 800)
    assert rig.core.indexer.vaults()[0] == 1
    rig.store("w0", ids)
    assert rig.place("r", ids).expected_hit == {"device": 799}
    rig.join("v")
    assert rig.core.indexer.vaults()[0] == 0
    rig.core.check_integrity()


def test_what_a_vault_lost_is_not_held_against_the_worker() -> None:
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    rig.join_vault("v0")
    for number in range(12):
        ids = tokens(number, 1600)
        rig.store("w0", ids[:800])
        rig.store("v0", ids, tier=Tier.VAULT)
        placed = rig.place(f"r{number}", ids)
        assert placed.expected_hit == {"device": 800, "vault": 799}
        rig.pass_("w0", f"r{number}", Passed.ACCEPTED, Passed.STARTED, prompt=1600, cached={"device": 800})
    assert rig.core.fleet.workers["w0"].experience.belief is Belief.EXACT
    assert rig.core.fleet.workers["w0"].experience.predicted_tokens_total == 12 * 800
    assert rig.core.ledger.hits.lost_total == 12 * 799


def test_what_a_worker_lost_is_held_against_it_though_a_vault_brought_it() -> None:
    """And then vaults are believed still."""
    rig = Rig()
    rig.join_tiered("w0", restore=RESTORE)
    rig.join_vault("v0")
    for number in range(30):
        ids = tokens(number, 1600)
        rig.store("w0", ids)
        rig.store("v0", ids, tier=Tier.VAULT, blocks=slice(50))
        rig.place(f"r{number}", ids)
        rig.pass_("w0", f"r{number}", Passed.ACCEPTED, Passed.STARTED, prompt=1600, cached={"vault": 1599})
    assert rig.core.fleet.workers["w0"].experience.belief is Belief.LOAD_ONLY
    ids = tokens(99, 1600)
    rig.store("w0", ids)
    rig.store("v0", ids, tier=Tier.VAULT, blocks=slice(50))
    assert rig.place("r", ids).expected_hit == {"vault": 800}


def test_events_as_a_vault_writes_them_are_read() -> None:
    run = BlockRun(b"", tuple(name(at) for at in range(5)))
    data = codec.encode_events(KvEvents("e1", 1, (TierEvents(Tier.VAULT, False, (run,)),)))
    assert [change.tier for change in read_changes(data).changes] == [2]
