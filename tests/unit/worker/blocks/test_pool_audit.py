"""What an idle worker finds of wrong books, a part of the pool at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.content_index import ContentIndex
from kvfleet.worker.blocks.pool_integrity import PoolAudit
from kvproto.block_hash import chain

ROOT = b"r" * 16


def filled(blocks: int = 64) -> tuple[BlockPool, list[int], list[int]]:
    """A pool with an idle chain of eight blocks and a held one; both."""
    pool, chains = BlockPool(blocks, 2), []
    for first in (0, 100):
        ids = list(range(first, first + 16))
        hashes, own = chain(ROOT, ids, 2), pool.allocate(8)
        chains.append([pool.fill(own[at], ROOT, hashes, at, ids[2 * at : 2 * at + 2]) for at in range(8)])
    pool.release(chains[0])
    return pool, *chains


def test_right_books_are_found_right_all_the_way_round() -> None:
    pool, _, held = filled()
    audit = PoolAudit(pool)
    for _ in range(20):
        audit.look([held], blocks=10)


def test_a_look_is_at_so_many_blocks_however_large_the_pool_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(PoolAudit, "_check", lambda audit, block, *, is_held: looks.append(block))
    audit = PoolAudit(BlockPool(25, 2))
    for _ in range(4):
        audit.look([], blocks=10)
    assert looks == [*range(25), *range(10)]


def lose_a_block(pool: BlockPool, idle: list[int]) -> None:
    pool._free.pop()


def hold_what_nobody_holds(pool: BlockPool, idle: list[int]) -> None:
    pool._refs[idle[3]] += 1


def mix_up_hashes(pool: BlockPool, idle: list[int]) -> None:
    one, other = (pool.index[idle[at]].hash for at in (2, 5))
    assert one is not None
    assert other is not None
    by_hash = pool.index._by_hash
    by_hash[one], by_hash[other] = by_hash[other], by_hash[one]


def lose_a_child(pool: BlockPool, idle: list[int]) -> None:
    del pool.index._children[pool.index[idle[4]].parent][0]


def lose_a_parent(pool: BlockPool, idle: list[int]) -> None:
    pool._unlist(idle[3])
    pool._policy.withdraw(idle[3])


def offer_what_is_continued(pool: BlockPool, idle: list[int]) -> None:
    pool._policy.offer(idle[0])


def withdraw_a_leaf(pool: BlockPool, idle: list[int]) -> None:
    pool._policy.withdraw(idle[-1])


@pytest.mark.parametrize(
    "spoil",
    [
        lose_a_block, hold_what_nobody_holds, mix_up_hashes, lose_a_child, lose_a_parent, offer_what_is_continued,
        withdraw_a_leaf,
    ],
)  # fmt: skip
def test_wrong_books_are_found_within_one_round(spoil: Callable[[BlockPool, list[int]], None]) -> None:
    pool, idle, held = filled()
    spoil(pool, idle)
    audit = PoolAudit(pool)
    with pytest.raises(AssertionError):
        for _ in range(7):
            audit.look([held], blocks=10)


def test_python_without_assertions_finds_them_too() -> None:
    code = (
        "from kvfleet.worker.blocks.block_pool import BlockPool\n"
        "from kvfleet.worker.blocks.pool_integrity import PoolAudit, check_integrity\n"
        "pool = BlockPool(4, 2)\n"
        "pool.allocate(1)\n"
        "check_integrity(pool, [])\n"
        "PoolAudit(pool).look([])\n"
    )
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert "AssertionError: 1 blocks are in use, holders have 0" in ended.stderr


def test_an_index_knows_what_it_lists() -> None:
    index = ContentIndex()
    pool, idle, _ = filled()
    index.add(1, pool.index[idle[0]])
    assert index.is_listed(1)
    assert all(map(pool.index.is_listed, idle))
