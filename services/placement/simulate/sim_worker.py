"""One worker of a simulation: prefill in turn, decode side by side, a block cache. Pure: virtual time is passed in.

A step feeds a chunk of the prompt that is being prefilled, if there is one, and one token of each decoding sequence.
Between two events both rates are constant, so nothing is stepped: with n sequences decoding and a chunk of C tokens

    prefill  C / (C/r + d(n)) tokens/s       r: prefill tokens/s of an otherwise idle worker
    decode   1 / (C/r + d(n)) steps/s        d(n): seconds of a decode step of n sequences

and without a prefill 1 / d(n) steps/s.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from kvproto.messages import Load, Rates
from services.placement.simulate.attainable import LruCache
from services.placement.simulate.waiting import Job, Waiting

ROUNDING = 1e-6  # of a step


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
class Progress:
    """What happened up to now, for the simulation to tell placement and to count."""

    started: list[Job] = field(default_factory=list)
    first_token: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    changes: list[tuple[bool, list[int]]] = field(default_factory=list)  # (removed, blocks), in their order

    def stored(self, blocks: list[int]) -> None:
        if blocks:
            self.changes.append((False, blocks))

    def removed(self, blocks: list[int]) -> None:
        if blocks:
            self.changes.append((True, blocks))


class SimWorker:
    """Time never goes back. After each call `next_at` says when something happens by itself."""

    def __init__(self, name: str, speed: Speed, cache_blocks: int, block_tokens: int, now: float = 0.0) -> None:
        self.name = name
        self.epoch = "e1"
        self.cache = LruCache(cache_blocks)
        self.event_seq = 0
        self.prefilled: dict[int, float] = {}  # minute -> tokens
        self._speed = speed
        self._block_tokens = block_tokens
        self._now = now
        self._waiting = Waiting(self.cache, block_tokens)
        self._prefilling: Job | None = None
        self._decoding: list[tuple[float, int, int, Job]] = []  # heap of (step it ends with, number, attempt, job)
        self._steps = 0.0
        self._prefill_rate = self._step_rate = 0.0
        self._prefill_ends = self._decode_ends = math.inf
        self._plan()

    # ------------------------------------------------------------------ events

    def submit(self, job: Job, now: float) -> Progress:
        progress = self.advance(now)
        self._waiting.append(job)
        if self._admit(progress):
            self._plan()
        return progress

    def advance(self, now: float) -> Progress:
        """Everything up to `now`."""
        progress = Progress()
        while (at := min(self._prefill_ends, self._decode_ends)) <= now:
            self._flow(at)
            self._happen(progress)
        self._flow(now)
        return progress

    def abandon(self) -> list[Job]:
        """The worker dies: what it was doing."""
        jobs = [*self._waiting.clear(), *([self._prefilling] if self._prefilling else [])]
        jobs += [job for *_, job in sorted(self._decoding, key=lambda one: one[:3])]
        self._prefilling, self._decoding = None, []
        self._plan()
        return jobs

    def next_at(self) -> float | None:
        at = min(self._prefill_ends, self._decode_ends)
        return None if at == math.inf else at

    # ------------------------------------------------------------------ what a heartbeat says

    def load(self) -> Load:
        left = self._prefilling.left if self._prefilling else 0.0
        return Load(
            waiting=len(self._waiting),
            running=self.running,
            slots=self._speed.slots,
            blocks_used=self.cache.held,
            blocks_total=self.cache.blocks,
            queued_prefill_tokens=int(self._waiting.tokens + left),
        )

    def rates(self) -> Rates:
        return Rates(self._prefill_rate, self._step_rate, self._step_rate * len(self._decoding))

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    # ------------------------------------------------------------------ inside

    def _plan(self) -> None:
        """What is being done has changed: the rates until it changes again, and when it does."""
        speed, job, decoding = self._speed, self._prefilling, len(self._decoding)
        chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s
        decode_s = speed.decode_s(decoding)
        self._prefill_rate = speed.chunk_tokens / (chunk_s + (decode_s if decoding else 0.0))
        self._step_rate = 1 / (decode_s + (chunk_s if job else 0.0))
        self._prefill_ends = self._decode_ends = math.inf
        if job is not None:
            self._prefill_ends = self._now + job.left / self._prefill_rate
        if decoding:
            self._decode_ends = self._now + max(self._decoding[0][0] - self._steps, 0.0) / self._step_rate

    def _flow(self, now: float) -> None:
        seconds = now - self._now
        if seconds > 0:
            if self._prefilling is not None:
                done = min(seconds * self._prefill_rate, self._prefilling.left)
                self._prefilling.left -= done
                self._count(done, now)
            if self._decoding:
                self._steps += seconds * self._step_rate
        self._now = now

    def _count(self, tokens: float, now: float) -> None:
        """Spread over the minutes it took."""
        began, minute, last = self._now, int(self._now // 60), int(now // 60)
        for each in range(minute, last + 1):
            share = (min(now, (each + 1) * 60.0) - max(began, each * 60.0)) / (now - began) if minute < last else 1.0
            self.prefilled[each] = self.prefilled.get(each, 0.0) + tokens * share

    def _happen(self, progress: Progress) -> None:
        """What was planned for now; by the clock, as what is left after rounding is never quite nothing."""
        job = self._prefilling
        decoded = self._decode_ends <= self._now
        if job is not None and self._prefill_ends <= self._now:
            minute = int(self._now // 60)
            self.prefilled[minute] = self.prefilled.get(minute, 0.0) + job.left
            job.left = 0.0
            self._prefilling = None
            progress.first_token.append(job)
            progress.stored(job.new)
            last = self._steps + job.arrival.output_tokens - 1
            heapq.heappush(self._decoding, (last, job.arrival.number, job.attempt, job))
        if decoded:
            self._steps = max(self._steps, self._decoding[0][0])
        while self._decoding and self._decoding[0][0] <= self._steps + ROUNDING:
            job = heapq.heappop(self._decoding)[-1]
            progress.ended.append(job)
            gone = self.cache.let_go(job.arrival.ids)
            progress.removed(gone)
            self._waiting.on_changed(gone)
        self._admit(progress)
        self._plan()

    def _admit(self, progress: Progress) -> bool:
        """First come, first served, one prompt at a time; whether one was."""
        if self._prefilling is not None or not self._waiting or self.running >= self._speed.slots:
            return False
        if not self.cache.fits(self._waiting.first.arrival.ids):
            return False
        job = self._waiting.popleft()
        prompt = job.arrival.prompt_tokens
        job.cached_tokens = min(job.depth * self._block_tokens, prompt - 1)
        job.left = float(prompt - job.cached_tokens)
        job.new, gone = self.cache.hold(job.arrival.ids)
        self._waiting.on_changed((*job.new, *gone))
        progress.removed(gone)
        progress.started.append(job)
        self._prefilling = job
        return True
