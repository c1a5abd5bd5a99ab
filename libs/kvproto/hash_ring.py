"""Consistent hashing, shared by placement, the client's fallback and vault sharding. Pure.

Points are MD5 truncated to 32 bits, 100 virtual nodes per node named `"<node>-vn-<i>"` (Karger et al., STOC 1997).
The bounded form walks past nodes whose load is at or above `ceil(factor * mean)` (Mirrokni, Thorup, Zadimoghaddam,
SODA 2018), so one hot key cannot bury a node.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress

from kvproto.block_hash import pack_ids

VIRTUAL_NODES = 100
FEW = 8  # nodes that come at once: with more, sorting anew is quicker
PREFIX_TOKENS = 64  # four blocks: past the start of a chat template, short enough that turns of one chat agree


def ring_key(tenant: str, *, session: str | None, prompt_ids: Sequence[int] = (), prompt: str | None = None) -> str:
    """The session, else the first tokens of the prompt, so that equal prefixes meet. Tenants share no key."""
    if session:
        return f"{tenant}/s/{session}"
    if prompt_ids:
        return f"{tenant}/p/{hashlib.blake2b(pack_ids(prompt_ids[:PREFIX_TOKENS]), digest_size=16).hexdigest()}"
    return f"{tenant}/t/{hashlib.blake2b((prompt or '')[: 4 * PREFIX_TOKENS].encode(), digest_size=16).hexdigest()}"


def point(key: str) -> int:
    """Position of a key on the ring: the first 32 bits of its MD5 (spread, not security)."""
    return int.from_bytes(hashlib.md5(key.encode(), usedforsecurity=False).digest()[:4], "big")


@lru_cache(maxsize=8192)
def _node_points(node: str) -> tuple[int, ...]:
    """Cached, as a ring is rebuilt at every join and leave."""
    return tuple(point(f"{node}-vn-{i}") for i in range(VIRTUAL_NODES))


class HashRing:
    """An immutable ring over a set of nodes. Equal sets give equal rings, whatever the joins and leaves before."""

    __slots__ = ("_owners", "_points", "nodes")

    def __init__(self, nodes: Iterable[str] = ()) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        placed = sorted((at, node) for node in self.nodes for at in _node_points(node))
        self._points = [p for p, _ in placed]
        self._owners = [n for _, n in placed]

    def with_nodes(self, nodes: Iterable[str]) -> HashRing:
        """The ring over `nodes`. A few joins and leaves cost a twentieth of a new ring."""
        wanted = set(nodes)
        gone, come = set(self.nodes) - wanted, sorted(wanted - set(self.nodes))
        if not gone and not come:
            return self
        if len(come) > FEW:
            return HashRing(wanted)
        ring = HashRing()
        ring.nodes = tuple(sorted(wanted))
        ring._points, ring._owners = self._points.copy(), self._owners.copy()
        if gone:
            stays = [owner not in gone for owner in ring._owners]
            ring._points, ring._owners = list(compress(ring._points, stays)), list(compress(ring._owners, stays))
        for node in come:
            for at in _node_points(node):
                index = bisect_left(ring._points, at)
                while index < len(ring._points) and ring._points[index] == at and ring._owners[index] < node:
                    index += 1
                ring._points.insert(index, at)
                ring._owners.insert(index, node)
        return ring

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
        The bound is at least `least`: with few requests the mean says little.
        """
        candidates = [node for node in self.nodes if node not in excluded]
        if not candidates:
            return None
        mean = (sum(loads.get(node, 0) for node in candidates) + 1) / len(candidates)
        bound = max(math.ceil(factor * mean), least)
        admitted = (n for n in self.walk(key) if n not in excluded and loads.get(n, 0) + 1 <= bound)
        return next(admitted, None)
