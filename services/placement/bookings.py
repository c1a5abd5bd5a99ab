"""Load that was placed but does not show in a heartbeat yet. Pure.

Without it, every request of a burst between two heartbeats would see the same idle worker. A booking ends with the
first of:

    booked ──heartbeat heard more than a period later──▶ counted by the worker itself
           ──the request ended, was refused, or was placed again──▶ released
           ──the worker left or restarted──▶ gone with it
           ──5 s──▶ expired: a lost release never leaves phantom load
"""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_PERIOD_S = 0.5  # how far a heartbeat may lag behind what the worker was given
BOOKING_LIMIT_S = 5.0

Key = tuple[str, str]  # tenant, request: tenants cannot release one another's


@dataclass(frozen=True, slots=True)
class Booking:
    worker: str
    tokens: int  # to prefill, at most
    booked_at: float


class Bookings:
    """Owned by the core; `now` never goes back."""

    def __init__(self) -> None:
        self._bookings: dict[Key, Booking] = {}  # oldest first
        self._at: dict[str, dict[Key, Booking]] = {}  # per worker, oldest first; no empty entries
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._bookings)

    def requests_at(self, worker: str) -> int:
        return len(self._at.get(worker, ()))

    def tokens_at(self, worker: str) -> int:
        return self._tokens.get(worker, 0)

    def book(self, key: Key, worker: str, tokens: int, now: float) -> None:
        """Book one request; what it had booked before (an earlier attempt) is released."""
        self.release(key)
        booking = Booking(worker, tokens, now)
        self._bookings[key] = booking
        self._at.setdefault(worker, {})[key] = booking
        self._tokens[worker] = self._tokens.get(worker, 0) + tokens

    def release(self, key: Key) -> None:
        """Nothing happens if it was released before: each way out may call this."""
        booking = self._bookings.pop(key, None)
        if booking is None:
            return
        held = self._at[booking.worker]
        del held[key]
        self._tokens[booking.worker] -= booking.tokens
        if not held:
            del self._at[booking.worker], self._tokens[booking.worker]

    def reflect(self, worker: str, heard_at: float) -> None:
        """A heartbeat arrived: bookings older than it by more than a period are in its load."""
        self._release_older(self._at.get(worker, {}), heard_at - HEARTBEAT_PERIOD_S)

    def drop_worker(self, worker: str) -> None:
        for key in list(self._at.get(worker, ())):
            self.release(key)

    def expire(self, now: float) -> None:
        self._release_older(self._bookings, now - BOOKING_LIMIT_S)

    def _release_older(self, held: dict[Key, Booking], limit: float) -> None:
        old = []
        for key, booking in held.items():
            if booking.booked_at >= limit:
                break
            old.append(key)
        for key in old:
            self.release(key)

    def check_integrity(self) -> None:
        """Both indexes hold the same bookings, in order, and the sums are right. Raises AssertionError."""
        assert sum(len(held) for held in self._at.values()) == len(self._bookings)
        assert self._at.keys() == self._tokens.keys()
        for worker, held in self._at.items():
            assert held, worker
            assert all(self._bookings[key] is booking and booking.worker == worker for key, booking in held.items())
            assert self._tokens[worker] == sum(b.tokens for b in held.values())
        for each in (self._bookings, *self._at.values()):
            times = [b.booked_at for b in each.values()]
            assert times == sorted(times)
