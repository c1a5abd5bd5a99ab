"""Requests that wait at a simulated worker, and how many prompt tokens it has still to feed for them. Pure.

A worker reports that sum with every heartbeat, and under overload thousands wait: so each request looks at the cache
again only if a block comes or goes that its depth hangs on, the last one that is there or the first one that is not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvfleet.placement.simulate.attainable import LruCache
from kvfleet.placement.simulate.trace import Arrival


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One attempt at one request. What earlier ones generated is fed with the prompt: the stream goes on from there."""

    arrival: Arrival
    attempt: int
    accepted_at: float
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
        """Still to be generated."""
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
        """Who was there."""
        jobs = list(self._jobs)
        self._jobs.clear()
        self._watching.clear()
        self.tokens = 0
        return jobs

    def on_changed(self, blocks: Iterable[int]) -> None:
        """These came into the cache or went."""
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
