"""The seam between the block pool and an eviction policy. Pure.

The pool decides *what may* be evicted (a leaf: cached, unreferenced, nothing cached continues it), the policy *which*
leaf goes first. So every cached chain stays whole from its root on, which placement's galloping search relies on.
"""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """`tick` is the pool's logical clock, which only grows."""

    def touch(self, block: int, tick: int) -> None:
        """The last holder let go of `block` at `tick`."""

    def offer(self, block: int) -> None:
        """`block` became an evictable leaf."""

    def withdraw(self, block: int) -> None:
        """`block` is no evictable leaf any more; unknown blocks are ignored."""

    def victim(self) -> int:
        """Take the block to evict next. Raises LookupError if none is offered."""

    def is_offered(self, block: int) -> bool: ...
