"""What the cached blocks contain: full blocks by hash, and the children of each prefix. Pure; owns no references.

Children are sorted by token ids: the best match of a query is always one of its two neighbours. Behind a public prefix
a tenant's blocks are hashed onto a key of their own, with an edge from the last public block while it has children.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvproto.block_hash import STATE_ID, Root, before, parent_of, root_at, state_after


class Content(NamedTuple):
    """Tokens of one cached block. `hash` is None for a partial tail. `parent` is what the block is hashed onto and
    `before` the block before it, or the root: they differ only where a tenant's own blocks begin behind a public
    prefix. `lossy`: quantised once, or computed on a block that was."""

    parent: bytes
    ids: tuple[int, ...]
    hash: bytes | None
    before: bytes
    root: bytes
    lossy: bool = False

    @classmethod
    def of(
        cls, root: Root, hashes: Sequence[bytes], at: int, ids: Sequence[int], *, full: bool, lossy: bool
    ) -> Content:
        own = hashes[at] if full else None
        return cls(parent_of(root, hashes, at), tuple(ids), own, before(root, hashes, at), root_at(root, at), lossy)

    @classmethod
    def of_state(cls, root: bytes, block_hash: bytes, *, lossy: bool) -> Content:
        """Of the recurrent state at this block's end, as others know it."""
        return cls(block_hash, (STATE_ID,), state_after(block_hash), block_hash, root, lossy)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return min(len(left), len(right))


def depth_of(hashes: Sequence[bytes], has: Callable[[bytes], bool]) -> int:
    """How many leading blocks of a chain are there, by bisection: a holder of one has all before it."""
    return bisect_left(range(len(hashes)), True, key=lambda at: not has(hashes[at]))


class ContentIndex:
    """A full block's hash and a tail's (parent, ids) are unique in it."""

    def __init__(self) -> None:
        self._contents: dict[int, Content] = {}
        self._by_hash: dict[bytes, int] = {}
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self._forks: dict[bytes, dict[bytes, None]] = {}  # last public block -> tenants' keys with children behind it

    def __contains__(self, block: int) -> bool:
        return block in self._contents

    def __getitem__(self, block: int) -> Content:
        return self._contents[block]

    def blocks(self) -> Iterator[int]:
        return iter(self._contents)

    @property
    def addressed(self) -> int:
        """Full blocks, held or not: what a snapshot lists."""
        return len(self._by_hash)

    def hashes(self) -> list[bytes]:
        """Of all full blocks, parents before children."""
        return list(self._by_hash)

    def find(self, block_hash: bytes) -> int | None:
        return self._by_hash.get(block_hash)

    def lists(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def depth(self, hashes: Sequence[bytes]) -> int:
        return depth_of(hashes, self.lists)

    def add(self, block: int, content: Content) -> None:
        """Raises KeyError if the block, or a full block of the same hash, is indexed already."""
        if block in self._contents or content.hash in self._by_hash:
            raise KeyError(block)
        self._contents[block] = content
        if content.hash is not None:
            self._by_hash[content.hash] = block
        insort(self._children.setdefault(content.parent, []), (content.ids, block))
        if content.parent != content.before:
            self._forks.setdefault(content.before, {})[content.parent] = None

    def remove(self, block: int) -> Content:
        content = self._contents.pop(block)
        if content.hash is not None:
            del self._by_hash[content.hash]
        siblings = self._children[content.parent]
        del siblings[bisect_left(siblings, (content.ids, block))]
        if not siblings:
            del self._children[content.parent]
            if content.parent != content.before:
                forks = self._forks[content.before]
                del forks[content.parent]
                if not forks:
                    del self._forks[content.before]
        return content

    def has_children(self, block_hash: bytes) -> bool:
        return block_hash in self._children or block_hash in self._forks

    def children(self, block_hash: bytes) -> list[int]:
        """Blocks that continue a full block directly, tails included, of all tenants."""
        keys = (block_hash, *self._forks.get(block_hash, ()))
        return [block for key in keys for _, block in self._children.get(key, ())]

    def longest_child(self, parent: bytes, ids: Sequence[int], *, exact: bool = False) -> tuple[int | None, int]:
        """The block under `parent` that shares the most leading tokens with `ids`, and how many; (None, 0) if none.
        `exact`: lossy ones do not count; a lossy neighbour may hide a worse match that is exact."""
        siblings = self._children.get(parent)
        if not siblings or not ids:
            return None, 0
        query = tuple(ids)
        at = bisect_left(siblings, (query, -1))
        best, length = None, 0
        for child_ids, block in siblings[max(at - 1, 0) : at + 1]:
            common = common_prefix(child_ids, query)
            if common > length and not (exact and self._contents[block].lossy):
                best, length = block, common
        return best, length

    def shorter_tails(self, parent: bytes, ids: tuple[int, ...]) -> list[int]:
        """Partial tails under `parent` whose tokens are a proper prefix of `ids`."""
        siblings = self._children.get(parent, [])
        found = []
        for length in range(1, len(ids)):
            at = bisect_left(siblings, (ids[:length], -1))
            if at < len(siblings) and siblings[at][0] == ids[:length]:
                found.append(siblings[at][1])
            if at == len(siblings):
                break
        return found

    def is_listed(self, block: int) -> bool:
        """Whether a block is found under its hash and among its parent's children. For audits."""
        content = self._contents[block]
        siblings = self._children.get(content.parent, [])
        at = bisect_left(siblings, (content.ids, block))
        found = content.hash is None or self._by_hash.get(content.hash) == block
        return found and at < len(siblings) and siblings[at] == (content.ids, block)

    def check_integrity(self) -> None:
        """Raises AssertionError if the maps disagree, or a block lacks the one before it."""
        assert all(c.before in self._by_hash or c.before == c.root for c in self._contents.values())
        assert self._by_hash == {c.hash: block for block, c in self._contents.items() if c.hash is not None}
        listed = {block: (parent, ids) for parent, siblings in self._children.items() for ids, block in siblings}
        assert listed == {block: (c.parent, c.ids) for block, c in self._contents.items()}
        assert all(siblings and siblings == sorted(siblings) for siblings in self._children.values())
        assert sum(map(len, self._children.values())) == len(self._contents)
        forks: dict[bytes, dict[bytes, None]] = {}
        for content in self._contents.values():
            if content.parent != content.before:
                forks.setdefault(content.before, {})[content.parent] = None
        assert self._forks == forks
