"""Placement's brain: `handle(event, now) -> actions`. Pure; the loop carries the actions out.

Owns the fleet as decisions see it, its load and the bookings, the prefix index, the ledger, and the requests of bare
producers. Time is the caller's monotonic seconds and never goes back; chance is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kvfleet.placement.actions import (
    Action,
    Answer,
    AnswerAbroad,
    DropMember,
    Explain,
    Fail,
    PassOn,
    PingWorker,
    ShareBookings,
    TakenOver,
    failed_frame,
)
from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.advice.autoscaler import Autoscaler
from kvfleet.placement.advice.preload import Preload
from kvfleet.placement.advice.victim import Survey
from kvfleet.placement.decide.accounts import Accounts
from kvfleet.placement.decide.between_regions import CANNOT_SERVE, BetweenRegions
from kvfleet.placement.decide.decider import Decider
from kvfleet.placement.decide.region_summaries import RegionSummaries
from kvfleet.placement.decide.repeats import Repeats
from kvfleet.placement.events import (
    BlocksChanged,
    BookingsShared,
    CapsuleHeard,
    Event,
    ExplainAsked,
    GenerateAsked,
    HeartbeatHeard,
    MilestonesHeard,
    NobodyListens,
    PingUnanswered,
    PlaceAsked,
    RegionHeard,
    SnapshotHeard,
    SnapshotRefused,
    Tick,
    VaultJoined,
    VaultLeft,
    WatchesHeard,
    WorkerAnswered,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerNewEpoch,
    WorkerUpdated,
)
from kvfleet.placement.index.follower import Follows
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.policies import DEFAULT_POLICY, Policy, build_policies
from kvfleet.placement.producers.forwarding import Forwarding
from kvfleet.placement.record.ledger import Ledger, kept_in_all
from kvfleet.placement.record.metrics_aggregator import MetricsAggregator
from kvfleet.placement.workers.bookings import Bookings, PhantomLimits
from kvfleet.placement.workers.feedback import Feedback
from kvfleet.placement.workers.fleet import Fleet
from kvfleet.placement.workers.inflight_blocks import MAX_WORKERS, InflightBlocks
from kvfleet.placement.workers.prompts import PromptHasher
from kvfleet.placement.workers.workloads import Workloads
from kvproto.errors import KvfleetError
from kvproto.messages import (
    Milestones,
    Passed,
    Placement,
    PlacementStats,
    PreloadRequest,
    State,
    Watches,
    WorkerRecord,
)

MAX_FORWARDED = 65_536  # requests of bare producers watched at a time
SILENCE_LIMIT_S = 3.0  # no heartbeat, no record, no answer: dead, though its connection may stand


class PlacementCore:
    """Owned by one loop. Raises InvalidRequest if `policy` is none of the known names.

    `unix_ms` tells the time that people read. `policies` replaces the known ones. `shares`: other replicas
    are told of bookings. `keeps_hashes`: ended decisions come back as Records. `max_wait_s`: how long a producer's
    request that states no deadline may have to wait; `max_producer_priority`: the highest priority it has.
    `phantoms`: how much counts of what no worker has accepted. `rules`, `models` and `by_ordinal` are the autoscaler's.
    """

    def __init__(
        self,
        placement: str,
        inbox_prefix: str,
        chance: Callable[[], float],
        *,
        prompts: PromptHasher,
        unix_ms: Callable[[], int],
        policy: str = DEFAULT_POLICY,
        policies: Mapping[str, Policy] | None = None,
        indexer: KvIndexer | None = None,
        max_forwarded: int = MAX_FORWARDED,
        shares: bool = True,
        keeps_hashes: bool = False,
        max_wait_s: float | None = None,
        max_producer_priority: int = 0,
        phantoms: PhantomLimits = PhantomLimits(),
        region_summaries: RegionSummaries | None = None,
        rules: Rules | None = None,
        models: Iterable[str] = (),
        by_ordinal: bool = False,
    ) -> None:
        self.placement = placement
        self.region_summaries = region_summaries or RegionSummaries()
        self.undrained_total = 0  # workers that left without having drained
        self._shares = shares
        self.workloads = Workloads()
        self.fleet = Fleet(self.workloads)
        self.vaults: dict[str, str] = {}  # living ones: id -> epoch
        self.bookings = Bookings(self.workloads, limits=phantoms)
        self.indexer = indexer or KvIndexer()
        self.inflight = InflightBlocks(max_workers=max(MAX_WORKERS, self.indexer.max_workers))
        self.feedback = Feedback()
        self.metrics = MetricsAggregator(self.bookings.requests_at)
        self.ledger = Ledger(kept_in_all=kept_in_all(self.indexer.max_workers), keeps_hashes=keeps_hashes)
        self.repeats = Repeats()
        self.accounts = Accounts(
            placement, self.fleet, self.bookings, self.inflight, self.feedback, self.ledger, self.repeats
        )
        self.decider = Decider(
            placement,
            self.fleet,
            self.bookings,
            self.indexer,
            self.inflight,
            prompts,
            self.ledger,
            unix_ms,
            policies or build_policies(chance),
            policy,
            self.region_summaries,
        )
        self.abroad = BetweenRegions(self.region_summaries, self.decider, placement)
        self.autoscaler = Autoscaler(self.fleet, rules, models, by_ordinal=by_ordinal)
        self.decider.leaving = self.autoscaler.leaving
        self.forwarding = Forwarding(
            placement,
            inbox_prefix,
            self.fleet,
            self.accounts.give_up,
            self.decider,
            self.repeats,
            limit=max_forwarded,
            max_wait_s=max_wait_s,
            max_priority=max_producer_priority,
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        self.workloads.now = max(self.workloads.now, now)
        actions = self._handle(event, now)
        booked = self.decider.take_booked()
        for one in booked:
            if (worker := self.fleet.workers.get(one.worker)) is not None:
                self.repeats.place((one.tenant, one.request), worker.id, worker.epoch, one.attempt, now)
        refused = self.decider.take_refused()
        self.autoscaler.refuse(refused, now)
        abroad = self.region_summaries.take_new()
        if (booked or refused or abroad) and self._shares:
            actions.append(ShareBookings(booked, refused, abroad))
        return actions

    def _handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case PlaceAsked():
                return [self._place(event, now)]
            case GenerateAsked():
                passed_on = None if event.abroad else self._pass_on(event, now)
                return [passed_on] if passed_on is not None else self.forwarding.ask(event, now)
            case RegionHeard(summary):
                self.region_summaries.hear(summary, now)
                return []
            case WorkerAnswered(frame, reader):
                return self.forwarding.on_frame(reader or frame.request, frame, now)
            case NobodyListens(reader, attempt):
                return self.forwarding.on_nobody_listens(reader, attempt, now)
            case CapsuleHeard(reply, capsule):
                return self.forwarding.carry_on(capsule, reply, now)
            case WatchesHeard(watches, reply):
                return [*([TakenOver(reply)] if reply else []), *self._adopt(watches, now)]
            case BlocksChanged(worker, changes):
                self.indexer.on_changes(worker, changes, now)
                return []
            case MilestonesHeard(milestones):
                return self._hear(milestones, now)
            case HeartbeatHeard(beat):
                self.forwarding.watching.on_beat(beat.worker, beat.epoch, now)
                if self.fleet.beat(beat, now):
                    for key in self.bookings.reflect(self.fleet.workers[beat.worker].column, beat, now):
                        self.inflight.break_off(key)
                    self.indexer.on_heartbeat(beat, now)
                    self.metrics.on_heartbeat(beat, now)
                    self.autoscaler.hear(beat, now)
                elif self.vaults.get(beat.worker) == beat.epoch:
                    self.indexer.on_heartbeat(beat, now, vault=True)
                return []
            case BookingsShared(batch):
                self.accounts.book(batch, now)
                if batch.placement != self.placement:
                    self.autoscaler.refuse(batch.refused, now)
                    for one in batch.abroad:
                        self.region_summaries.learn(one, now)
                return []
            case SnapshotHeard(worker, part, pull):
                self.indexer.on_snapshot(worker, part, now, pull)
                return []
            case SnapshotRefused(worker, pull):
                self.indexer.on_snapshot_refused(worker, pull, now)
                return []
            case ExplainAsked(reply, request, tenant):
                return [Explain(reply, self.ledger.explain(request, tenant))]
            case Tick(deaf):
                return self._tick(now, deaf=deaf)
            case WorkerJoined(record, heartbeat):
                self._forget(record.id)
                self.fleet.join(record, heartbeat, now)
                self._follow(record)
                return self.forwarding.watching.on_joined(record.id, record.epoch, now)
            case WorkerUpdated(record):
                if self.fleet.update(record, now):
                    self._forget(record.id)
                    self._follow(record)
                return []
            case WorkerNewEpoch(record):
                self._forget(record.id)
                self.fleet.join(record, None, now)
                self._follow(record)
                self.forwarding.watching.on_new_epoch(record.id, record.epoch, now)
                return []
            case WorkerLeft(worker):
                known = self.fleet.workers.get(worker)
                self.undrained_total += known is not None and known.state is not State.DRAINING
                self._forget(worker)
                self.fleet.leave(worker)
                self.indexer.leave(worker)
                return self.forwarding.on_left(worker, known.heard_at if known is not None else now, now)
            case VaultJoined(vault, epoch):
                if vault not in self.fleet.workers:  # events name their author by its id alone
                    self.vaults[vault] = epoch
                    self.indexer.join(vault, epoch, vault=True)
                return []
            case VaultLeft(vault):
                if self.vaults.pop(vault, None) is not None:
                    self.indexer.leave(vault)
                return []
            case WorkerDisconnected(worker):
                return [PingWorker(worker)] if worker in self.fleet.workers else []
            case PingUnanswered(worker, nobody_listens):
                known = self.fleet.workers.get(worker)
                if known is None or not (nobody_listens or now - known.heard_at >= SILENCE_LIMIT_S):
                    return []
                self.forwarding.watching.suspect(worker, known.heard_at, now)
                return [DropMember(worker)]

    def _tick(self, now: float, *, deaf: bool) -> list[Action]:
        self.fleet.build_rings()
        self.autoscaler.tick(now)
        for key in self.bookings.expire(now):
            self.inflight.break_off(key)
        self.inflight.tick(now)
        self.repeats.tick(now)
        self.region_summaries.tick(now)
        for worker, credit in self.feedback.tick(now).items():
            self.accounts.trust(worker, credit)
        return [*self.indexer.tick(now), *self._ping_silent(now), *self.forwarding.tick(now, deaf=deaf)]

    def _follow(self, record: WorkerRecord) -> None:
        self.vaults.pop(record.id, None)  # of that name there is a worker now
        self.indexer.join(record.id, record.epoch)

    def _forget(self, worker: str) -> None:
        """What a former life of the worker was given, and what was thought of it."""
        self.bookings.drop_worker(worker)
        self.inflight.drop_worker(worker)
        self.repeats.drop_worker(worker)
        self.feedback.forget(worker)
        self.metrics.leave(worker)
        self.autoscaler.leave(worker)

    # ------------------------------------------------------------------ requests

    def _place(self, event: PlaceAsked, now: float) -> Action:
        ask = event.ask
        if ask.attempt:  # it was let in before
            ask = replace(ask, max_wait_s=None)
        known = self.repeats.find((event.tenant, ask.request))
        if known is not None and ask.attempt <= known.attempt:
            if known.is_there and known.worker not in ask.excluded and self.fleet.attaches(known.worker):
                why = "it has the request already"
                there = Placement(ask.request, known.worker, known.attempt, why=why, placement=self.placement)
                return Answer(event.reply, replace(there, attached=True))
            ask = replace(ask, attempt=known.attempt + 1)
        if event.abroad and ask.seeks_source:
            return AnswerAbroad(event.reply, self.abroad.source_of(event.tenant, ask))
        if not event.abroad and (referral := self.abroad.refer(event.tenant, ask, now)) is not None:
            return AnswerAbroad(event.reply, referral)
        try:
            placement = self.decider.decide(event.tenant, ask, now)
        except KvfleetError as error:
            refused = not event.abroad and isinstance(error, CANNOT_SERVE)
            if refused and (referral := self.abroad.refer(event.tenant, ask, now, refused=True)) is not None:
                return AnswerAbroad(event.reply, referral)
            return Fail(event.reply, failed_frame(error, ask.request, ask.attempt))
        return Answer(event.reply, replace(placement, elsewhere="") if event.abroad else placement)

    def _pass_on(self, event: GenerateAsked, now: float) -> Action | None:
        """A bare producer's request that nobody here can serve soon, and another region can."""
        model = event.ask.model or self.fleet.name_of(event.model_token) or event.model_token
        if self.repeats.find((event.tenant, event.request)) is not None:
            return None
        region = self.abroad.region_for(event, model, self.forwarding.max_wait_of(event.ask), now)
        return None if region is None else PassOn(region, model, event)

    def _hear(self, milestones: Milestones, now: float) -> list[Action]:
        worker = self.fleet.workers.get(milestones.worker)
        if worker is None or worker.epoch != milestones.epoch:
            return []
        milestones = worker.milestones.new_of(milestones)
        actions: list[Action] = []
        for one in milestones.items:
            if one.passed is Passed.ENDED:
                keys = self.forwarding.keys_of(one.request)
                actions += self.forwarding.watching.on_ended(worker.id, one, keys)
            elif one.passed is not Passed.ACCEPTED:
                actions += self.forwarding.on_started(worker.id, one)
        return actions + self.accounts.hear(milestones, now)

    def _adopt(self, watches: Watches, now: float) -> list[Action]:
        actions: list[Action] = []
        for one in watches.items:
            # Of any other end its worker is asked: nobody may have told the producer.
            if not self.repeats.has_finished((one.tenant, one.request), one.attempt):
                actions += self.forwarding.adopt(one, now)
        return actions

    def _ping_silent(self, now: float) -> list[Action]:
        """Ask silent workers instead of waiting for the members view to give up on them."""
        return [PingWorker(w.id) for w in self.fleet.workers.values() if self.fleet.claim_ping(w, now)]

    # ------------------------------------------------------------------ questions that take longer than a decision may

    def preload(self, ask: PreloadRequest, max_bytes: int, now: float) -> Preload:
        """What a worker about to be ready should have, in a message of about `max_bytes`."""
        hot, workers = self.decider.heat.hottest(now), self.fleet.of_model(ask.model)
        return Preload(ask, hot, workers, self.indexer, self.workloads, max_bytes)

    def survey(self, model: str, now: float) -> Survey:
        """Which of a model's workers is the cheapest to lose."""
        return Survey(model, self.fleet, self.decider.heat.hottest(now), self.indexer, self.workloads)

    def wake_at(self) -> float | None:
        """When a Tick is needed at the latest to keep the promises made; None: no hurry."""
        return self.forwarding.wake_at()

    def followers(self) -> dict[Follows, int]:
        """How many workers' blocks are known how well."""
        counts = dict.fromkeys(Follows, 0)
        for worker in list(self.fleet.workers):
            state = self.indexer.state_of(worker)
            if state is not None:
                counts[state] += 1
        return counts

    def stats(self) -> PlacementStats:
        hits = self.ledger.hits
        return PlacementStats(
            placement=self.placement,
            policy=self.decider.default,
            workers=tuple(sorted(self.fleet.workers)),
            decisions_total=self.decider.decisions_total,
            no_worker_total=self.decider.no_worker_total,
            forwarded_total=self.forwarding.forwarded_total,
            booked=len(self.bookings),
            prompt_tokens_total=hits.prompt_total,
            attained_tokens_total=hits.attained_total,
            attainable_tokens_total=hits.attainable_total,
            lost_tokens_total=hits.lost_total,
            index_blocks=len(self.indexer.index),
            workers_exact=self.followers()[Follows.EXACT],
            models=tuple(self.autoscaler.signals()),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self.fleet.check_integrity()
        self.workloads.check_integrity()
        self.bookings.check_integrity()
        self.inflight.check_integrity()
        self.repeats.check_integrity()
        self.ledger.check_integrity()
        self.forwarding.check_integrity()
        self.decider.heat.check_integrity()
        self.region_summaries.check_integrity()
        assert not self.vaults.keys() & self.fleet.workers.keys()
