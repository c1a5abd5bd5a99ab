"""What a policy could hit at most: one worker that holds the fleet's whole cache (LRU). Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvfleet.placement.simulate.trace import Trace


def attainable_tokens(trace: Trace, cache_blocks: int) -> int:
    """Prompt tokens found in an LRU cache of so many blocks, requests one after the other."""
    return sum(attainable_by_request(trace, cache_blocks))


def attainable_by_request(trace: Trace, cache_blocks: int) -> Iterator[int]:
    cache = LruCache(cache_blocks)
    for arrival in trace.arrivals:
        depth = cache.match(arrival.ids)
        yield min(depth * trace.block_tokens, arrival.prompt_tokens - 1)
        cache.hold(arrival.ids)
        cache.let_go(arrival.ids)


class LruCache:
    """Blocks of one worker: those that sequences hold, and the others in the order of their last use."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._held: dict[int, int] = {}  # block -> how many sequences
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held) + len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._held or block in self._idle

    def __iter__(self) -> Iterator[int]:
        yield from self._held
        yield from self._idle

    @property
    def held(self) -> int:
        return len(self._held)

    def match(self, ids: Sequence[int]) -> int:
        """Blocks from the start that are there."""
        held, idle = self._held, self._idle
        for depth, block in enumerate(ids):
            if block not in held and block not in idle:
                return depth
        return len(ids)

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether they can be held beside what is held; a prompt larger than the cache fits into an empty one."""
        more = sum(block not in self._held for block in ids)
        return len(self._held) + more <= self.blocks or not self._held

    def hold(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """A sequence has them now; (blocks that are new here, blocks that had to go)."""
        held, idle = self._held, self._idle
        new = []
        for block in ids:
            if block in held:
                held[block] += 1
            else:
                held[block] = 1
                if block in idle:
                    del idle[block]
                else:
                    new.append(block)
        return new, self._make_room()

    def let_go(self, ids: Sequence[int]) -> list[int]:
        """The sequence is over; leaves count as used before what they hang on. Returns blocks that had to go."""
        held, idle = self._held, self._idle
        for block in reversed(ids):
            count = held[block] - 1
            if count:
                held[block] = count
            else:
                del held[block]
                idle[block] = None
        return self._make_room()

    def _make_room(self) -> list[int]:
        gone = []
        while len(self._held) + len(self._idle) > self.blocks and self._idle:
            gone.append(self._idle.popitem(last=False)[0])
        return gone
