"""The block cache of a simulated worker, and the requests that wait for a place in it. Pure.

Every heartbeat says how many prompt tokens all waiting requests still need, under overload thousands of requests: so
each looks at the cache again only if a block comes or goes that its depth hangs on, its last cached or first missing
one.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvfleet.placement.simulate.trace import Arrival


@dataclass(eq=False, slots=True)
class LruCache:
    blocks: int
    _held: dict[int, int] = field(default_factory=dict)  # block -> how many sequences
    _idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # least recently used first

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
        """Cached blocks from the start on."""
        held, idle = self._held, self._idle
        for depth, block in enumerate(ids):
            if block not in held and block not in idle:
                return depth
        return len(ids)

    def fits(self, ids: Sequence[int]) -> bool:
        """Beside what is held; a prompt larger than the cache fits into an empty one."""
        more = sum(block not in self._held for block in ids)
        return len(self._held) + more <= self.blocks or not self._held

    def hold(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """(new blocks, evicted blocks)."""
        held, idle = self._held, self._idle
        new = []
        for block in ids:
            if block not in held and block not in idle:
                new.append(block)
            idle.pop(block, None)
            held[block] = held.get(block, 0) + 1
        return new, self._make_room()

    def let_go(self, ids: Sequence[int]) -> list[int]:
        """Returns evicted blocks. Leaves count as used before their parents."""
        held, idle = self._held, self._idle
        for block in reversed(ids):
            held[block] -= 1
            if not held[block]:
                del held[block]
                idle[block] = None
        return self._make_room()

    def rest_first(self, ids: Sequence[int]) -> None:
        """Of these what is idle is evicted before all others, the last of them first."""
        for block in ids:
            if block in self._idle:
                self._idle.move_to_end(block, last=False)

    def _make_room(self) -> list[int]:
        gone = []
        while len(self._held) + len(self._idle) > self.blocks and self._idle:
            gone.append(self._idle.popitem(last=False)[0])
        return gone


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One attempt at one request. Tokens of earlier attempts are fed with the prompt: the stream goes on from there."""

    arrival: Arrival
    attempt: int = 0
    accepted_at: float = 0.0
    generated: int = 0  # tokens, before this attempt
    cached_tokens: int = 0
    restored_tokens: int = 0  # of them, from below the device
    left: float = 0.0  # prompt tokens still to be prefilled
    new: list[int] = field(default_factory=list)  # blocks that its prefill adds
    depth: int = 0  # cached blocks, while it waits
    then: str = ""  # the worker that goes on after its first token
    source: str = ""  # a worker that has more of it
    brought: int = 0  # leading tokens that come with it from another worker
    began_at: float = 0.0  # its prefill

    @property
    def tokens(self) -> int:
        """That its first new token needs."""
        return self.arrival.prompt_tokens + self.generated

    @property
    def output_tokens(self) -> int:
        return self.arrival.output_tokens - self.generated


@dataclass(eq=False, slots=True)
class Waiting:
    """First come, first served."""

    cache: LruCache
    block_tokens: int
    tokens: int = 0  # to be fed for all of them, as the cache is now
    _jobs: deque[SimulatedJob] = field(default_factory=deque)
    # Block -> jobs whose depth hangs on it, in order of arrival.
    _watching: dict[int, dict[SimulatedJob, None]] = field(default_factory=dict)

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
        job.depth = self.cache.match(job.arrival.ids)
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
        return max(job.tokens - job.depth * self.block_tokens, 1)

    def check_integrity(self) -> None:
        assert all(job.depth == self.cache.match(job.arrival.ids) for job in self._jobs)
        assert self.tokens == sum(map(self._to_feed, self._jobs))
        assert {job for watching in self._watching.values() for job in watching} <= set(self._jobs)
