"""The load of requests on their way to workers, and at them. Pure. Milestones come to every replica.

booked ──accepted──▶ with the worker: its heartbeats count it ──ended, in any way──▶ released
   │
   ├──placed again, refused, offered to another worker──▶ released
   ├──a heartbeat heard more than a period later, and no word of acceptance──▶ dropped: it is in there, or lost
   ├──the worker left or restarted──▶ gone with it
   ├──no word for a second after its client stopped waiting for us, else for 5 s──▶ expired: it was never sent
   └──its tenant has too many of them there──▶ the oldest are released
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, takewhile

from kvfleet.placement.workers.price_kernel import STAY
from kvfleet.placement.workers.workloads import Workloads
from kvproto.messages import Booked, Heartbeat, Milestone, Passed

HEARTBEAT_PERIOD_S = 0.5  # that a heartbeat may lag behind
BOOKING_LIMIT_S = 5.0
WORD_S = 1.0  # from an answer in time to the word that a worker has the request
TRUSTED, CAUGHT_S = 6.0, 60.0
STAY_LIMIT_S = 3600.0  # of an accepted request whose end was never heard
MAX_BOOKED = 65_536  # in each state; beyond, the oldest are taken to be over
EARLY_KEPT = 4096  # attempts with milestones that came before another replica's booking

Key = tuple[str, str]  # tenant, request: tenants cannot release one another's


@dataclass(frozen=True, slots=True)
class PhantomLimits:
    """Of one tenant's requests at one worker that are not accepted; of more, the newest count. Else a client that sends
    nothing would have all others refused. A tenant that sent all of its requests may have `TRUSTED` times the seconds:
    a burst of long prompts is as much for a moment."""

    requests: int = 256
    seconds: float = 10.0  # of prefill, at the rate that the worker measured


@dataclass(slots=True)
class _Share:
    """One tenant's bookings at one worker that are not accepted; oldest first."""

    keys: dict[Key, None] = field(default_factory=dict)
    tokens: float = 0.0


@dataclass(slots=True)
class Booking:
    worker: str
    column: int
    attempt: int
    tokens: float  # to prefill, as expected
    booked_at: float
    priority: int = 0
    accepted: bool = False
    counted: bool = False  # by a heartbeat: what is queued there is the worker's own figure now
    started_at: float | None = None
    prefilled: bool = False


@dataclass(eq=False, slots=True)
class Bookings:
    """Owned by the core; `now` never goes back. The workloads count what is booked."""

    workloads: Workloads
    max_booked: int = MAX_BOOKED
    limits: PhantomLimits = PhantomLimits()
    phantoms_total: int = 0  # released because their tenant had too many
    caught: dict[str, float] = field(default_factory=dict)  # tenants that did not send: not trusted until then
    shares: dict[tuple[str, str], _Share] = field(default_factory=dict)  # by tenant and worker; no empty entries
    expiring: list[tuple[float, int, Key, Booking]] = field(default_factory=list)  # a heap; released ones stay
    numbers: Iterator[int] = field(default_factory=count)
    fresh: dict[Key, Booking] = field(default_factory=dict)  # not accepted yet; oldest first
    accepted: dict[Key, Booking] = field(default_factory=dict)  # oldest acceptance first
    at: dict[str, dict[Key, Booking]] = field(default_factory=dict)  # both, by worker, oldest first; no empty entries
    early: OrderedDict[tuple[Key, str, int], list[tuple[Milestone, float]]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Bookings that no heartbeat counts yet."""
        return len(self.fresh)

    @property
    def running(self) -> int:
        return len(self.accepted)

    def find(self, key: Key) -> Booking | None:
        return self.fresh.get(key) or self.accepted.get(key)

    def requests_at(self, worker: str) -> int:
        """Not accepted yet; a scrape may call it from another thread."""
        return sum(not booking.accepted for booking in list(self.at.get(worker, {}).values()))

    def book(self, one: Booked, column: int, now: float) -> list[Key]:
        """Book one attempt at its worker, whose load is in `column`; an earlier booking of the request is released.
        Returns requests whose bookings had to make room: they are taken to be over."""
        key = one.tenant, one.request
        self.release(key, now)
        booking = Booking(one.worker, column, one.attempt, one.tokens, now, one.priority)
        self.fresh[key] = booking
        self.at.setdefault(one.worker, {})[key] = booking
        share = self.shares.setdefault((one.tenant, one.worker), _Share())
        share.keys[key] = None
        share.tokens += one.tokens
        silent_s = BOOKING_LIMIT_S if one.silent_ms is None else min(one.silent_ms / 1000, BOOKING_LIMIT_S)
        heapq.heappush(self.expiring, (now + silent_s, next(self.numbers), key, booking))
        self.workloads.give(column, one.tokens, now, priority=one.priority)
        for milestone, heard_at in self.early.pop((key, one.worker, one.attempt), ()):
            self.hear(one.worker, milestone, heard_at)  # the worker was quicker than the replica that booked it
        return self._make_room(one.tenant, share, column, now)

    def _make_room(self, tenant: str, share: _Share, column: int, now: float) -> list[Key]:
        gone: list[Key] = []
        if len(share.keys) > 1:
            rate = self.workloads.rate_of(column)
            seconds = self.limits.seconds * (1.0 if tenant in self.caught else TRUSTED)
            most = seconds * rate if rate > 0 else float("inf")
            while len(share.keys) > 1 and (len(share.keys) > self.limits.requests or share.tokens > most):
                gone.append(next(iter(share.keys)))
                self.release(gone[-1], now)
            self.phantoms_total += len(gone)
        if len(self.fresh) > self.max_booked:
            gone.append(next(iter(self.fresh)))
            self.release(gone[-1], now)
        return gone

    def hear(self, worker: str, milestone: Milestone, now: float) -> None:
        """Take a worker's word of a request; it is kept for attempts that are not booked yet."""
        key = milestone.tenant, milestone.request
        booking = self._at_worker(key, worker, milestone.attempt)
        if booking is None:
            self.early.setdefault((key, worker, milestone.attempt), []).append((milestone, now))
            if len(self.early) > EARLY_KEPT:
                self.early.popitem(last=False)
            return
        match milestone.passed:
            case Passed.STARTED if booking.started_at is None:
                tokens = max(milestone.prompt_tokens - sum(milestone.cached.values()), 0)
                more, queued = tokens - booking.tokens, not booking.counted
                self.workloads.correct(booking.column, more, now, queued=queued, priority=booking.priority)
                booking.tokens, booking.started_at = tokens, now
            case Passed.FIRST_TOKEN:
                booking.prefilled = True
            case Passed.ENDED:
                self.release(key, now)

    def release(self, key: Key, now: float | None = None, *, attempt: int | None = None) -> bool:
        """May be called again. `now`: None for the latest known; `attempt`: only this one. Returns whether no later
        attempt is booked."""
        booking = self.find(key)
        if booking is None:
            return True
        if attempt is not None and booking.attempt != attempt:
            return False
        self._drop(key)
        when = self.workloads.now if now is None else now
        if booking.started_at is not None:
            self.workloads.learn(STAY, booking.column, when - booking.started_at)
        left = 0.0 if booking.prefilled or booking.started_at is not None else booking.tokens
        queued, priority = not booking.counted, booking.priority
        self.workloads.take(booking.column, left, when, queued=queued, priority=priority)
        return True

    def reflect(self, column: int, beat: Heartbeat, now: float) -> list[Key]:
        """Take a heartbeat: it counts accepted requests, and those that the worker must have seen by now. Returns those
        that are lost or were never sent."""
        at_worker = self.at.get(beat.worker, {})
        for booking in at_worker.values():
            booking.counted = booking.accepted
        fresh = {key: booking for key, booking in at_worker.items() if not booking.accepted}
        silent = _older(fresh, now - HEARTBEAT_PERIOD_S)
        for key in silent:
            self._drop(key)
            del fresh[key]
        unseen = [(booking.priority, booking.tokens) for booking in fresh.values()]
        self.workloads.report(column, beat.load, beat.rates, unseen, now)
        return silent

    def drop_worker(self, worker: str) -> None:
        for key in list(self.at.get(worker, ())):
            self._drop(key)

    def expire(self, now: float) -> list[Key]:
        """Returns requests that were never sent."""
        silent: list[Key] = []
        while self.expiring and self.expiring[0][0] < now:
            _, _, key, booking = heapq.heappop(self.expiring)
            if self.fresh.get(key) is booking:
                self.release(key, now)
                silent.append(key)
                self.caught[key[0]] = now + CAUGHT_S
        self.caught = {tenant: until for tenant, until in self.caught.items() if until > now}
        for key in _older(self.accepted, now - STAY_LIMIT_S):
            self._drop(key)
        return silent

    def _at_worker(self, key: Key, worker: str, attempt: int) -> Booking | None:
        """The booking of this very attempt, accepted from now on: that word may have been lost."""
        booking = self.find(key)
        if booking is None or (booking.worker, booking.attempt) != (worker, attempt):
            return None
        if not booking.accepted:
            self._unshare(key, self.fresh.pop(key))
            booking.accepted = True
            self.accepted[key] = booking
            if len(self.accepted) > self.max_booked:
                self._drop(next(iter(self.accepted)))
        return booking

    def _drop(self, key: Key) -> None:
        """Take it out of the tables; the workloads still count it."""
        booking = self.fresh.pop(key, None) or self.accepted.pop(key)
        held = self.at[booking.worker]
        del held[key]
        if not held:
            del self.at[booking.worker]
        if not booking.accepted:
            self._unshare(key, booking)

    def _unshare(self, key: Key, booking: Booking) -> None:
        of_tenant = key[0], booking.worker
        share = self.shares[of_tenant]
        del share.keys[key]
        share.tokens -= booking.tokens
        if not share.keys:
            del self.shares[of_tenant]

    def check_integrity(self) -> None:
        assert not self.fresh.keys() & self.accepted.keys()
        assert sum(len(held) for held in self.at.values()) == len(self.fresh) + len(self.accepted)
        for worker, held in self.at.items():
            assert held, worker
            assert all(self.find(key) is booking and booking.worker == worker for key, booking in held.items())
        assert len(self.early) <= EARLY_KEPT
        assert max(len(self.fresh), len(self.accepted)) <= self.max_booked
        assert not any(booking.accepted for booking in self.fresh.values())
        assert all(booking.accepted for booking in self.accepted.values())
        assert sum(len(share.keys) for share in self.shares.values()) == len(self.fresh)
        for (tenant, worker), share in self.shares.items():
            assert 0 < len(share.keys) <= max(self.limits.requests, 1)
            assert all(key[0] == tenant and self.fresh[key].worker == worker for key in share.keys)
            assert abs(share.tokens - sum(self.fresh[key].tokens for key in share.keys)) < 1
        for each in (self.fresh, *self.at.values()):
            times = [booking.booked_at for booking in each.values()]
            assert times == sorted(times)


def _older(bookings: dict[Key, Booking], limit: float) -> list[Key]:
    """Keys booked before `limit`; the oldest come first, or nearly so."""
    return [key for key, _ in takewhile(lambda item: item[1].booked_at < limit, bookings.items())]
