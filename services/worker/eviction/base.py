"""The seam between the block pool and an eviction policy. Pure.

The pool decides *what may* be evicted (a leaf: cached, unreferenced, nothing cached continues it), the policy *which*
leaf goes first. So every cached chain stays whole from its root on, which placement's galloping search relies on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EvictionBalance:
    """Against least recently used first, as far as a policy keeps count: seconds of computing prompts that it saved and
    that it cost. `follows_lru`: now it evicts in that order."""

    saved_s: float = 0.0
    lost_s: float = 0.0
    follows_lru: bool = True


class EvictionPolicy(Protocol):
    """`tick` is the pool's logical clock, which only grows."""

    @property
    def balance(self) -> EvictionBalance: ...

    def touch(self, block: int, tick: int) -> None:
        """The last holder let go of `block` at `tick`, which is above 0."""

    def demote(self, block: int) -> None:
        """Until its next touch `block` goes before all others, once it is offered again."""

    def offer(self, block: int) -> None:
        """`block` became an evictable leaf."""

    def withdraw(self, block: int) -> None:
        """`block` is no evictable leaf any more; unknown blocks are ignored."""

    def victim(self) -> int:
        """Take the block to evict next. Raises LookupError if none is offered."""

    def is_offered(self, block: int) -> bool: ...

    def asked(self, hashes: Sequence[bytes], limit: int, cached: int) -> None:
        """A sequence with these full blocks is admitted, of which it may reuse the first `limit`; the first `cached`
        were here."""

    def stored(self, block: int, block_hash: bytes | None, at: int, before: int | None) -> None:
        """A held block got content: the `at`-th of a chain, behind block `before`; a partial tail has no hash."""

    def reused(self, block: int) -> None:
        """`block`, which nobody held, is held again for what it contains."""
