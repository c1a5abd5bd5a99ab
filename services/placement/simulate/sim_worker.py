"""One worker of a simulation: prefill in turn, decode side by side, a block cache. Pure: virtual time is passed in.

A step feeds a chunk of the prompt that is being prefilled, if there is one, and one token of each decoding sequence.
Between two events both rates are constant, so nothing is stepped: with n sequences decoding and a chunk of C tokens

    prefill  C / (C/r + d(n)) tokens/s       r: prefill tokens/s of an otherwise idle worker
    decode   1 / (C/r + d(n)) steps/s        d(n): seconds of a decode step of n sequences

and without a prefill 1 / d(n) steps/s.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from kvproto.messages import Load, Rates
from services.placement.simulate.attainable import LruCache
from services.placement.simulate.trace import Arrival


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a simulated worker; the defaults are about those of an 8B model on one datacentre GPU."""

    prefill_tokens_per_s: float = 8000.0
    chunk_tokens: int = 2048
    decode_base_s: float = 0.015
    decode_each_s: float = 0.0003
    slots: int = 256

    def decode_s(self, sequences: int) -> float:
        return self.decode_base_s + self.decode_each_s * sequences


@dataclass(slots=True)
class Job:
    """One attempt at one request."""

    arrival: Arrival
    attempt: int
    accepted_at: float
    cached_tokens: int = 0
    left: float = 0.0  # prompt tokens still to be prefilled
    new: list[int] = field(default_factory=list)  # blocks that its prefill adds


@dataclass(slots=True)
class Progress:
    """What happened up to now, for the simulation to tell placement and to count."""

    started: list[Job] = field(default_factory=list)
    first_token: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)


class SimWorker:
    """Time never goes back. After each call `next_at` says when something happens by itself."""

    def __init__(self, name: str, speed: Speed, cache_blocks: int, block_tokens: int) -> None:
        self.name = name
        self.epoch = "e1"
        self.cache = LruCache(cache_blocks)
        self.event_seq = 0
        self.prefilled: dict[int, float] = {}  # minute -> tokens
        self.changed = True  # since the last heartbeat
        self._speed = speed
        self._block_tokens = block_tokens
        self._now = 0.0
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._decoding: list[tuple[float, int, int, Job]] = []  # heap of (step it ends with, number, attempt, job)
        self._steps = 0.0

    # ------------------------------------------------------------------ events

    def submit(self, job: Job, now: float) -> Progress:
        progress = self.advance(now)
        self._waiting.append(job)
        self._admit(progress)
        return progress

    def advance(self, now: float) -> Progress:
        """Everything up to `now`."""
        progress = Progress()
        while True:
            at = self.next_at()
            if at is None or at > now:
                break
            self._flow(at)
            self._happen(progress)
        self._flow(now)
        return progress

    def abandon(self) -> list[Job]:
        """The worker dies: what it was doing."""
        jobs = [*self._waiting, *([self._prefilling] if self._prefilling else []), *(job for *_, job in self._decoding)]
        self._waiting.clear()
        self._prefilling, self._decoding = None, []
        return jobs

    def next_at(self) -> float | None:
        at = None
        if self._prefilling is not None:
            at = self._now + self._prefilling.left / self._prefill_rate()
        if self._decoding:
            ends = self._now + max(self._decoding[0][0] - self._steps, 0.0) / self._step_rate()
            at = ends if at is None else min(at, ends)
        return at

    # ------------------------------------------------------------------ what a heartbeat says

    def load(self) -> Load:
        waiting = sum(max(job.arrival.prompt_tokens - self._found(job), 1) for job in self._waiting)
        left = self._prefilling.left if self._prefilling else 0.0
        return Load(
            waiting=len(self._waiting),
            running=self.running,
            slots=self._speed.slots,
            blocks_used=self.cache.held,
            blocks_total=self.cache.blocks,
            queued_prefill_tokens=int(waiting + left),
        )

    def rates(self) -> Rates:
        return Rates(self._prefill_rate(), self._step_rate(), self._step_rate() * len(self._decoding))

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    # ------------------------------------------------------------------ inside

    def _found(self, job: Job) -> int:
        return min(self.cache.match(job.arrival.ids) * self._block_tokens, job.arrival.prompt_tokens - 1)

    def _prefill_rate(self) -> float:
        speed = self._speed
        chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s
        decode_s = speed.decode_s(len(self._decoding)) if self._decoding else 0.0
        return speed.chunk_tokens / (chunk_s + decode_s)

    def _step_rate(self) -> float:
        speed = self._speed
        chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s if self._prefilling else 0.0
        return 1 / (chunk_s + speed.decode_s(len(self._decoding)))

    def _flow(self, now: float) -> None:
        seconds = now - self._now
        if seconds > 0:
            self.changed = self.changed or bool(self.running)
            if self._prefilling is not None:
                done = min(seconds * self._prefill_rate(), self._prefilling.left)
                self._prefilling.left -= done
                self._count(done, now)
            if self._decoding:
                self._steps += seconds * self._step_rate()
        self._now = now

    def _count(self, tokens: float, now: float) -> None:
        """Spread over the minutes it took."""
        began = self._now
        while began < now:
            minute = int(began // 60)
            ends = min(now, (minute + 1) * 60.0)
            self.prefilled[minute] = self.prefilled.get(minute, 0.0) + tokens * (ends - began) / (now - self._now)
            began = ends

    def _happen(self, progress: Progress) -> None:
        self.changed = True
        job = self._prefilling
        if job is not None and job.left <= 1e-6:
            self._prefilling = None
            progress.first_token.append(job)
            progress.stored += job.new
            last = self._steps + job.arrival.output_tokens - 1
            heapq.heappush(self._decoding, (last, job.arrival.number, job.attempt, job))
        while self._decoding and self._decoding[0][0] <= self._steps + 1e-6:
            job = heapq.heappop(self._decoding)[-1]
            progress.ended.append(job)
            progress.removed += self.cache.let_go(job.arrival.ids)
        self._admit(progress)

    def _admit(self, progress: Progress) -> None:
        """First come, first served, one prompt at a time."""
        if self._prefilling is not None or not self._waiting or self.running >= self._speed.slots:
            return
        if not self.cache.fits(self._waiting[0].arrival.ids):
            return
        job = self._waiting.popleft()
        self.changed = True
        job.cached_tokens = self._found(job)
        job.left = float(job.arrival.prompt_tokens - job.cached_tokens)
        job.new, gone = self.cache.hold(job.arrival.ids)
        progress.removed += gone
        progress.started.append(job)
        self._prefilling = job
