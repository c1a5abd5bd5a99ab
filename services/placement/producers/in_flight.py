"""Requests of bare producers that a replica has, and how long an offer may go unanswered. Pure.

    offered    to a worker that has not answered yet
    parked     handed over by a draining worker, while nobody is ready for it
    accepted   by a worker, watched to its end (`accepted_requests`)

A request may have several readers, who are told apart by keys: the first one's is the request's id. Each is in one of
the three tables; `Forwarding` moves it from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from kvfleet.placement.producers.accepted_requests import AcceptedRequests
from kvfleet.placement.producers.forwarded import Forwarded
from kvfleet.placement.workers.fleet import Fleet

ACKNOWLEDGE_S = 0.05
MOST_S = 1.0
TIMES = 4.0  # what an answer usually takes
WEIGHT = 0.1  # of the newest answer
NO_KEYS: tuple[str, ...] = ()


class OfferTimeout:
    """50 ms are plenty where workers have time. Where they have not, and answer late, offering each request to the next
    one and the next would only add to what keeps them from answering: then the timeout grows until it covers what an
    answer takes now, and shrinks as they answer sooner."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    @property
    def seconds(self) -> float:
        return min(max(ACKNOWLEDGE_S, TIMES * self._usual_s), MOST_S)

    def answered(self, after_s: float) -> None:
        self._usual_s += WEIGHT * (min(after_s, MOST_S) - self._usual_s)

    def was_late(self) -> None:
        """Somebody accepted what had gone to the next one."""
        self._usual_s = min(2 * max(self._usual_s, ACKNOWLEDGE_S / TIMES), MOST_S)


class RequestsInFlight:
    """Owned by the core. `give_up(request, attempt, failed)` is told of each attempt that is over, for what it had
    booked; `failed`: nobody has the request."""

    def __init__(self, inbox_prefix: str, fleet: Fleet, give_up: Callable[[tuple[str, str], int, bool], None]) -> None:
        self.offered: dict[str, Forwarded] = {}
        self.parked: dict[str, Forwarded] = {}
        self.accepted = AcceptedRequests(inbox_prefix, fleet, self._over)
        self._give_up = give_up
        self._keys: dict[str, list[str]] = {}  # of each request; no empty entries
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self.offered) + len(self.parked) + len(self.accepted)

    def __iter__(self) -> Iterator[str]:
        """The keys of all readers."""
        return (key for listed in self._keys.values() for key in listed)

    def keys_of(self, request: str) -> tuple[str, ...] | list[str]:
        return self._keys.get(request, NO_KEYS)

    def find(self, key: str) -> Forwarded | None:
        return self.offered.get(key) or self.parked.get(key) or self.accepted.get(key)

    def is_read_at(self, request: str, inbox: str) -> bool:
        return any((reader := self.find(key)) and reader.inbox == inbox for key in self.keys_of(request))

    def due(self) -> float | None:
        """When the earliest offer or grace is: a Tick is needed then at the latest. None: no hurry."""
        due = [offered.due for offered in self.offered.values()]
        if (lost := self.accepted.due()) is not None:
            due.append(lost)
        return min(due, default=None)

    def further_key(self, request: str) -> str:
        """For one more reader."""
        return f"{request}~{next(self._numbers)}"

    def enter(self, forwarded: Forwarded) -> None:
        """It has a key from here on; the table is the caller's to choose."""
        keys = self._keys.setdefault(forwarded.request, [])
        forwarded.key = self.further_key(forwarded.request) if forwarded.request in keys else forwarded.request
        keys.append(forwarded.key)

    def end(self, forwarded: Forwarded, *, failed: bool = False) -> None:
        """It is in no table any more, or among the offers."""
        self.offered.pop(forwarded.key, None)
        self._over(forwarded, failed)

    def _over(self, forwarded: Forwarded, failed: bool) -> None:
        keys = self._keys[forwarded.request]
        keys.remove(forwarded.key)
        if not keys:
            del self._keys[forwarded.request]
        if not forwarded.attached:
            self._give_up((forwarded.tenant, forwarded.request), forwarded.attempt, failed)

    def check_integrity(self) -> None:
        """Every reader is in one state, offered to nobody twice. Raises AssertionError."""
        self.accepted.check_integrity()
        keys = list(self)
        assert len(keys) == len(set(keys)) == len(self)
        for key in keys:
            found = self.find(key)
            assert found is not None
            assert key == found.key
        assert all(f.tried or f.attached for f in self.offered.values())
        assert all(len(set(f.tried)) == len(f.tried) for f in (*self.offered.values(), *self.parked.values()))
        assert all(f.carried_until is not None for f in self.parked.values())
