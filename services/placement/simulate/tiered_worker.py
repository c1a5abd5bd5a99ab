"""A simulated worker with a tier below its device, and with conversations that pause. Pure: virtual time is passed in.

    a request ends ──▶ its blocks are copied down     an admitted one ──▶ what lies below is restored, then the prefill
    ReturnExpected ──▶ its own blocks are evicted first ──shortly before the return──▶ restored ──late──▶ first again

Restores run one after the other beside the prefill, as over one link. Pauses follow the worker's own rules
(`kvservice.pause_book`). Copies down take no time: they wait for nobody.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from kvfleet.placement.simulate.fleet_shape import Below
from kvfleet.placement.simulate.sim_cache import LruCache, SimulatedJob
from kvfleet.placement.simulate.sim_worker import SimulatedProgress, SimWorker
from kvproto.messages import Rates, Tier
from kvservice.pause_book import SURE, UP_SHARE, PauseBook, Paused, is_long_enough
from kvservice.return_times import ReturnSpan

Ids = tuple[int, ...]
LEFT_SHARE = 1 / 8  # of the device's blocks: pauses leave them to running requests
LEAD_S = 0.05


@dataclass(eq=False, slots=True)
class SimulatedRestore:
    """`ids` are held on the device from its begin on; the last `count` of them come from below."""

    ids: Ids
    count: int
    began: float
    job: SimulatedJob | None = None  # that waits for it
    pause: Paused[Ids] | None = None  # or whose conversation is away


@dataclass(eq=False, kw_only=True)
class TieredWorker(SimWorker):
    below: Below
    shared: frozenset[int] = frozenset()  # blocks of several conversations
    restored_tokens: int = 0  # of requests that waited for them
    paused_total: int = 0
    brought_blocks: int = 0
    given_back_blocks: int = 0
    saved_s: float = 0.0
    _link_free_at: float = 0.0
    _restores: list[tuple[float, int, SimulatedRestore]] = field(default_factory=list)  # a heap, by their end
    _number: int = 0
    _ready: deque[SimulatedJob] = field(default_factory=deque)  # restored, first come first served
    _arriving: dict[int, float] = field(default_factory=dict)  # block on its way up -> when it is there
    _book: PauseBook[str, Ids] = field(default_factory=PauseBook)  # by session

    def __post_init__(self) -> None:
        self.host = LruCache(self.below.blocks)
        super().__post_init__()

    def expect(self, session: str, ids: Ids, span: ReturnSpan, now: float) -> SimulatedProgress:
        progress = self.advance(now)
        up_s = len(ids) * self.block_tokens / self.below.tokens_per_s
        if is_long_enough(span.soonest_s, up_s + LEAD_S, up_s):
            self.paused_total += 1
            up_at = now + span.soonest_s - SURE * up_s - LEAD_S
            self._book.begin(session, Paused(ids, up_at, now + max(span.latest_s, span.soonest_s)))
            self.cache.rest_first(self._own(ids))
        return progress

    def rates(self) -> Rates:
        rates = super().rates()
        by_tier = {Tier.HOST.value: self.below.tokens_per_s * self.speed.token_bytes}
        return Rates(rates.prefill_tokens_per_s, rates.decode_steps_per_s, rates.decode_tokens_per_s, by_tier)

    @property
    def running(self) -> int:
        return super().running + len(self._aside)

    @property
    def _aside(self) -> list[SimulatedJob]:
        return [*self._ready, *(restore.job for _, _, restore in self._restores if restore.job is not None)]

    def abandon(self) -> list[tuple[SimulatedJob, int]]:
        jobs = [(job, job.generated) for job in self._aside]
        self._restores, self._ready, self._book = [], deque(), PauseBook()
        return [*jobs, *super().abandon()]

    @property
    def _beside_at(self) -> float:
        return min(self._book.next_at, self._restores[0][0] if self._restores else math.inf)

    def _happen_beside(self, progress: SimulatedProgress) -> None:
        while self._restores and self._restores[0][0] <= self.now:
            self._end(heapq.heappop(self._restores)[2], progress)
        for _, pause, is_over in self._book.due(self.now):
            if is_over:
                self.given_back_blocks += pause.brought
                self.cache.rest_first(self._own(pause.chain))
            else:
                self._bring_up(pause, progress)

    def _own(self, ids: Ids) -> Ids:
        """The end of a chain that is one conversation's alone."""
        first = next((at for at in reversed(range(len(ids))) if ids[at] in self.shared), -1)
        return ids[first + 1 :]

    def _bring_up(self, pause: Paused[Ids], progress: SimulatedProgress) -> None:
        cache, ids = self.cache, pause.chain
        pause.start = cache.match(ids)
        room = min(
            cache.blocks - cache.held - int(LEFT_SHARE * cache.blocks),
            int(UP_SHARE * cache.blocks) - self._book.brought,
        )
        end = min(self.host.match(ids), pause.start + max(room, 0))
        pause.brought = max(end - pause.start, 0)
        self._restore(SimulatedRestore(ids[: max(end, pause.start)], pause.brought, self.now, pause=pause), progress)

    def _restore(self, restore: SimulatedRestore, progress: SimulatedProgress) -> list[int]:
        """Returns the blocks that the device lacked."""
        seconds = restore.count * self.block_tokens / self.below.tokens_per_s
        self._link_free_at = max(self._link_free_at, self.now) + seconds
        new, gone = self.cache.hold(restore.ids if restore.job is None else restore.job.arrival.ids)
        self._waiting.on_changed((*new, *gone))
        progress.change(True, gone)
        coming = restore.ids[len(restore.ids) - restore.count :]
        ends = max((self._arriving.get(block, self.now) for block in restore.ids), default=self.now)
        ends = max(ends, self._link_free_at) if coming else ends
        self._arriving.update(dict.fromkeys(coming, ends))
        self._number += 1
        heapq.heappush(self._restores, (ends, self._number, restore))
        return new

    def _end(self, restore: SimulatedRestore, progress: SimulatedProgress) -> None:
        coming = restore.ids[len(restore.ids) - restore.count :]
        for block in coming:
            self._arriving.pop(block, None)
        progress.change(False, list(coming))
        if restore.job is not None:
            self._ready.append(restore.job)
        elif restore.pause is not None:
            restore.pause.seconds = self.now - restore.began
            self.brought_blocks += restore.count
            gone = self.cache.let_go(restore.ids)
            progress.change(True, gone)
            self._waiting.on_changed(gone)

    def _left(self, job: SimulatedJob, progress: SimulatedProgress) -> None:
        new, gone = self.host.hold(job.arrival.ids)
        gone += self.host.let_go(job.arrival.ids)
        progress.change(False, new, Tier.HOST.number)
        progress.change(True, gone, Tier.HOST.number)

    def _admit(self, progress: SimulatedProgress) -> bool:
        changed = False
        while self._waiting and self.running < self.speed.slots and self.cache.fits(self._waiting.first.arrival.ids):
            job = self._waiting.first
            ids = job.arrival.ids
            depth = self.cache.match(ids)
            below = max(self.host.match(ids) - depth, 0)
            is_quicker = SURE * below / self.below.tokens_per_s < below / self.speed.prefill_tokens_per_s
            below = below if is_quicker else 0
            if not below and not any(block in self._arriving for block in ids[:depth]):
                break
            self._waiting.popleft()
            self._is_back(job, depth)
            job.restored_tokens = below * self.block_tokens
            job.cached_tokens = min((depth + below) * self.block_tokens, job.tokens - 1)
            self.restored_tokens += job.restored_tokens
            job.left = float(job.tokens - job.cached_tokens)
            restore = SimulatedRestore(ids[: depth + below], below, self.now, job)
            job.new = self._restore(restore, progress)[below:]
            changed = True
        if self._ready and self._prefilling is None:
            self._prefilling = self._ready.popleft()
            progress.started.append(self._prefilling)
            return True
        if self._waiting:
            first = self._waiting.first
            depth = self.cache.match(first.arrival.ids)
            if super()._admit(progress):
                self._is_back(first, depth)
                return True
        return changed

    def _is_back(self, job: SimulatedJob, depth: int) -> None:
        if (pause := self._book.back(job.arrival.session)) is not None:
            self.saved_s += pause.saved_s(depth)
