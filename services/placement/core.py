"""Placement's brain: `handle(event, now) -> actions`. Pure; the loop carries the actions out.

Owns the fleet as decisions see it, the bookings, and the requests of bare producers. Time is the caller's monotonic
seconds and never goes back; chance is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

from kvproto.errors import KvfleetError
from kvproto.messages import PlacementStats
from services.placement.actions import Action, Answer, DropMember, Fail, PingWorker, failed_frame
from services.placement.bookings import Bookings
from services.placement.decider import Decider
from services.placement.events import (
    Event,
    GenerateAsked,
    HeartbeatHeard,
    NobodyListens,
    PingUnanswered,
    PlaceAsked,
    Tick,
    WorkerAnswered,
    WorkerDisconnected,
    WorkerJoined,
    WorkerLeft,
    WorkerNewEpoch,
    WorkerUpdated,
)
from services.placement.fleet import Fleet
from services.placement.forwarding import Forwarding
from services.placement.policies import DEFAULT_POLICY, build_policies

MAX_FORWARDED = 65_536  # requests of bare producers watched at a time
SILENCE_LIMIT_S = 3.0  # no heartbeat, no record, no answer: dead, though its connection may stand


class PlacementCore:
    """Owned by one loop. Raises InvalidRequest if `policy` is none of the known names."""

    def __init__(
        self,
        placement: str,
        inbox_prefix: str,
        chance: Callable[[], float],
        *,
        policy: str = DEFAULT_POLICY,
        max_forwarded: int = MAX_FORWARDED,
    ) -> None:
        self.placement = placement
        self.fleet = Fleet()
        self.bookings = Bookings()
        self.decider = Decider(placement, self.fleet, self.bookings, build_policies(chance), policy)
        self.forwarding = Forwarding(
            placement, inbox_prefix, self.fleet, self.bookings, self.decider, limit=max_forwarded
        )

    def handle(self, event: Event, now: float) -> list[Action]:
        match event:
            case PlaceAsked():
                return [self._place(event, now)]
            case GenerateAsked():
                return self.forwarding.ask(event, now)
            case WorkerAnswered(frame):
                return self.forwarding.on_frame(frame, now)
            case NobodyListens(request, attempt):
                return self.forwarding.on_nobody_listens(request, attempt, now)
            case HeartbeatHeard(beat):
                if self.fleet.beat(beat, now):
                    self.bookings.reflect(beat.worker, now)
                return []
            case Tick():
                self.fleet.build_rings()
                self.bookings.expire(now)
                return [*self._ping_silent(now), *self.forwarding.tick(now)]
            case WorkerJoined(record, heartbeat):
                self.fleet.join(record, heartbeat, now)
                return self.forwarding.on_joined(record.id, record.epoch, now)
            case WorkerUpdated(record):
                self.fleet.update(record, now)
                return []
            case WorkerNewEpoch(record):
                self.bookings.drop_worker(record.id)
                self.fleet.join(record, None, now)
                self.forwarding.on_new_epoch(record.id, record.epoch, now)
                return []
            case WorkerLeft(worker):
                self.fleet.leave(worker)
                self.bookings.drop_worker(worker)
                return self.forwarding.on_left(worker, now)
            case WorkerDisconnected(worker):
                return [PingWorker(worker)] if worker in self.fleet.workers else []
            case PingUnanswered(worker, nobody_listens):
                known = self.fleet.workers.get(worker)
                if known is None or not (nobody_listens or now - known.heard_at >= SILENCE_LIMIT_S):
                    return []
                self.forwarding.suspect(worker, now)
                return [DropMember(worker)]

    def _place(self, event: PlaceAsked, now: float) -> Action:
        try:
            return Answer(event.reply, self.decider.decide(event.tenant, event.ask, now))
        except KvfleetError as error:
            return Fail(event.reply, failed_frame(error, event.ask.request, event.ask.attempt))

    def _ping_silent(self, now: float) -> list[Action]:
        """Ask whoever is silent instead of waiting for the members view to give up on it."""
        return [PingWorker(w.id) for w in self.fleet.workers.values() if self.fleet.claim_ping(w, now)]

    def wake_at(self) -> float | None:
        """When a Tick is needed at the latest to keep the promises made; None: no hurry."""
        return self.forwarding.wake_at()

    def stats(self) -> PlacementStats:
        return PlacementStats(
            placement=self.placement,
            policy=self.decider.default,
            workers=tuple(sorted(self.fleet.workers)),
            decisions_total=self.decider.decisions_total,
            no_worker_total=self.decider.no_worker_total,
            forwarded_total=self.forwarding.forwarded_total,
            booked=len(self.bookings),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError."""
        self.fleet.check_integrity()
        self.bookings.check_integrity()
        self.forwarding.check_integrity()
        for worker in self.fleet.workers.values():
            assert self.decider.load_of(worker) >= worker.requests >= 0
