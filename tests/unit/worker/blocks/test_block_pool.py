"""The block pool against a twin that is too simple to be wrong: scans and whole token paths instead of hashes.

Two tenants use it. What begins with the public prefix is chained under the public root up to its end, and under the
tenant's own behind it.
"""

from __future__ import annotations

from math import inf

import pytest
from engine_rig import relaxed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.pool_integrity import check_integrity
from kvfleet.worker.eviction.base import EvictionPolicy
from kvfleet.worker.eviction.reuse import ReuseEviction
from kvproto import block_hash
from kvproto.messages import Tier

ROOT = b"r" * 16
SIZE = 3
TENANTS = (ROOT, b"s" * 16)
PUBLIC_ROOT = b"p" * 16
PUBLIC = (1, 1, 1, 0, 0, 0)

Path = tuple[tuple[bytes, int], ...]  # of each token the root that it is kept under


def root_of(own: bytes, ids: tuple[int, ...]) -> block_hash.Root:
    return block_hash.ForkedRoot(PUBLIC_ROOT, own, len(PUBLIC) // SIZE) if ids[: len(PUBLIC)] == PUBLIC else own


def path_of(own: bytes, ids: tuple[int, ...]) -> Path:
    root = root_of(own, ids)
    return tuple((block_hash.root_at(root, at // SIZE), token) for at, token in enumerate(ids))


def hash_of(path: Path) -> bytes:
    """Of the last full block of a path."""
    first, own = path[0][0], path[-1][0]
    root: block_hash.Root = own
    if first == PUBLIC_ROOT:
        root = block_hash.ForkedRoot(PUBLIC_ROOT, own, len(PUBLIC) // SIZE)
    return block_hash.chain(root, [token for _, token in path], SIZE)[-1]


class NaivePool:
    """Contents as (path before the block, path of the block); every question is answered by looking at them all."""

    def __init__(self, num_blocks: int) -> None:
        self.content: dict[int, tuple[Path, Path]] = {}
        self.refs = dict.fromkeys(range(num_blocks), 0)
        self.ticks = dict.fromkeys(range(num_blocks), 0)
        self.tick = 0

    def paths(self) -> set[Path]:
        return {before + ids for before, ids in self.content.values() if len(ids) == SIZE}

    def tails(self) -> set[Path]:
        return {before + ids for before, ids in self.content.values() if len(ids) < SIZE}

    def available(self) -> int:
        return sum(1 for refs in self.refs.values() if not refs)

    def match(self, ids: Path) -> int:
        best = 0
        for before, held in self.content.values():
            if ids[: len(before)] == before and self._whole(before):
                common = 0
                while ids[len(before) :][: common + 1] == held[: common + 1] and common < min(
                    len(held), len(ids) - len(before)
                ):
                    common += 1
                best = max(best, len(before) + common)
        return best

    def _whole(self, path: Path) -> bool:
        return all(path[:end] in self.paths() for end in range(SIZE, len(path) + 1, SIZE))

    def victim(self) -> int:
        leaves = [
            block
            for block, (before, ids) in self.content.items()
            if not self.refs[block] and not any(other == before + ids for other, _ in self.content.values())
        ]
        return min(leaves, key=lambda block: (self.ticks[block], block))

    def erase(self, ids: Path) -> int:
        gone = 0
        while True:
            last = [
                block
                for block, (before, held) in self.content.items()
                if not self.refs[block]
                and held[0][0] != PUBLIC_ROOT
                and ids[: len(before) + len(held)] == before + held
                and not any(other == before + held for other, _ in self.content.values())
                and not self._is_full_behind(len(before), ids, block)
            ]
            if not last:
                return gone
            gone += len(last)
            for block in last:
                del self.content[block]

    def _is_full_behind(self, start: int, ids: Path, block: int) -> bool:
        """Whether a full block of `ids` stayed, at `start` or later: erasing ended there."""
        return any(
            len(held) == SIZE and len(before) >= start and ids[: len(before) + SIZE] == before + held
            for other, (before, held) in self.content.items()
            if other != block
        )

    def drop(self, path: Path) -> None:
        for block, (before, held) in list(self.content.items()):
            if (before + held)[: len(path)] == path:
                del self.content[block]

    def keep_tail(self, block: int, before: Path, ids: Path) -> None:
        siblings = {b: held for b, (other, held) in self.content.items() if other == before}
        if not ids or any(held[: len(ids)] == ids for held in siblings.values()):
            return
        for other, held in siblings.items():
            if len(held) < len(ids) and ids[: len(held)] == held:
                del self.content[other]
        self.content[block] = (before, ids)


class Pair:
    """Drives both pools with the same sequences and compares after every call."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy | None = None) -> None:
        self.pool = BlockPool(num_blocks, SIZE, policy)
        self.twin = NaivePool(num_blocks)
        self.held: list[tuple[bytes, tuple[int, ...], list[int], int]] = []  # tenant, ids, blocks, computed
        self.known: set[bytes] = set()

    def start(self, own: bytes, ids: tuple[int, ...], computed: int) -> None:
        """A sequence of `ids` is admitted, and all but its last `len(ids) - computed` tokens are computed."""
        root, path = root_of(own, ids), path_of(own, ids)
        hashes = block_hash.chain(root, ids, SIZE)
        match = self.pool.match(root, hashes, ids, limit=len(ids))
        assert match.tokens == self.twin.match(path)
        assert self.pool.index.depth(hashes) == len(match.blocks)
        assert match.tokens == len(match.blocks) * SIZE + match.donor_tokens
        if match.donor is not None:
            before, held = self.twin.content[match.donor]
            assert (before + held)[: match.tokens] == path[: match.tokens]
        needed = self.pool.blocks_for(len(ids)) - len(match.blocks)
        if needed > self.pool.available - self.pool.idle_among(match.blocks):
            return
        self.pool.acquire(match.blocks)
        for block in match.blocks:
            self.twin.refs[block] += 1
        blocks = match.blocks + self._allocate(needed)
        computed = max(computed, match.tokens)
        for at in range(len(match.blocks), computed // SIZE):
            start, end = at * SIZE, (at + 1) * SIZE
            kept = self.pool.fill(blocks[at], root, hashes, at, ids[start:end])
            if kept == blocks[at]:
                self.twin.content[kept] = (path[:start], path[start:end])
            else:
                self.twin.refs[blocks[at]] = 0
                self.twin.refs[kept] += 1
                assert self.twin.content[kept] == (path[:start], path[start:end])
            blocks[at] = kept
        self.held.append((own, ids, blocks, computed))
        self._compare()

    def erase(self, own: bytes, ids: tuple[int, ...]) -> None:
        root = root_of(own, ids)
        assert self.pool.erase(root, block_hash.chain(root, ids, SIZE), ids) == self.twin.erase(path_of(own, ids))
        self._compare()

    def drop(self, at: int) -> None:
        """A full block's content was wrong."""
        if paths := sorted(self.twin.paths()):
            path = paths[at % len(paths)]
            under = [other for other in paths if other[: len(path)] == path]
            continued = {hash_of(other): other[-1][0] for other in under if other != path}
            assert self.pool.continuations(hash_of(path)) == continued
            assert self.pool.drop(hash_of(path)) == len(under)
            self.twin.drop(path)
            self._compare()

    def _allocate(self, count: int) -> list[int]:
        free = [b for b, refs in self.twin.refs.items() if not refs and b not in self.twin.content]
        evicted = []
        for _ in range(max(count - len(free), 0)):
            victim = self.twin.victim()
            del self.twin.content[victim]
            self.twin.refs[victim] = -1  # taken: no candidate any more
            evicted.append(victim)
        blocks = self.pool.allocate(count)
        assert set(blocks[len(free) :]) == set(evicted)
        for block in blocks:
            self.twin.refs[block] = 1
        return blocks

    def end(self, at: int, keep_tail: bool) -> None:
        own, ids, blocks, computed = self.held.pop(at % len(self.held))
        last, path = computed // SIZE, path_of(own, ids)
        if keep_tail and computed % SIZE and (not last or path[: last * SIZE] in self.twin.paths()):
            root = root_of(own, ids)
            hashes = block_hash.chain(root, ids, SIZE)
            self.pool.keep_tail(blocks[last], root, hashes, last, ids[last * SIZE : computed])
            self.twin.keep_tail(blocks[last], path[: last * SIZE], path[last * SIZE : computed])
        self.pool.release(blocks)
        self.twin.tick += 1
        for block in blocks:
            self.twin.refs[block] -= 1
            if not self.twin.refs[block]:
                self.twin.ticks[block] = self.twin.tick
        self._compare()

    def _compare(self) -> None:
        check_integrity(self.pool, [blocks for *_, blocks, _ in self.held])
        assert self.pool.available == self.twin.available()
        expected = {hash_of(path) for path in self.twin.paths()}
        assert set(self.pool.index.hashes()) == expected
        last_public = block_hash.chain(PUBLIC_ROOT, PUBLIC, SIZE)
        forks = {
            block_hash.parent_of(root_of(own, PUBLIC), last_public, len(last_public)): last_public[-1]
            for own in TENANTS
        }
        for change in self.pool.take_changes(Tier.DEVICE):
            for run in change.runs:
                if change.removed:
                    self.known.difference_update(run.hashes)
                    continue
                parent = forks.get(run.parent, run.parent)
                assert parent in (*TENANTS, PUBLIC_ROOT) or parent in self.known, "announced before its parent"
                self.known.update(run.hashes)
        assert self.known == expected, "events do not add up to the index"


some = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(tuple)
tokens = st.one_of(some, some.map(lambda ids: (PUBLIC + ids)[:14]))
tenants = st.sampled_from(TENANTS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), tenants, tokens, st.integers(0, 14)),
        st.tuples(st.just("end"), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("erase"), tenants, tokens),
        st.tuples(st.just("drop"), st.integers(0, 20)),
    ),
    max_size=40,
)


SHARED = (*PUBLIC, 0)


@pytest.mark.parametrize("policy", ["lru", "reuse"])  # which follows LRU until it knows better
@settings(relaxed, max_examples=300)
@given(operations, st.integers(2, 9))
@example(  # a tail that is kept behind a block which was wrong, and which another sequence has computed again
    [("start", ROOT, SHARED, 4), ("drop", 0), ("start", ROOT, SHARED, 3), ("end", 1, False), ("end", 0, True)], 8
)
@example(  # a tail that a held block has grown past
    [("start", ROOT, (0,), 1), ("end", 0, True), ("start", ROOT, (0, 0, 1), 3), ("erase", ROOT, (0, 0, 1))], 2
)
def test_pool_equals_its_naive_twin(policy: str, steps: list[tuple], num_blocks: int) -> None:
    reuse = ReuseEviction(num_blocks, SIZE, lambda position, tokens: tokens)
    reuse.behind_s = inf
    pair = Pair(num_blocks, reuse if policy == "reuse" else None)
    for step in steps:
        match step:
            case "start", own, ids, computed:
                pair.start(own, ids, min(computed, len(ids)))
            case "erase", own, ids:
                pair.erase(own, ids)
            case "drop", at:
                pair.drop(at)
            case "end", at, keep_tail if pair.held:
                pair.end(at, keep_tail)


def fill_chain(pool: BlockPool, ids: list[int]) -> list[int]:
    hashes = block_hash.chain(ROOT, ids, pool.block_size)
    blocks = pool.allocate(len(hashes))
    for at, block in enumerate(blocks):
        start = at * pool.block_size
        blocks[at] = pool.fill(block, ROOT, hashes, at, ids[start : start + pool.block_size])
    return blocks


def test_least_recently_used_leaf_goes_first() -> None:
    pool = BlockPool(4, 2)
    old, new = fill_chain(pool, [1, 2, 3, 4]), fill_chain(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    check_integrity(pool)


def test_allocating_too_much_changes_nothing() -> None:
    pool = BlockPool(4, 2)
    held = fill_chain(pool, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    check_integrity(pool, [held])
    assert pool.available == 2


def test_second_holder_of_the_same_content_gets_the_cached_block() -> None:
    pool = BlockPool(4, 2)
    first = fill_chain(pool, [1, 2, 3, 4])
    second = fill_chain(pool, [1, 2, 3, 4])
    assert first == second
    assert pool.available == 2
    check_integrity(pool, [first, second])


def test_partial_tail_is_found_to_the_token_and_longer_ones_replace_it() -> None:
    pool = BlockPool(4, 8)
    for tail in ([1, 2, 3], [1, 2, 3, 4], [1, 2], [1, 9]):
        (block,) = pool.allocate(1)
        pool.keep_tail(block, ROOT, [], 0, tail)
        pool.release([block])
        check_integrity(pool, [])
    assert pool.cached == 2
    assert pool.match(ROOT, [], [1, 2, 3, 4, 5], limit=5).tokens == 4
    assert pool.match(ROOT, [], [1, 2, 3, 4, 5], limit=2).tokens == 2
    assert pool.match(ROOT, [], [1, 9, 9], limit=3).tokens == 2
    assert pool.match(b"other root 16 by", [], [1, 2], limit=2).tokens == 0


def test_beginning_of_a_full_block_is_a_donor_too() -> None:
    pool = BlockPool(2, 4)
    (block,) = fill_chain(pool, [1, 2, 3, 4])
    pool.release([block])
    match = pool.match(ROOT, block_hash.chain(ROOT, [1, 2, 3, 9], 4), [1, 2, 3, 9], limit=4)
    assert (match.blocks, match.donor, match.donor_tokens) == ([], block, 3)


def test_digest_covers_every_operation() -> None:
    pool = BlockPool(2, 2)
    pool.release(fill_chain(pool, [1, 2, 3, 4]))
    pool.release(pool.allocate(2))
    removed, stored = ([h for run in change.runs for h in run.hashes] for change in pool.take_changes(Tier.DEVICE))
    assert sorted(stored) == sorted(removed)
    assert pool.digest == 0  # each came and went
    assert pool.evictions == 2


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (16, 0)])
def test_refuses_an_empty_pool(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(blocks, size)
