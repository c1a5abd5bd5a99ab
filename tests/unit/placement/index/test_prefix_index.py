"""The prefix index against a plain dictionary of sets."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.placement.index.prefix_index import PrefixIndex, pack, unpack

TIERS = 3


def name(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class Plain:
    """What the index should answer."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], set[bytes]] = defaultdict(set)  # (holder, tier)

    def depth(self, holder: int, tier: int, chain: list[bytes]) -> int:
        reach = set().union(*(self.held[holder, level] for level in range(tier + 1)))
        return next((at for at, one in enumerate(chain) if one not in reach), len(chain))


def check(index: PrefixIndex, plain: Plain, chain: list[bytes], holders: list[int]) -> None:
    depths = index.find(pack(chain))
    for tier in range(TIERS):
        for holder in holders:
            assert depths[tier, holder] == plain.depth(holder, tier, chain), (tier, holder)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 130), st.integers(1, 70))
def test_a_prefix_tree_that_grows_and_shrinks(seed: int, count: int, depth: int) -> None:
    """Each holder stores prefixes of chains and evicts them from their end, over all tiers."""
    chance = random.Random(seed)
    index, plain = PrefixIndex(5_000, 130, TIERS), Plain()
    holders = [index.add_holder() for _ in range(count)]
    chains = [[name(1000 * number + at // (number + 1)) for at in range(depth)] for number in range(3)]
    chains = [list(dict.fromkeys(chain)) for chain in chains]
    have: dict[tuple[int, int, int], int] = defaultdict(int)
    for _ in range(60):
        holder, number = chance.choice(holders), chance.randrange(3)
        chain = chains[number]
        tier = chance.randrange(TIERS)
        before, after = have[holder, tier, number], chance.randint(0, len(chain))
        if after > before:
            index.store(holder, tier, pack(chain[before:after]))
            plain.held[holder, tier].update(chain[before:after])
        elif after < before:
            index.remove(holder, tier, pack(chain[after:before][::-1]))
            plain.held[holder, tier].difference_update(chain[after:before])
        have[holder, tier, number] = after
    index.check_integrity()
    for chain in chains:
        check(index, plain, [*chain, name(10**9)], holders)
        check(index, plain, chain, holders)
    assert len(index) == len(set().union(*plain.held.values()))


def test_nothing_is_found_for_nobody() -> None:
    index = PrefixIndex(10)
    assert not index.find(pack([])).any()
    assert not index.find(pack([name(1)])).any()
    holder = index.add_holder()
    index.remove(holder, 0, pack([name(1)]))
    assert not index.find(pack([name(1)])).any()
    assert len(index) == 0


def test_memory_is_taken_by_who_holds_what_not_by_who_could() -> None:
    """Of a thousand workers a block takes a fifth of what a bit for each of them took; hot ones take more."""
    chain = pack([name(at) for at in range(1_000)])
    index = PrefixIndex(1_000, 1_016)
    holders = [index.add_holder() for _ in range(200)]
    for holder in holders[:8]:
        index.store(holder, 0, chain)
    cold = index.nbytes
    assert cold / len(index) < 437 / 5
    for holder in holders[8:]:
        index.store(holder, holder % 3, chain[:10])
    assert 0 < index.nbytes - cold < 10 * 437
    index.check_integrity()
    hot = index.nbytes
    for holder in holders[2:]:
        index.remove(holder, 0, chain[:10])
        index.remove(holder, holder % 3, chain[:10])
    index.check_integrity()
    assert index.find(chain[:20])[2, holders[:3]].tolist() == [20, 20, 0]
    for holder in holders[2:]:
        index.store(holder, 1, chain[100:110])
    assert index.nbytes == hot, "what was given back is used again"
    index.check_integrity()


def test_stored_twice_is_held_once() -> None:
    index = PrefixIndex(10)
    holder = index.add_holder()
    index.store(holder, 0, pack([name(1), name(1), name(2)]))
    index.store(holder, 0, pack([name(1)]))
    assert index.held_by(holder) == 2
    index.remove(holder, 0, pack([name(1)]))
    assert len(index) == 1
    index.check_integrity()


def test_a_holder_that_is_retired_is_found_no_more_and_leaves_no_trace() -> None:
    index = PrefixIndex(100, 64)
    one, other = index.add_holder(), index.add_holder()
    index.store(one, 0, pack([name(at) for at in range(50)]))
    index.store(other, 1, pack([name(at) for at in range(20)]))
    index.retire(one)
    chain = pack([name(at) for at in range(50)])
    assert index.find(chain)[:, one].tolist() == [0, 0, 0]
    assert index.find(chain)[:, other].tolist() == [0, 20, 20]
    steps = 1
    while index.clean(7):
        steps += 1
        index.check_integrity()
    assert steps == 8
    assert len(index) == 20
    again = {index.add_holder() for _ in range(63)}
    assert one in again
    with pytest.raises(OverflowError, match="64 holders"):
        index.add_holder()


def test_numbers_of_the_retired_come_back_when_they_are_needed() -> None:
    index = PrefixIndex(10, 1)  # rounded up to a word
    for _ in range(200):
        holder = index.add_holder()
        index.store(holder, 0, pack([name(holder)]))
        index.retire(holder)
    index.clean(100)
    assert len(index) == 0
    index.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 70))
def test_whatever_is_forged_no_look_up_leaves_its_bounds(seed: int, count: int) -> None:
    """Holders with gaps, which no worker that evicts leaves first has: an answer may be wrong, but each is one."""
    chance = random.Random(seed)
    index = PrefixIndex(1_000, 128, TIERS)
    chain = [name(at) for at in range(300)]
    holders = [index.add_holder() for _ in range(count)]
    for holder in holders:
        for tier in range(TIERS):
            index.store(holder, tier, pack(chance.sample(chain, chance.randrange(300))))
    index.check_integrity()
    depths = index.find(pack(chain))
    assert ((depths >= 0) & (depths <= 300)).all()
    assert (np.diff(depths, axis=0) >= 0).all(), "slower tiers only add"
    first = {holder: index.find(pack(chain[:1]))[:, holder].tolist() for holder in holders}
    depths = index.find(pack(chain))
    assert all((depths[tier, holder] > 0) == (first[holder][tier] > 0) for holder in holders for tier in range(TIERS))


# ---------------------------------------------------------------------------------------------- bounds


class Cache:
    """One worker's share of one chain: `device` blocks of its start, and in the tier below those from `start` to `end`,
    which came from above."""

    def __init__(self, index: PrefixIndex, holder: int, chain: list[bytes]) -> None:
        self.index, self.holder, self.chain = index, holder, chain
        self.device = self.start = self.end = 0

    def grow(self, count: int) -> None:
        before, self.device = self.device, min(len(self.chain), self.device + count)
        self.index.store(self.holder, 0, pack(self.chain[before : self.device]))

    def evict(self, count: int, *, offload: bool) -> None:
        after = max(0, self.device - count)
        leaves = self.chain[after : self.device][::-1]
        if offload and leaves:
            if self.start > self.device or self.end < after:
                self.drop(len(self.chain))  # it does not join what is there
            self.index.store(self.holder, 1, pack(leaves))
            self.start, self.end = (
                (min(self.start, after), max(self.end, self.device)) if self.end else (after, self.device)
            )
        self.index.remove(self.holder, 0, pack(leaves))
        self.device = after

    def drop(self, count: int) -> None:
        """Leaves of the lower tier."""
        after = max(self.start, self.end - count)
        self.index.remove(self.holder, 1, pack(self.chain[after : self.end][::-1]))
        self.end = after
        if self.start == self.end:
            self.start = self.end = 0

    @property
    def depths(self) -> tuple[int, int]:
        return self.device, self.end if self.start <= self.device < self.end else self.device


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(20, 400), st.integers(10, 90))
def test_tiers_evictions_and_a_bound(seed: int, count: int, max_blocks: int, length: int) -> None:
    """Never more is claimed than a worker has, never less than is kept of it, and all it has where there was room."""
    chance = random.Random(seed)
    index = PrefixIndex(max_blocks, 8, TIERS)
    chains = [[name(1_000 * number + at) for at in range(length)] for number in range(4)]
    chains[1][: length // 2] = chains[0][: length // 2]
    holders = [index.add_holder() for _ in range(count)]
    caches = {
        (holder, number): Cache(index, holder, chain) for holder in holders for number, chain in enumerate(chains)
    }
    for holder in holders:
        del caches[holder, chance.randrange(2)]  # of those that begin alike, one each: it is evicted once
    for _ in range(120):
        cache = chance.choice(list(caches.values()))
        what = chance.random()
        if what < 0.5:
            cache.grow(chance.randint(1, length // 2))
        elif what < 0.8:
            cache.evict(chance.randint(1, length), offload=chance.random() < 0.5)
        else:
            cache.drop(chance.randint(1, length))
        assert len(index) <= max_blocks
    index.check_integrity()
    for (holder, number), cache in caches.items():
        found = index.find(pack(chains[number]))[:2, holder].tolist()
        for tier, depth in enumerate(cache.depths):
            assert found[tier] <= depth
            assert index.given_up_total or found[tier] == depth
        kept = [index.find(pack([one]))[:2, holder].tolist() for one in chains[number]]
        for tier in range(2):
            known = next((at for at, one in enumerate(kept) if not one[tier]), length)
            assert known <= found[tier], "a gap may be passed over: who has what follows has the gap too"


def test_a_note_of_a_block_that_is_gone_does_not_make_its_heir_old() -> None:
    """An entry that is used again keeps the place of its new block in the order of giving up."""
    index = PrefixIndex(3_000, 4)
    greedy, small = index.add_holder(), index.add_holder()
    passing, chain = [name(at) for at in range(1_200)], [name(10_000 + at) for at in range(2_000)]
    index.store(greedy, 0, pack(passing))
    index.remove(greedy, 0, pack(passing))
    index.store(greedy, 0, pack(chain[:800]))
    index.store(greedy, 0, pack(chain[800:]))
    index.compact()
    index.store(small, 0, pack([name(20_000 + at) for at in range(1_500)]))
    left = int(index.find(pack(chain))[0, greedy])
    assert 0 < left < 2_000
    assert index.held_by(greedy) == left, "what stays is a prefix"
    index.check_integrity()


def test_a_full_index_takes_from_whoever_has_most_what_it_got_last() -> None:
    index = PrefixIndex(3_000, 4)
    greedy, small = index.add_holder(), index.add_holder()
    much = [name(at) for at in range(2_900)]
    index.store(greedy, 0, pack(much))
    few = [name(10_000 + at) for at in range(500)]
    index.store(small, 0, pack(few))
    assert index.find(pack(few))[0, small] == 500
    left = int(index.find(pack(much))[0, greedy])
    assert 1_000 < left < 2_900
    assert index.held_by(greedy) == left, "what stays is a prefix"
    assert index.given_up_total == 2_900 - left
    assert len(index) <= 3_000
    index.check_integrity()


def test_nobody_gives_way_to_a_liar_that_claims_the_world() -> None:
    index = PrefixIndex(1_000, 4)
    honest, liar = index.add_holder(), index.add_holder()
    chain = [name(at) for at in range(300)]
    index.store(honest, 0, pack(chain))
    for start in range(10_000, 60_000, 5_000):
        index.store(liar, 0, pack([name(start + at) for at in range(5_000)]))
    assert index.find(pack(chain))[0, honest] == 300
    assert len(index) == 1_000
    assert index.held_by(liar) == 700
    index.check_integrity()


def test_blocks_come_and_go_without_growth() -> None:
    index = PrefixIndex(1_000, 4)
    holder, other = index.add_holder(), index.add_holder()
    before = index.nbytes
    index.store(other, 0, pack([name(at) for at in range(100)]))
    for start in range(0, 100_000, 500):
        block = pack([name(start + at) for at in range(500)])
        index.store(holder, 0, block)
        index.remove(holder, 0, block)
        assert len(index._holdings[holder].log) <= 4_096
    assert index.nbytes == before
    assert index.given_up_total == 0
    index.check_integrity()


# ---------------------------------------------------------------------------------------------- bytes


def test_hashes_are_16_bytes() -> None:
    assert pack([]).shape == (0, 2)
    assert np.array_equal(pack([name(1), name(2)]), unpack(name(1) + name(2)))
    for wrong in ([b"short"], [name(1), b""], [name(1) + b"x"], [name(1)[:8], name(1) + name(1)[:8]]):
        with pytest.raises(ValueError, match="16 bytes"):
            pack(wrong)
    for wrong_raw in (b"x", name(1) + b"12345678"):
        with pytest.raises(ValueError, match=r".+"):
            unpack(wrong_raw)


def test_a_holder_in_the_middle_of_a_chain_only_is_no_match() -> None:
    """Such as a block whose parent an index lost: nothing is claimed that is not there from the start."""
    index = PrefixIndex(10)
    holder = index.add_holder()
    index.store(holder, 0, pack([name(2), name(3)]))
    assert index.find(pack([name(1), name(2), name(3)]))[0, holder] == 0
