"""A fleet in virtual time: the real placement cores, simulated workers, messages between them. No clock, no sockets.

    arrival ─▶ a replica's core ─▶ worker ─▶ block events, milestones, heartbeats ─▶ every replica's core

`Delays` says how long messages take; chance comes from a seed, so a run can be repeated. A request that loses its
worker is placed again, after the tokens it has, as a Client does.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import (
    Answer,
    Event,
    PlaceAsked,
    ReturnHeard,
    Tick,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.index.changes import Changes, HolderChange
from kvfleet.placement.index.prefix_index import Hashes
from kvfleet.placement.policies import Policy, build_policies
from kvfleet.placement.simulate.figures import Outcome, SimulationRun
from kvfleet.placement.simulate.fleet_shape import MODEL, FleetShape, Victim
from kvfleet.placement.simulate.scaling import Scaling
from kvfleet.placement.simulate.sim_cache import SimulatedJob
from kvfleet.placement.simulate.sim_returns import SimulatedReturns, shared_blocks
from kvfleet.placement.simulate.sim_worker import SimulatedProgress, SimWorker
from kvfleet.placement.simulate.tiered_worker import TieredWorker
from kvfleet.placement.simulate.trace import Arrival, Trace
from kvfleet.placement.workers.prompts import AddressSpace
from kvproto.messages import (
    BookedBatch,
    Heartbeat,
    Milestone,
    Milestones,
    Passed,
    PlaceRequest,
    ReturnExpected,
    State,
    WorkerRecord,
)
from kvservice.return_times import ReturnSpan

HEARTBEAT_S = 0.5
TICK_S = 0.5  # of a small fleet; a tick looks at every worker
WORKERS_PER_TICK_S = 500
SCALE_S = 1.0  # between looks of the autoscaler
ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class TracePrompts:
    """A trace has hashes instead of tokens; requests are told apart by their number."""

    arrivals: Sequence[Arrival]

    def tokens(self, ask: PlaceRequest) -> int:
        return self.arrivals[int(ask.request)].prompt_tokens

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes:
        return self.arrivals[int(ask.request)].hashes

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> bytes:
        return b""  # a trace's hashes are made up


@dataclass(eq=False)
class Simulation:
    trace: Trace
    shape: FleetShape
    policy: str
    policies: Callable[[Callable[[], float]], Mapping[str, Policy]] = build_policies
    _now: float = 0.0
    _queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)  # order of what happens at one time
    _workers: dict[str, SimWorker] = field(default_factory=dict)
    _records: dict[str, WorkerRecord] = field(default_factory=dict)  # of all workers that ever joined
    _staying: set[str] = field(default_factory=set)  # workers that do not drain
    _news: dict[str, SimWorker] = field(default_factory=dict)  # workers whose next heartbeat says something new
    _wakes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trace, shape = self.trace, self.shape
        self._random = random.Random(shape.seed)
        self._hash_of = np.zeros((trace.distinct_blocks, 2), dtype=np.uint64)  # of each block number
        for arrival in trace.arrivals:
            self._hash_of[list(arrival.ids)] = arrival.hashes
        self._returns = SimulatedReturns() if shape.below is not None and shape.below.pauses else None
        self._shared = shared_blocks(trace) if shape.below is not None else frozenset()
        self._run = SimulationRun([Outcome(arrival) for arrival in trace.arrivals], {}, {}, [])
        self._left = len(trace.arrivals)
        scale = shape.autoscale
        blocks = max(4096, 2 * shape.workers * shape.cache_blocks)
        config = PlacementConfig(
            policy=self.policy,
            index_blocks=min(blocks, max(4096, trace.distinct_blocks)),
            max_workers=shape.workers + 64,
            rules=scale.rules if scale is not None else Rules(),
            models=(MODEL,),
            by_ordinal=scale is not None and scale.victim is Victim.ORDINAL,
        )
        self.cores = [
            PlacementCore(
                f"p{number}",
                f"_plc.p{number}",
                self._random.random,
                config,
                prompts=TracePrompts(trace.arrivals),
                unix_ms=lambda: int(self._now * 1000),
                policies=self.policies(self._random.random),
            )
            for number in range(shape.replicas)
        ]
        self._scaling = self._run.scaling = Scaling(scale, trace.block_tokens, MODEL) if scale is not None else None

    def run(self) -> SimulationRun:
        for _ in range(self.shape.autoscale.rules.minimum if self.shape.autoscale else self.shape.workers):
            self._join()
        if self._scaling is not None:
            self._at(0.0, partial(self._scale, self._scaling))
        for arrival in self.trace.arrivals:
            self._at(arrival.at_s, partial(self._place, SimulatedJob(arrival)))
        self._at(0.0, self._beat)
        self._at(TICK_S, self._tick)
        if self.shape.churn_s:
            self._at(self.shape.churn_s, self._churn)
        while self._left and self._queue:
            self._now, _, what = heapq.heappop(self._queue)
            what()
        self._run.ended_s = self._now
        return self._run

    def _place(self, job: SimulatedJob, excluded: tuple[str, ...] = (), successor: str = "") -> None:
        if self._returns is not None and not job.attempt:
            self._returns.came(job.arrival, self._now)
        core = self.cores[int(self._random.random() * len(self.cores))]
        ask = PlaceRequest(
            request=str(job.arrival.number),
            model=MODEL,
            session=job.arrival.session,
            attempt=job.attempt,
            excluded=excluded,
            max_tokens=job.output_tokens,
            successor=successor,
        )
        for action in core.handle(PlaceAsked("", "public", ask), self._now):
            if isinstance(action, Answer):
                placement = action.placement
                outcome = self._run.outcomes[job.arrival.number]
                outcome.attempts += 1
                if not job.attempt:
                    outcome.worker = placement.worker
                job.then, job.source = placement.then, placement.source
                self._after(self.shape.delays.place_s, partial(self._submit, placement.worker, job, excluded))
            elif isinstance(action, BookedBatch) and (delay := self.shape.delays.booking_s) is not None:
                self._after(delay, partial(self._to_all, BookedBatch(core.placement, action.items), author=core))

    def _submit(self, name: str, job: SimulatedJob, excluded: tuple[str, ...]) -> None:
        worker = self._workers.get(name)
        if worker is None:  # nobody listens
            self._again(job, (*excluded, name), job.generated)
            return
        source = self._workers.get(job.source) if self.shape.link_bytes_per_s else None
        if source is not None:
            depth = source.cache.match(job.arrival.ids)
            ids, tokens = job.arrival.ids[:depth], depth * self.trace.block_tokens
            tokens -= worker.cache.match(ids) * self.trace.block_tokens
            job.source = ""
            if tokens > 0:
                self._after(self.shape.fetch_s(tokens), partial(self._land, name, job, ids, excluded))
                return
        job.accepted_at = self._now
        self._tell(worker, [self._milestone(job, Passed.ACCEPTED)])
        self._take(worker, worker.submit(job, self._now))

    def _land(self, name: str, job: SimulatedJob, ids: tuple[int, ...], excluded: tuple[str, ...]) -> None:
        """Blocks of another worker have come, and the request can begin with them."""
        if (worker := self._workers.get(name)) is not None:
            self._take(worker, worker.land(ids, self._now))
        self._submit(name, job, excluded)

    def _hand_over(self, worker: SimWorker, job: SimulatedJob) -> None:
        """After its first token it goes on where it was planned to, if that worker is there still."""
        new = job.tokens - job.cached_tokens
        after_s = self.shape.hand_over_s(new, self._now - job.began_at)
        following = SimulatedJob(job.arrival, job.attempt + 1, generated=job.generated + 1, brought=job.tokens)
        full = job.arrival.ids[: job.arrival.prompt_tokens // self.trace.block_tokens]

        def follow() -> None:
            if (successor := self._workers.get(job.then)) is not None:
                self._take(successor, successor.land(full, self._now))
            else:
                following.brought = 0
            self._place(following, (worker.name,), job.then)

        self._run.gaps[round(after_s, 4)] = self._run.gaps.get(round(after_s, 4), 0.0) + 1
        self._after(after_s, follow)

    def _again(self, job: SimulatedJob, excluded: tuple[str, ...], generated: int) -> None:
        if job.attempt + 1 < ATTEMPTS:
            again = SimulatedJob(job.arrival, job.attempt + 1, generated=generated)
            self._after(self.shape.delays.place_s, partial(self._place, again, excluded))
        else:
            self._left -= 1

    def _take(self, worker: SimWorker, progress: SimulatedProgress) -> None:
        """Count what a worker did, tell all replicas, and plan the next look at it."""
        told = []
        for job in progress.started:
            told.append(self._milestone(job, Passed.STARTED))
            outcome = self._run.outcomes[job.arrival.number]
            if outcome.ttft_s is None:  # a later attempt finds its own stream, which is no hit
                outcome.cached_tokens = job.cached_tokens
            self._run.fed_tokens += job.tokens - job.cached_tokens
            if self._scaling is not None:
                self._scaling.computes(job.new)
        for job in progress.first_token:
            told.append(self._milestone(job, Passed.FIRST_TOKEN))
            outcome = self._run.outcomes[job.arrival.number]
            if outcome.ttft_s is None:
                outcome.ttft_s = self._now - job.arrival.at_s
        for job in progress.moved:
            told.append(replace(self._milestone(job, Passed.ENDED), output_tokens=1, code="moved"))
            self._hand_over(worker, job)
        for job in progress.ended:
            told.append(self._milestone(job, Passed.ENDED))
            if self._returns is not None and (span := self._returns.ended(job.arrival, self._now)) is not None:
                self._after(self.shape.delays.milestone_s, partial(self._expect, worker, job.arrival, span))
            self._run.outcomes[job.arrival.number].ended = True
            self._left -= 1
        if told:
            self._tell(worker, told)
        if progress.changes:
            self._publish(worker, progress)
        self._news[worker.name] = worker
        self._wake(worker)

    def _expect(self, worker: SimWorker, arrival: Arrival, span: ReturnSpan) -> None:
        if isinstance(worker, TieredWorker) and worker.name in self._workers:
            self._take(worker, worker.expect(arrival.session, arrival.ids, span, self._now))
            said = ReturnExpected("public", str(arrival.number), 0, arrival.session, *span)
            self._to_all(ReturnHeard(worker.name, said))

    def _wake(self, worker: SimWorker) -> None:
        at = worker.next_at()
        if at is None or self._wakes.get(worker.name, -1.0) == at:
            return
        self._wakes[worker.name] = at
        self._at(at, lambda: self._woken(worker, at))

    def _woken(self, worker: SimWorker, at: float) -> None:
        if self._wakes.get(worker.name) == at and worker.name in self._workers:
            del self._wakes[worker.name]
            self._take(worker, worker.advance(self._now))

    def _milestone(self, job: SimulatedJob, passed: Passed) -> Milestone:
        return Milestone(
            "public",
            str(job.arrival.number),
            job.attempt,
            passed,
            max(self._now - job.accepted_at, 0.0),
            job.tokens if passed is Passed.STARTED else 0,
            _by_tier(job) if passed is Passed.STARTED else {},
            job.output_tokens if passed is Passed.ENDED else 0,
        )

    def _publish(self, worker: SimWorker, progress: SimulatedProgress) -> None:
        worker.event_seq += 1
        changes = [HolderChange(tier, removed, self._hash_of[blocks]) for removed, blocks, tier in progress.changes]
        event = Changes(worker.epoch, worker.event_seq, tuple(changes), 0)
        self._after(self.shape.delays.event_s, partial(self._tell_indexes, worker.name, event))

    def _tell_indexes(self, worker: str, event: Changes) -> None:
        for core in self.cores:
            core.indexer.on_changes(worker, event, self._now)

    def _tell(self, worker: SimWorker, items: list[Milestone]) -> None:
        milestones = Milestones(worker.name, worker.epoch, tuple(items))
        self._after(self.shape.delays.milestone_s, partial(self._to_all, milestones))

    def _to_all(self, event: Event, author: PlacementCore | None = None) -> None:
        for core in self.cores:
            if core is not author:
                core.handle(event, self._now)

    def _beat(self) -> None:
        """Of workers with news: silence of idle ones says nothing in a simulation, but to an autoscaler."""
        news, self._news = self._news, {}
        if self._scaling is not None:
            news = dict(self._workers)
        for worker in news.values():
            if worker.name not in self._workers:
                continue
            self._take(worker, worker.advance(self._now))
            if not worker.running:
                self._news.pop(worker.name, None)
            state = State.READY if worker.name in self._staying else State.DRAINING
            beat = Heartbeat(worker.name, worker.epoch, state, worker.load(), worker.rates(), worker.event_seq)
            self._after(self.shape.delays.heartbeat_s, partial(self._to_all, beat))
        self._after(HEARTBEAT_S, self._beat)

    def _tick(self) -> None:
        self._to_all(Tick())
        self._after(max(TICK_S, self.shape.workers / WORKERS_PER_TICK_S), self._tick)

    def _join(self) -> None:
        number = len(self._records)
        name = f"w{number}"
        worker = self._worker(name)
        worker.gaps, worker.link_bytes_per_s = self._run.gaps, self.shape.link_bytes_per_s
        self._workers[name] = worker
        self._run.prefilled[name] = worker.prefilled
        self._run.lives[name] = self._now, math.inf
        self._staying.add(name)
        record = self._records[name] = self.shape.record(number, worker.epoch, self.trace.block_tokens)
        beat = Heartbeat(name, worker.epoch, State.READY, worker.load(), worker.rates())
        self._to_all(WorkerRegistered(record, beat))
        self._to_all(beat)

    def _worker(self, name: str) -> SimWorker:
        shape = self.shape
        common = name, shape.speed, shape.cache_blocks, self.trace.block_tokens, self._now
        if shape.below is None:
            return SimWorker(*common)
        worker = TieredWorker(*common, below=shape.below, shared=self._shared)
        self._run.tiered.append(worker)
        return worker

    def _scale(self, scaling: Scaling) -> None:
        more, victim = scaling.look(self._staying, self._workers, self.cores, self._now)
        for _ in range(more):
            self._after(scaling.scale.start_s, partial(self._started, scaling))
        if victim is not None:
            self._staying.discard(victim)
            self._to_all(WorkerRegistered(replace(self._records[victim], state=State.DRAINING)))
            self._drain(scaling, victim, self._now + self.shape.drain_s)
        self._after(SCALE_S, partial(self._scale, scaling))

    def _started(self, scaling: Scaling) -> None:
        scaling.starting -= 1
        self._join()

    def _drain(self, scaling: Scaling, name: str, until: float) -> None:
        """The worker goes as soon as it is idle; at `until` its requests go on elsewhere."""
        worker = self._workers[name]
        self._take(worker, worker.advance(self._now))
        if worker.running and self._now < until:
            self._after(SCALE_S, partial(self._drain, scaling, name, until))
            return
        others = [other.cache for other in self._workers.values() if other is not worker]
        scaling.lose(worker.cache, others, self._now)
        self._leave(name)

    def _churn(self) -> None:
        name = self._random.choice(sorted(self._staying))
        self._staying.discard(name)
        self._run.changes.append(self._now)
        self._join()
        if self.shape.drain_s:
            self._to_all(WorkerRegistered(replace(self._records[name], state=State.DRAINING)))
            self._after(self.shape.drain_s, partial(self._leave, name))
        else:
            self._leave(name)
        self._after(self.shape.churn_s, self._churn)

    def _leave(self, name: str) -> None:
        worker = self._workers[name]
        self._take(worker, worker.advance(self._now))
        del self._workers[name]
        self._to_all(WorkerLeft(name))
        self._run.lives[name] = self._run.lives[name][0], self._now
        for job, generated in worker.abandon():
            self._again(job, (name,), generated)

    def _at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._numbers), what))

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(self._now + seconds, what)


def _by_tier(job: SimulatedJob) -> dict[str, int]:
    tiers = {"device": job.cached_tokens - job.restored_tokens, "host": job.restored_tokens}
    return {tier: tokens for tier, tokens in tiers.items() if tokens > 0}
