"""Consistent hashing, shared by placement, the client's fallback and vault sharding. Pure.

Points are MD5 truncated to 32 bits, 100 virtual nodes per node named `"<node>-vn-<i>"` (Karger et al., STOC 1997).
The bounded form walks past nodes whose load is at or above `ceil(factor * mean)` (Mirrokni, Thorup, Zadimoghaddam,
SODA 2018), so one hot key cannot bury a node.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache

VIRTUAL_NODES = 100


def point(key: str) -> int:
    """Position of a key on the ring: the first 32 bits of its MD5 (spread, not security)."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


@lru_cache(maxsize=8192)
def _node_points(node: str, virtual_nodes: int) -> tuple[int, ...]:
    """Of one node: a ring is rebuilt whenever somebody joins or leaves, the others' points stay."""
    return tuple(point(f"{node}-vn-{i}") for i in range(virtual_nodes))


class HashRing:
    """An immutable ring over a set of nodes: joins and leaves make a new ring (see `with_nodes`).

    Equal node sets give equal rings, whatever the order of joins and leaves that led there.
    """

    __slots__ = ("_owners", "_points", "nodes")

    def __init__(self, nodes: Iterable[str] = (), *, virtual_nodes: int = VIRTUAL_NODES) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        placed = sorted((at, node) for node in self.nodes for at in _node_points(node, virtual_nodes))
        self._points = [p for p, _ in placed]
        self._owners = [n for _, n in placed]

    def walk(self, key: str) -> Iterator[str]:
        """Each node once, in ring order from the key's position."""
        start = bisect_left(self._points, point(key))
        seen: set[str] = set()
        total = len(self._owners)
        for step in range(total):
            node = self._owners[(start + step) % total]
            if node not in seen:
                seen.add(node)
                yield node
                if len(seen) == len(self.nodes):
                    return

    def owner(self, key: str, *, excluded: Collection[str] = ()) -> str | None:
        """The first node at or after the key's position that is not excluded; None if there is none."""
        return next((node for node in self.walk(key) if node not in excluded), None)

    def bounded_owner(
        self,
        key: str,
        loads: Mapping[str, float],
        *,
        factor: float = 1.25,
        least: int = 1,
        excluded: Collection[str] = (),
    ) -> str | None:
        """The first node whose load, with this request, stays within `ceil(factor * mean)`.

        `loads` counts requests per node (absent: 0). The mean counts this request too, so some node always has room.
        Nobody is passed over for a load of at most `least`: with few requests the mean says little.
        """
        candidates = [node for node in self.nodes if node not in excluded]
        if not candidates:
            return None
        mean = (sum(loads.get(node, 0) for node in candidates) + 1) / len(candidates)
        bound = max(math.ceil(factor * mean), least)
        admitted = (n for n in self.walk(key) if n not in excluded and loads.get(n, 0) + 1 <= bound)
        return next(admitted, None)
