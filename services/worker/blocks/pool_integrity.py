"""Whether a block pool's books balance: all at once for tests, some blocks at a time in an idle worker.

Nothing else may read the pool's private state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvfleet.worker.blocks.block_pool import BlockPool

AUDITED = 1024  # blocks a look: a millisecond or two


def check_integrity(pool: BlockPool, holders: Sequence[Sequence[int]] | None = None) -> None:
    """Raises AssertionError. `holders`: the blocks of every holder, where all are known; references must then match."""
    pool.index.check_integrity()
    free = set(pool._free)
    assert len(free) == len(pool._free), "a block is free twice"
    assert all(not pool._refs[block] and block not in pool.index for block in free)
    idle = {block for block in pool.index.blocks() if not pool._refs[block]}
    assert len(idle) == pool.cached
    assert len(free) + len(idle) + sum(map(bool, pool._refs)) == pool.num_blocks, "a block is lost"
    assert min(pool._refs) >= 0
    evictable = {block for block in idle if pool._is_leaf(block)}
    assert evictable == set(filter(pool._policy.is_offered, range(pool.num_blocks)))
    assert pool._idle_children == Counter(pool.index[block].before for block in idle)
    for block in () if pool.windowed else pool.index.blocks():
        previous = pool.index.find(pool.index[block].before)
        if previous is not None:
            assert pool._refs[previous] >= pool._refs[block], "a block is held without the one before it"
    if holders is not None:
        counted: Counter[int] = Counter()
        for blocks in holders:
            held_by_one = [block for block in blocks if block >= 0]  # -1: let go
            assert len(set(held_by_one)) == len(held_by_one), "a holder lists a block twice"
            counted.update(held_by_one)
        assert [counted[block] for block in range(pool.num_blocks)] == pool._refs


@dataclass(eq=False, slots=True)
class PoolAudit:
    """Goes round the pool. Raises AssertionError, also where Python leaves assertions out."""

    pool: BlockPool
    _next: int = 0

    def look(self, holders: Iterable[Sequence[int]], blocks: int = AUDITED) -> None:
        pool = self.pool
        held = {block for blocks_held in holders for block in blocks_held if block >= 0}
        _ensure(pool.used == len(held), f"{pool.used} blocks are in use, holders have {len(held)}")
        for block in range(self._next, min(self._next + blocks, pool.num_blocks)):
            self._check(block, is_held=block in held)
        self._next = self._next + blocks if self._next + blocks < pool.num_blocks else 0

    def _check(self, block: int, *, is_held: bool) -> None:
        pool, index = self.pool, self.pool.index
        refs, listed = pool._refs[block], block in index
        _ensure(refs > 0 if is_held else refs == 0, f"block {block} has {refs} holders")
        if listed:
            content = index[block]
            _ensure(index.is_listed(block), f"block {block} cannot be found by what it contains")
            whole = content.before == content.root or pool.index.lists(content.before)
            _ensure(whole, f"block {block} is listed without the one before it")
        evictable = listed and not refs and pool._is_leaf(block)
        _ensure(pool._policy.is_offered(block) == evictable, f"block {block} is wrongly evictable, or is not")


def _ensure(fact: bool, why: str) -> None:
    if not fact:
        raise AssertionError(why)
