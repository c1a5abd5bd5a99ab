"""Block hashes: equal for equal prefixes, different for anything else. Vectors are in tests/contract."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto import block_hash
from kvproto.hash_ring import PREFIX_TOKENS, ring_key

ids = st.lists(st.integers(0, 2**32 - 1), max_size=80)
sizes = st.sampled_from([1, 2, 16])
ROOT = block_hash.root("rev", 16, b"salt")


@given(ids)
def test_ids_pack_as_u32_little_endian_and_back(some: list[int]) -> None:
    packed = block_hash.pack_ids(some)
    assert packed == struct.pack(f"<{len(some)}I", *some)
    assert list(block_hash.unpack_ids(packed)) == some


@pytest.mark.parametrize("wrong", [[-1], [2**32]])
def test_ids_out_of_range_do_not_pack(wrong: list[int]) -> None:
    with pytest.raises(OverflowError):
        block_hash.pack_ids(wrong)


def test_torn_ids_do_not_unpack() -> None:
    with pytest.raises(ValueError, match="multiple"):
        block_hash.unpack_ids(b"\0\0\0")


@given(ids, sizes)
def test_chain_is_child_after_child(some: list[int], size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(some) - size + 1, size):
        parent = block_hash.child(parent, some[start : start + size])
        expected.append(parent)
    assert block_hash.chain(ROOT, some, size) == expected
    assert len(expected) == len(some) // size


@given(ids, ids, sizes)
def test_chains_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int], size: int) -> None:
    """So the longest match of two chains is the longest common prefix, floored to a block."""
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    first, second = block_hash.chain(ROOT, one, size), block_hash.chain(ROOT, other, size)
    agree = [a == b for a, b in zip(first, second, strict=False)]
    assert agree == [i < common // size for i in range(len(agree))]


@given(ids)
def test_a_block_depends_on_everything_before_it(some: list[int]) -> None:
    chain = block_hash.chain(ROOT, [*some, 1, 2], 2)
    moved = block_hash.chain(ROOT, [7, 7, *some, 1, 2], 2)
    assert not set(chain) & set(moved)


def test_the_root_binds_what_decides_the_bytes_of_a_block() -> None:
    roots = {
        block_hash.root("rev", 16, b"salt"),
        block_hash.root("other", 16, b"salt"),
        block_hash.root("rev", 32, b"salt"),
        block_hash.root("rev", 16, b"other"),
        block_hash.root("rev", 16, b"salt", lora="l"),
        block_hash.root("rev", 16, b"salt", layout=block_hash.LAYOUT_VERSION + 1),
    }
    assert len(roots) == 6
    assert all(len(root) == block_hash.HASH_BYTES for root in roots)


@given(st.text(max_size=8), st.text(max_size=8), ids)
def test_tenants_never_share_a_block(one: str, other: str, some: list[int]) -> None:
    salts = [block_hash.tenant_salt(b"key", tenant) for tenant in (one, other)]
    chains = [block_hash.chain(block_hash.root("rev", 1, salt), some, 1) for salt in salts]
    assert bool(set(chains[0]) & set(chains[1])) == (one == other and bool(some))


def test_a_state_is_named_as_a_block_behind_its_own_that_no_tokens_make() -> None:
    block = bytes(range(16))
    assert block_hash.state_after(block) == block_hash.child(block, (2**32 - 1,))
    assert block_hash.state_after(block).hex() == "c6fa4ad86d4015c567a32cab4a4a2f32"


def test_a_salt_needs_the_fleet_key() -> None:
    assert block_hash.tenant_salt(b"key", "public") != block_hash.tenant_salt(b"other key", "public")


@given(st.lists(st.binary(min_size=16, max_size=16), unique=True, max_size=8))
def test_digest_terms_cancel_when_a_block_goes_again(hashes: list[bytes]) -> None:
    digest = 0
    for block in [*hashes, *reversed(hashes)]:
        digest ^= block_hash.digest_term(block)
    assert digest == 0
    assert all(0 <= block_hash.digest_term(block) < 2**64 for block in hashes)


# ---------------------------------------------------------------------------------------------- the ring key


@given(ids, ids)
def test_equal_prefixes_meet_and_sessions_win(some: list[int], more: list[int]) -> None:
    prefix = (some + [1] * PREFIX_TOKENS)[:PREFIX_TOKENS]
    assert ring_key("t", session=None, prompt_ids=prefix) == ring_key("t", session=None, prompt_ids=prefix + more)
    assert ring_key("t", session="s", prompt_ids=some) == ring_key("t", session="s", prompt_ids=more)


def test_ring_keys_of_different_kinds_and_tenants_differ() -> None:
    keys = {
        ring_key("t", session="a"),
        ring_key("u", session="a"),
        ring_key("t", session=None, prompt_ids=(1,)),
        ring_key("u", session=None, prompt_ids=(1,)),
        ring_key("t", session=None, prompt="a"),
        ring_key("t", session=None, prompt="b"),
    }
    assert len(keys) == 6
