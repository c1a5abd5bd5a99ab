"""Placement's brain: `handle(event, now) -> actions`. Pure; the loop carries the actions out.

Owns the fleet, its load and bookings, the prefix index, the ledger, and the requests of bare producers. Time is the
caller's monotonic seconds and never goes back; chance is passed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvfleet.placement import events
from kvfleet.placement.advice.autoscaler import Autoscaler
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.decide.decider import CANNOT_SERVE, Decider
from kvfleet.placement.decide.region_summaries import RegionSummaries
from kvfleet.placement.decide.repeats import Repeats
from kvfleet.placement.decide.state import PlacementState
from kvfleet.placement.events import (
    Action,
    Answer,
    AnswerOtherRegion,
    DropMember,
    Fail,
    PassOn,
    PingWorker,
    TakenOver,
    failed_frame,
)
from kvfleet.placement.index.kv_indexer import Follows, KvIndexer
from kvfleet.placement.policies import Policy, build_policies
from kvfleet.placement.producers.forwarding import Forwarding
from kvfleet.placement.producers.in_flight import RequestsInFlight
from kvfleet.placement.record.ledger import Ledger, kept_in_all
from kvfleet.placement.workers.bookings import Bookings
from kvfleet.placement.workers.expected_returns import ExpectedReturns
from kvfleet.placement.workers.fleet import Fleet
from kvfleet.placement.workers.inflight_blocks import MAX_WORKERS, InflightBlocks
from kvfleet.placement.workers.prompts import PromptHasher
from kvfleet.placement.workers.workloads import Workloads
from kvproto.errors import KvfleetError
from kvproto.messages import (
    BookedBatch,
    Heartbeat,
    Milestones,
    Passed,
    Placement,
    PlacementStats,
    State,
    Watches,
)

SILENCE_LIMIT_S = 3.0  # no heartbeat, no record, no answer: dead, though its connection may stand


class PlacementCore:
    """`chance()` is uniform in [0, 1), `policies` replaces the known ones. Raises InvalidRequest if the configured
    policy is none of their names."""

    def __init__(
        self,
        placement: str,
        inbox_prefix: str,
        chance: Callable[[], float],
        config: PlacementConfig = PlacementConfig(),
        *,
        prompts: PromptHasher,
        unix_ms: Callable[[], int],
        policies: Mapping[str, Policy] | None = None,
    ) -> None:
        self.placement = placement
        self.undrained_total = 0  # workers that left without having drained
        self._shares = config.shares
        self.workloads = Workloads()
        self.fleet = Fleet(self.workloads)
        self.vaults: dict[str, str] = {}  # living ones: id -> epoch
        self.bookings = Bookings(self.workloads, limits=config.phantoms)
        self.indexer = KvIndexer(config.index_blocks, config.max_workers)
        self.inflight = InflightBlocks(max_workers=max(MAX_WORKERS, config.max_workers))
        self.ledger = Ledger(kept_in_all=kept_in_all(config.max_workers), keeps_hashes=config.keeps_hashes)
        self.repeats = Repeats()
        self.region_summaries = RegionSummaries(config.region, config.spill_wait_s)
        self.returns = ExpectedReturns()
        self.state = PlacementState(
            placement, self.fleet, self.bookings, self.indexer, self.inflight, self.ledger, self.repeats,
            self.region_summaries, self.returns,
        )  # fmt: skip
        self.decider = Decider(self.state, prompts, unix_ms, policies or build_policies(chance), config.policy)
        self.autoscaler = Autoscaler(self.fleet, config.rules, config.models, by_ordinal=config.by_ordinal)
        self.in_flight = RequestsInFlight(inbox_prefix, self.fleet, self.state.give_up)
        self.forwarding = Forwarding(self.state, self.in_flight, self.decider, config)

    def handle(self, event: events.Event, now: float) -> list[Action]:
        self.workloads.now = max(self.workloads.now, now)
        actions = self._handle(event, now)
        booked = self.decider.take_booked()
        for one in booked:
            if (worker := self.fleet.workers.get(one.worker)) is not None:
                self.repeats.place((one.tenant, one.request), worker.id, worker.epoch, one.attempt, now)
        refused = self.decider.refused.take()
        self.autoscaler.refuse(refused, now)
        referred = self.region_summaries.take_new()
        if (booked or refused or referred) and self._shares:
            actions.append(BookedBatch(self.placement, booked, refused, referred))
        return actions

    def _handle(self, event: events.Event, now: float) -> list[Action]:
        match event:
            case events.PlaceAsked():
                return [self._place(event, now)]
            case events.GenerateAsked():
                passed_on = None if event.from_other_region else self._pass_on(event, now)
                return [passed_on] if passed_on is not None else self.forwarding.ask(event, now)
            case events.WorkerAnswered(frame, reader):
                return self.forwarding.on_frame(reader or frame.request, frame, now)
            case events.NobodyListens(reader, attempt):
                return self.forwarding.on_nobody_listens(reader, attempt, now)
            case events.CapsuleHeard(reply, capsule):
                return self.forwarding.carry_on(capsule, reply, now)
            case events.WatchesHeard(watches, reply):
                return [*([TakenOver(reply)] if reply else []), *self._adopt(watches, now)]
            case Milestones():
                return self._hear(event, now)
            case Heartbeat() as beat:
                self.in_flight.on_beat(beat.worker, beat.epoch, now)
                if self.fleet.beat(beat, now):
                    for key in self.bookings.reflect(self.fleet.workers[beat.worker].column, beat, now):
                        self.inflight.break_off(key)
                    self.indexer.on_heartbeat(beat, now)
                elif self.vaults.get(beat.worker) == beat.epoch:
                    self.indexer.on_heartbeat(beat, now, vault=True)
                return []
            case BookedBatch() as batch:
                self.state.book(batch, now)
                if batch.placement != self.placement:
                    self.autoscaler.refuse(batch.refused, now)
                    for one in batch.abroad:
                        self.region_summaries.learn(one, now)
                return []
            case events.ReturnHeard(worker, said):
                if worker in self.fleet.workers:
                    self.returns.expect(worker, said, now)
                return []
            case events.Tick(disconnected):
                return self._tick(now, disconnected=disconnected)
            case events.WorkerRegistered(record, heartbeat):
                before = self.fleet.workers.get(record.id)
                if not self.fleet.register(record, heartbeat, now):
                    return []
                self._forget(record.id)
                self.vaults.pop(record.id, None)  # a worker has that name now
                self.indexer.join(record.id, record.epoch)
                if before is None:
                    return self.in_flight.on_joined(record.id, record.epoch, now)
                if before.epoch != record.epoch:
                    self.in_flight.on_new_epoch(record.id, record.epoch, now)
                return []
            case events.WorkerLeft(worker):
                known = self.fleet.workers.get(worker)
                self.undrained_total += known is not None and known.state is not State.DRAINING
                self._forget(worker)
                self.fleet.leave(worker)
                self.indexer.leave(worker)
                return self.forwarding.on_left(worker, known.heard_at if known is not None else now, now)
            case events.WorkerDisconnected(worker):
                return [PingWorker(worker)] if worker in self.fleet.workers else []
            case events.PingUnanswered(worker, nobody_listens):
                known = self.fleet.workers.get(worker)
                if known is None or not (nobody_listens or now - known.heard_at >= SILENCE_LIMIT_S):
                    return []
                self.in_flight.suspect(worker, known.heard_at, now)
                return [DropMember(worker)]

    def _tick(self, now: float, *, disconnected: bool) -> list[Action]:
        self.fleet.build_rings()
        self.autoscaler.tick(now)
        for key in self.bookings.expire(now):
            self.inflight.break_off(key)
        self.inflight.tick(now)
        self.repeats.tick(now)
        self.returns.tick(now)
        self.region_summaries.tick(now)
        self.state.heal(now)
        # The members view takes longer to give up on silent workers.
        pings = [PingWorker(one.id) for one in self.fleet.workers.values() if self.fleet.claim_ping(one, now)]
        return [*self.indexer.tick(now), *pings, *self.forwarding.tick(now, disconnected=disconnected)]

    def join_vault(self, vault: str, epoch: str) -> None:
        """A repetition for the same `epoch` changes nothing."""
        if vault not in self.fleet.workers:  # block events name their author by its id alone
            self.vaults[vault] = epoch
            self.indexer.join(vault, epoch, vault=True)

    def leave_vault(self, vault: str) -> None:
        if self.vaults.pop(vault, None) is not None:
            self.indexer.leave(vault)

    def _forget(self, worker: str) -> None:
        """Drop what a former life of the worker was given."""
        self.bookings.drop_worker(worker)
        self.inflight.drop_worker(worker)
        self.repeats.drop_worker(worker)
        self.returns.drop_worker(worker)

    def _place(self, event: events.PlaceAsked, now: float) -> Action:
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
        is_own = not event.from_other_region
        if not is_own and ask.seeks_source:
            return AnswerOtherRegion(event.reply, self.decider.source_of(event.tenant, ask))
        if is_own and (referral := self.decider.refer(event.tenant, ask, now)) is not None:
            return AnswerOtherRegion(event.reply, referral)
        try:
            placement = self.decider.decide(event.tenant, ask, now, pairs=is_own)
        except KvfleetError as error:
            refused = is_own and isinstance(error, CANNOT_SERVE)
            if refused and (referral := self.decider.refer(event.tenant, ask, now, refused=True)) is not None:
                return AnswerOtherRegion(event.reply, referral)
            return Fail(event.reply, failed_frame(error, ask.request, ask.attempt))
        return Answer(event.reply, placement if is_own else replace(placement, elsewhere=""))

    def _pass_on(self, event: events.GenerateAsked, now: float) -> Action | None:
        """Of a request that another region can serve sooner."""
        model = event.ask.model or self.fleet.name_of(event.model_token) or event.model_token
        if self.repeats.find((event.tenant, event.request)) is not None:
            return None
        region = self.decider.region_for(event, model, self.forwarding.max_wait_of(event.ask), now)
        return None if region is None else PassOn(region, model, event)

    def _hear(self, milestones: Milestones, now: float) -> list[Action]:
        worker = self.fleet.workers.get(milestones.worker)
        if worker is None or worker.epoch != milestones.epoch:
            return []
        milestones = worker.milestones.new_of(milestones)
        actions: list[Action] = []
        for one in milestones.items:
            if one.passed is Passed.ENDED:
                actions += self.in_flight.on_ended(worker.id, one)
            elif one.passed is not Passed.ACCEPTED:
                actions += self.forwarding.on_started(worker.id, one)
        return actions + self.state.hear(milestones, now)

    def _adopt(self, watches: Watches, now: float) -> list[Action]:
        actions: list[Action] = []
        for one in watches.items:
            # In any other case the producer may not know of an end: the worker is asked.
            if not self.repeats.has_finished((one.tenant, one.request), one.attempt):
                actions += self.forwarding.adopt(one, now)
        return actions

    def followers(self) -> dict[Follows, int]:
        counts = Counter(map(self.indexer.state_of, list(self.fleet.workers)))
        return {state: counts[state] for state in Follows}

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
            paused=len(self.returns),
            saved_s_total=self.ledger.saved_s_total,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self.fleet.check_integrity()
        self.workloads.check_integrity()
        self.bookings.check_integrity()
        self.inflight.check_integrity()
        self.repeats.check_integrity()
        self.returns.check_integrity()
        self.ledger.check_integrity()
        self.in_flight.check_integrity()
        self.decider.heat.check_integrity()
        self.region_summaries.check_integrity()
        assert not self.vaults.keys() & self.fleet.workers.keys()
