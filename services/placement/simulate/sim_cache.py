"""The block cache of a simulated worker, and the requests that wait for a place in it. Pure.

A worker reports with every heartbeat how many prompt tokens it has still to feed for all that wait, and under overload
that is thousands: so each request looks at the cache again only if a block comes or goes that its depth hangs on, the
last one that is there or the first one that is not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvfleet.placement.simulate.trace import Arrival


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
            if block not in held and block not in idle:
                new.append(block)
            idle.pop(block, None)
            held[block] = held.get(block, 0) + 1
        return new, self._make_room()

    def let_go(self, ids: Sequence[int]) -> list[int]:
        """The sequence is over; leaves count as used before what they hang on. Returns blocks that had to go."""
        held, idle = self._held, self._idle
        for block in reversed(ids):
            held[block] -= 1
            if not held[block]:
                del held[block]
                idle[block] = None
        return self._make_room()

    def _make_room(self) -> list[int]:
        gone = []
        while len(self._held) + len(self._idle) > self.blocks and self._idle:
            gone.append(self._idle.popitem(last=False)[0])
        return gone


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One attempt at one request. What earlier ones generated is fed with the prompt: the stream goes on from there."""

    arrival: Arrival
    attempt: int = 0
    accepted_at: float = 0.0
    generated: int = 0  # tokens, before this attempt
    cached_tokens: int = 0
    left: float = 0.0  # prompt tokens still to be prefilled
    new: list[int] = field(default_factory=list)  # blocks that its prefill adds
    depth: int = 0  # while it waits: blocks of it that are there

    @property
    def tokens(self) -> int:
        """What its first new token needs."""
        return self.arrival.prompt_tokens + self.generated

    @property
    def output_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated


class Waiting:
    """First come, first served."""

    def __init__(self, cache: LruCache, block_tokens: int) -> None:
        self.tokens = 0  # to be fed for all of them, as the cache is now
        self._cache = cache
        self._block_tokens = block_tokens
        self._jobs: deque[SimulatedJob] = deque()
        self._watching: dict[int, dict[SimulatedJob, None]] = {}  # block -> whose depth hangs on it, in order of coming

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> SimulatedJob:
        return self._jobs[0]

    def append(self, job: SimulatedJob) -> None:
        self._jobs.append(job)
        self._watch(job)

    def popleft(self) -> SimulatedJob:
        job = self._jobs.popleft()
        self._forget(job)
        return job

    def clear(self) -> list[SimulatedJob]:
        jobs = list(self._jobs)
        self._jobs.clear()
        self._watching.clear()
        self.tokens = 0
        return jobs

    def on_changed(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for job in list(self._watching.get(block, ())):
                self._forget(job)
                self._watch(job)

    def _watch(self, job: SimulatedJob) -> None:
        job.depth = self._cache.match(job.arrival.ids)
        self.tokens += self._to_feed(job)
        for block in self._hangs_on(job):
            self._watching.setdefault(block, {})[job] = None

    def _forget(self, job: SimulatedJob) -> None:
        self.tokens -= self._to_feed(job)
        for block in self._hangs_on(job):
            watching = self._watching[block]
            del watching[job]
            if not watching:
                del self._watching[block]

    def _hangs_on(self, job: SimulatedJob) -> tuple[int, ...]:
        return job.arrival.ids[max(job.depth - 1, 0) : job.depth + 1]

    def _to_feed(self, job: SimulatedJob) -> int:
        return max(job.tokens - job.depth * self._block_tokens, 1)

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        assert all(job.depth == self._cache.match(job.arrival.ids) for job in self._jobs)
        assert self.tokens == sum(map(self._to_feed, self._jobs))
        assert {job for watching in self._watching.values() for job in watching} <= set(self._jobs)
