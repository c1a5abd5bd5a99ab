"""Requests on their way to workers, and at them, as far as load is concerned. Pure.

Without bookings, every request of a burst between two heartbeats would see the same idle worker. A booking's life:

    booked ──accepted──▶ with the worker: its heartbeats count it ──ended, in whatever way──▶ released
       │
       ├──placed again, refused, offered to somebody else──▶ released
       ├──a heartbeat heard more than a period later, and no word of acceptance──▶ dropped: it is in there, or lost
       ├──the worker left or restarted──▶ gone with it
       └──5 s──▶ expired: a lost release never leaves phantom load

What a worker's milestones say comes to every replica, so a booking is released wherever it was made or shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproto.messages import Heartbeat
from services.placement.workloads import Workloads

HEARTBEAT_PERIOD_S = 0.5  # how far a heartbeat may lag behind what the worker was given
BOOKING_LIMIT_S = 5.0
STAY_LIMIT_S = 3600.0  # of an accepted one whose end was never heard

Key = tuple[str, str]  # tenant, request: tenants cannot release one another's


@dataclass(slots=True)
class Booking:
    worker: str
    column: int
    attempt: int
    tokens: float  # to prefill, as expected
    booked_at: float
    accepted: bool = False
    started_at: float | None = None
    prefilled: bool = False


class Bookings:
    """Owned by the core; `now` never goes back. What is booked is in the workloads."""

    def __init__(self, workloads: Workloads) -> None:
        self._workloads = workloads
        self._fresh: dict[Key, Booking] = {}  # not accepted yet; oldest first
        self._accepted: dict[Key, Booking] = {}  # oldest acceptance first
        self._at: dict[str, dict[Key, Booking]] = {}  # fresh ones per worker, oldest first; no empty entries

    def __len__(self) -> int:
        """What no heartbeat counts yet."""
        return len(self._fresh)

    @property
    def running(self) -> int:
        """Accepted and not known to have ended."""
        return len(self._accepted)

    def requests_at(self, worker: str) -> int:
        return len(self._at.get(worker, ()))

    def tokens_at(self, worker: str) -> float:
        return sum(booking.tokens for booking in self._at.get(worker, {}).values())

    # ------------------------------------------------------------------ a request's life

    def book(self, key: Key, attempt: int, worker: str, column: int, tokens: float, now: float) -> None:
        """Book one attempt; what the request had booked before is released."""
        self.release(key, now)
        booking = Booking(worker, column, attempt, tokens, now)
        self._fresh[key] = booking
        self._at.setdefault(worker, {})[key] = booking
        self._workloads.give(column, tokens, now)

    def accept(self, key: Key, worker: str, attempt: int) -> None:
        """The worker has it: from its next heartbeat on it is counted there."""
        booking = self._fresh.get(key)
        if booking is not None and (booking.worker, booking.attempt) == (worker, attempt):
            self._forget_fresh(key, booking)
            booking.accepted = True
            self._accepted[key] = booking

    def start(self, key: Key, worker: str, attempt: int, tokens: float, now: float) -> None:
        """It is being prefilled: `tokens` are really to be fed."""
        booking = self._of(key, worker, attempt)
        if booking is not None and booking.started_at is None:
            self._workloads.correct(booking.column, tokens - booking.tokens, now)
            booking.tokens, booking.started_at = tokens, now

    def prefill(self, key: Key, worker: str, attempt: int) -> None:
        """Its first token was drawn."""
        booking = self._of(key, worker, attempt)
        if booking is not None:
            booking.prefilled = True

    def end(self, key: Key, worker: str, attempt: int, now: float) -> None:
        booking = self._of(key, worker, attempt)
        if booking is not None:
            if booking.started_at is not None:
                self._workloads.stayed(booking.column, now - booking.started_at)
            self.release(key, now)

    def release(self, key: Key, now: float | None = None) -> None:
        """Nothing happens if it was released before: each way out may call this. `now`: None for the latest known."""
        booking = self._drop(key)
        if booking is not None:
            left = 0.0 if booking.prefilled or booking.started_at is not None else booking.tokens
            self._workloads.take(booking.column, left, self._workloads.now if now is None else now)

    # ------------------------------------------------------------------ heartbeats and time

    def reflect(self, column: int, beat: Heartbeat, now: float) -> None:
        """A heartbeat arrived: it counts what the worker has accepted, and what it must have seen by now."""
        fresh = self._at.get(beat.worker, {})
        for key in _older(fresh, now - HEARTBEAT_PERIOD_S):
            self._drop(key)
        tokens = sum(booking.tokens for booking in fresh.values())
        self._workloads.report(column, beat.load, beat.rates, tokens, len(fresh), now)

    def drop_worker(self, worker: str) -> None:
        """Its column is gone: nothing to release."""
        for key in list(self._at.get(worker, ())):
            self._drop(key)
        for key in [key for key, booking in self._accepted.items() if booking.worker == worker]:
            del self._accepted[key]

    def expire(self, now: float) -> None:
        for key in _older(self._fresh, now - BOOKING_LIMIT_S):
            self.release(key, now)
        for key in _older(self._accepted, now - STAY_LIMIT_S):
            self._drop(key)

    # ------------------------------------------------------------------ inside

    def _of(self, key: Key, worker: str, attempt: int) -> Booking | None:
        self.accept(key, worker, attempt)  # that word may have been lost
        booking = self._accepted.get(key)
        return booking if booking is not None and (booking.worker, booking.attempt) == (worker, attempt) else None

    def _drop(self, key: Key) -> Booking | None:
        booking = self._fresh.get(key)
        if booking is not None:
            self._forget_fresh(key, booking)
            return booking
        return self._accepted.pop(key, None)

    def _forget_fresh(self, key: Key, booking: Booking) -> None:
        del self._fresh[key]
        held = self._at[booking.worker]
        del held[key]
        if not held:
            del self._at[booking.worker]

    def check_integrity(self) -> None:
        """Every booking is in one state, and found both ways, in order. Raises AssertionError."""
        assert sum(len(held) for held in self._at.values()) == len(self._fresh)
        assert not self._fresh.keys() & self._accepted.keys()
        for worker, held in self._at.items():
            assert held, worker
            assert all(self._fresh[key] is booking and booking.worker == worker for key, booking in held.items())
        assert not any(booking.accepted for booking in self._fresh.values())
        assert all(booking.accepted for booking in self._accepted.values())
        for each in (self._fresh, *self._at.values()):
            times = [booking.booked_at for booking in each.values()]
            assert times == sorted(times)


def _older(bookings: dict[Key, Booking], limit: float) -> list[Key]:
    """Keys booked before `limit`; the oldest come first, or nearly so, which is enough to stop at the first younger."""
    old = []
    for key, booking in bookings.items():
        if booking.booked_at >= limit:
            break
        old.append(key)
    return old
