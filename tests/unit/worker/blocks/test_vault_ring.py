"""Vaults share blocks by runs, equally at every worker."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.blocks.chain_location import BlockName, VaultRing, by_root
from kvproto.block_hash import chain, pack_ids, parent_of
from kvproto.dataplane.block import RUN_BLOCKS
from kvproto.hash_ring import HashRing

ROOT, OTHER = b"r" * 16, b"o" * 16


def names_of(blocks: int, seed: int = 0, root: bytes = ROOT) -> list[BlockName]:
    ids = [random.Random(seed).randrange(1000) for _ in range(2 * blocks)]
    hashes = chain(root, ids, 2)
    keys = [hashes[at - at % RUN_BLOCKS] for at in range(len(hashes))]
    return [
        BlockName(root, hashes[at], parent_of(root, hashes, at), pack_ids(ids[2 * at : 2 * at + 2]), keys[at])
        for at in range(blocks)
    ]


def test_a_run_lies_in_one_vault_wherever_in_the_chain_one_begins_to_ask() -> None:
    ring = VaultRing(HashRing(f"v{at}" for at in range(5)))
    names = names_of(4 * RUN_BLOCKS)
    owners = [ring.owner(name) for name in names]
    for start in range(0, len(names), RUN_BLOCKS):
        assert len(set(owners[start : start + RUN_BLOCKS])) == 1
    assert len(set(owners)) > 1
    rest = ring.homes(names[100:], {})
    assert {vault: [at + 100 for share in shares for at in share.at] for vault, shares in rest.items()} == {
        vault: [at for at in range(100, len(names)) if owners[at] == vault] for vault in set(owners[100:])
    }


def test_workers_that_heard_of_vaults_in_another_order_agree() -> None:
    one = VaultRing(HashRing(["a", "b"]).with_nodes(["c", "b", "a"]))
    other = VaultRing(HashRing(["c", "a", "b", "a"]))
    names = [names_of(1, seed)[0] for seed in range(100)]
    assert [one.keepers(name) for name in names] == [other.keepers(name) for name in names]
    assert one.ring.nodes == ("a", "b", "c")


def test_who_kept_a_run_before_another_vault_joined_is_still_asked() -> None:
    before = VaultRing(HashRing(["a", "b", "c"]))
    after = VaultRing(before.ring.with_nodes(["a", "b", "c", "d"]))
    moved = 0
    for seed in range(200):
        (name,) = names_of(1, seed)
        moved += before.owner(name) != after.owner(name)
        assert before.owner(name) in after.keepers(name)
    assert 0 < moved < 120


def test_a_forked_chain_is_asked_for_under_both_roots() -> None:
    names = names_of(3) + names_of(2, 1, OTHER)
    ring = VaultRing(HashRing(["only"]))
    assert [(share.root, share.at) for share in ring.shares(names)["only"]] == [(ROOT, [0, 1, 2]), (OTHER, [3, 4])]
    assert [(share.root, share.at) for share in by_root(names)] == [(ROOT, [0, 1, 2]), (OTHER, [3, 4])]
    assert by_root([]) == []


def test_strays_are_fetched_where_they_were_seen() -> None:
    ring = VaultRing(HashRing(["a", "b", "c"]))
    names = names_of(10)
    owner = ring.owner(names[0])
    assert owner is not None
    elsewhere = next(vault for vault in ring.ring.nodes if vault != owner)
    homes = ring.homes(names, {names[4].hash: elsewhere})
    assert {vault: [at for share in shares for at in share.at] for vault, shares in homes.items()} == {
        owner: [0, 1, 2, 3, 5, 6, 7, 8, 9],
        elsewhere: [4],
    }


def test_without_vaults_there_is_nobody_to_ask() -> None:
    names = names_of(3)
    assert VaultRing().shares(names) == {}
    assert VaultRing().homes(names, {}) == {}
    assert VaultRing().owner(names[0]) is None


@given(st.integers(1, 200), st.integers(1, 6), st.integers(0, 50))
def test_every_block_is_asked_for_at_its_keepers_and_fetched_from_one(blocks: int, vaults: int, seed: int) -> None:
    ring = VaultRing(HashRing(f"v{at}" for at in range(vaults)))
    names = names_of(blocks, seed)
    asked = sorted(at for shares in ring.shares(names).values() for share in shares for at in share.at)
    assert asked == sorted(list(range(blocks)) * min(2, vaults))
    fetched = [at for shares in ring.homes(names, {}).values() for share in shares for at in share.at]
    assert sorted(fetched) == list(range(blocks))
