"""Tenants' chains never meet, except over blocks of a prefix that the operator registered as public."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from kvproto.block_hash import ForkedRoot, TenantRoots, chain, child, parent_of, public_prefix
from kvproto.messages import PublicPrefix

SYSTEM = tuple(range(1, 9))  # two blocks of four


def roots(key: bytes = b"key", *prefixes: tuple[int, ...]) -> TenantRoots:
    return TenantRoots("r", 4, [public_prefix(prefix) for prefix in prefixes or (SYSTEM,)], key)


def hashes(tenant: str, ids: tuple[int, ...], key: bytes = b"key") -> list[bytes]:
    return chain(roots(key).of(tenant, ids), ids, 4)


def test_without_a_public_prefix_nothing_is_shared() -> None:
    ids = tuple(range(100, 116))
    assert not set(hashes("a", ids)) & set(hashes("b", ids))
    assert hashes("a", ids) == hashes("a", ids)
    assert hashes("a", ids) != hashes("a", ids, key=b"another fleet")


def test_a_public_prefix_is_shared_and_the_first_block_past_it_is_not() -> None:
    ids = (*SYSTEM, *range(100, 108))
    a, b = hashes("a", ids), hashes("b", ids)
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


def test_a_part_of_it_is_not_public() -> None:
    assert hashes("a", SYSTEM[:4])[0] != hashes("b", SYSTEM[:4])[0]


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(0, 6))
def test_a_chain_can_be_extended_block_by_block(ids: list[int], fork: int) -> None:
    root = ForkedRoot(b"p" * 16, b"o" * 16, fork)
    known: list[bytes] = []
    for index in range(len(ids) // 4):
        known.append(child(parent_of(root, known, index), ids[index * 4 : index * 4 + 4]))
    assert known == chain(root, ids, 4)


# ---------------------------------------------------------------------------------------------- addresses


def test_roots_stay_what_they_were() -> None:
    """A worker, placement and what earlier versions cached must agree on them."""
    own, public = "12e6b359e365b2b999d013748261849e", "2d81dd47825a1c59228ccbfa59cb8948"
    assert roots().of("a", (5,)) == bytes.fromhex(own)
    assert roots().of("a", (*SYSTEM, 9)) == ForkedRoot(bytes.fromhex(public), bytes.fromhex(own), 2)


def test_a_record_says_length_and_digest() -> None:
    prefix = public_prefix(SYSTEM)
    packed = b"".join(one.to_bytes(4, "little") for one in SYSTEM)
    assert prefix == PublicPrefix(8, hashlib.blake2b(packed, digest_size=16).digest())


@given(
    st.lists(st.lists(st.integers(0, 1), max_size=3).map(lambda quads: tuple(one for one in quads for _ in range(4)))),
    st.lists(st.integers(0, 1), max_size=14).map(tuple),
)
def test_the_longest_prefix_wins_as_if_ids_were_compared(prefixes: list[tuple[int, ...]], ids: tuple[int, ...]) -> None:
    known = [prefix for prefix in prefixes if prefix]
    matching = [len(prefix) for prefix in known if ids[: len(prefix)] == prefix]
    root = TenantRoots("r", 4, map(public_prefix, known), b"key").of("a", ids)
    assert (root.blocks if isinstance(root, ForkedRoot) else None) == (max(matching) // 4 if matching else None)


def test_a_prefix_of_the_same_length_and_other_tokens_does_not_match() -> None:
    both = roots(b"key", SYSTEM, tuple(range(20, 28)))
    assert isinstance(both.of("a", (*range(20, 28), 1)), ForkedRoot)
    assert isinstance(both.of("a", (*range(20, 27), 1, 1)), bytes)
