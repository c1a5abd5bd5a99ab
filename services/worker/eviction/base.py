"""The seam between the block pool and an eviction policy. Pure.

The pool decides *what may* be evicted (a leaf: cached, unreferenced, nothing cached continues it), the policy decides
*which* of those goes first. Offering leaves only is what keeps every cached chain whole from its root on: an index that
holds a block also holds all blocks before it, which placement's galloping search relies on.
"""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders evictable blocks. Blocks are ids of the pool; `tick` is the pool's logical clock, it only grows."""

    def touch(self, block: int, tick: int) -> None:
        """A sequence let go of `block` at `tick`: it was of use until then."""

    def offer(self, block: int) -> None:
        """`block` became an evictable leaf."""

    def withdraw(self, block: int) -> None:
        """`block` is no evictable leaf any more; unknown blocks are ignored."""

    def victim(self) -> int:
        """Take the block to evict next out of the offered ones. Raises LookupError if there is none."""

    def is_offered(self, block: int) -> bool:
        """Whether it could be a victim now."""

    def offered(self) -> set[int]:
        """All blocks that could be a victim now; for integrity checks."""
