"""Requests of bare producers at one replica, from the first offer to their end. Pure.

    offered    to a worker that has not answered yet
    parked     handed over by a draining worker, while nobody is ready for it
    watched ──terminal notice, or the worker's milestone (it told the producer itself)──▶ over
      │ │ └────of a cancel, of which it tells no bare producer──▶ Failed(cancelled)
      │ ▲
      │ │ back within 0.6 s, same life: its heartbeats count
      ▼ │ worker left, restarted or silent
     lost ──0.6 s──▶ Failed(worker_lost)

A request may have several readers, told apart by keys. Each is in one of the four tables. `Forwarding` moves it until a
worker has accepted it; from then on it is watched. Of a watch taken over from a replica that goes, the worker is asked
at once: its notices went to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, takewhile

from kvfleet.placement.events import Action, AskStillRunning, Cancel, TellReturn, failed_frame
from kvfleet.placement.producers.forwarded import Forwarded
from kvfleet.placement.workers.fleet import Fleet
from kvproto.errors import Cancelled, WorkerLost
from kvproto.messages import TERMINAL, Encoding, Failed, Finished, Frame, Milestone, Progress, ResendRequest, Watch

ACKNOWLEDGE_S = 0.05
MOST_S = 1.0
TIMES = 4.0  # what an answer usually takes
WEIGHT = 0.1  # of the newest answer
LOST_GRACE_S = 0.6  # a worker whose connection was cut is back by then, and a heartbeat says so
SILENT_GRACE_S = 0.1  # after a long silence only a terminal notice may still be on its way
LONG_SILENCE_S = 2.5
ASK_AGAIN_S = 15.0  # a notice may be lost in an outage
ASKS_LIMIT = 4
ORPHANS_KEPT_S = 60.0  # a hung worker that wakes is told what to cancel
MAX_ORPHANS = 65_536  # of one worker
NOTHING_TO_RESEND = 2**62  # from this index on: only the question "are you still there?"


@dataclass(eq=False, slots=True)
class OfferTimeout:
    """50 ms are plenty for workers that have time. If they answer late, offering each request to the next one would
    only add to their load: then the timeout grows until it covers a present answer, and shrinks as they answer sooner.
    """

    _usual_s: float = 0.0

    @property
    def seconds(self) -> float:
        return min(max(ACKNOWLEDGE_S, TIMES * self._usual_s), MOST_S)

    def answered(self, after_s: float) -> None:
        self._usual_s += WEIGHT * (min(after_s, MOST_S) - self._usual_s)

    def was_late(self) -> None:
        """A worker accepted what had gone to the next one."""
        self._usual_s = min(2 * max(self._usual_s, ACKNOWLEDGE_S / TIMES), MOST_S)


@dataclass(eq=False, slots=True)
class RequestsInFlight:
    """`give_up(request, attempt, failed)` is told of each attempt that is over; `failed`: no worker has the request.
    `watched` and `lost` are ordered by `due`."""

    inbox_prefix: str
    fleet: Fleet
    give_up: Callable[[tuple[str, str], int, bool], None]
    offered: dict[str, Forwarded] = field(default_factory=dict)
    parked: dict[str, Forwarded] = field(default_factory=dict)
    watched: dict[str, Forwarded] = field(default_factory=dict)
    lost: dict[str, Forwarded] = field(default_factory=dict)
    lost_total: int = 0
    cancelled_total: int = 0  # told to producers
    abandoned_total: int = 0
    _keys: dict[str, list[str]] = field(default_factory=dict)  # of each request; no empty entries
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _orphans: dict[str, list[tuple[float, Cancel]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.offered) + len(self.parked) + len(self.watched) + len(self.lost)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._keys.values())

    def keys_of(self, request: str) -> Sequence[str]:
        return self._keys.get(request, ())

    def find(self, key: str) -> Forwarded | None:
        return self.offered.get(key) or self.parked.get(key) or self.find_accepted(key)

    def find_accepted(self, key: str) -> Forwarded | None:
        return self.watched.get(key) or self.lost.get(key)

    def is_read_at(self, request: str, inbox: str) -> bool:
        return any((reader := self.find(key)) and reader.inbox == inbox for key in self.keys_of(request))

    def due(self) -> float | None:
        """When the earliest offer or grace ends: a Tick is needed then at the latest."""
        due = [offered.due for offered in self.offered.values()]
        if self.lost:
            due.append(next(iter(self.lost.values())).due)
        return min(due, default=None)

    def further_key(self, request: str) -> str:
        return f"{request}~{next(self._numbers)}"

    def enter(self, forwarded: Forwarded) -> None:
        """Gives it a key; the caller puts it into a table."""
        keys = self._keys.setdefault(forwarded.request, [])
        forwarded.key = self.further_key(forwarded.request) if forwarded.request in keys else forwarded.request
        keys.append(forwarded.key)

    def watch(self, forwarded: Forwarded, now: float) -> None:
        """A worker has accepted it, or shown progress of it."""
        self._forget_accepted(forwarded)
        forwarded.due, forwarded.asks = now + ASK_AGAIN_S, 0
        forwarded.body = forwarded.offer = None  # they can be large
        self.watched[forwarded.key] = forwarded
        known = self.fleet.workers.get(forwarded.worker)
        if known is not None and forwarded.epoch != known.epoch:
            # A life that is over, or one that is just beginning and shows itself within the grace.
            self._set_lost([forwarded], now)

    def adopt(self, forwarded: Forwarded, now: float) -> list[Action]:
        self.watch(forwarded, now)
        if forwarded.worker not in self.fleet.workers:
            self._set_lost([forwarded], now)
        return [self._ask(forwarded)]

    def end(self, forwarded: Forwarded, *, failed: bool = False) -> list[Action]:
        """The worker that handed it over may let go."""
        self.offered.pop(forwarded.key, None)
        self._forget_accepted(forwarded)
        keys = self._keys[forwarded.request]
        keys.remove(forwarded.key)
        if not keys:
            del self._keys[forwarded.request]
        if not forwarded.attached:
            self.give_up((forwarded.tenant, forwarded.request), forwarded.attempt, failed)
        return [*forwarded.release_source()]

    def release_sources(self) -> list[Action]:
        return [one for held in chain(self.lost.values(), self.watched.values()) for one in held.release_source()]

    def watches(self) -> tuple[Watch, ...]:
        return tuple(held.watch() for held in chain(self.lost.values(), self.watched.values()))

    def on_frame(self, key: str, frame: Frame, now: float) -> list[Action]:
        held = self.find_accepted(key)
        if held is None or held.attempt != frame.attempt:
            return []
        if isinstance(frame, Failed) and frame.code == WorkerLost.code and held.asks:
            return self._lose(held)  # the answer to our question: the worker forgot the request and will not end it
        if isinstance(frame, Failed) and frame.code == Cancelled.code:
            return self._tell_cancelled(held, frame.output_tokens)
        if isinstance(frame, TERMINAL):
            return [*(self._tell_return(held) if isinstance(frame, Finished) else ()), *self.end(held)]
        if isinstance(frame, Progress) and key in self.watched:
            self.watch(held, now)
        return []

    def on_ended(self, worker: str, one: Milestone) -> list[Action]:
        """For all readers of the attempt: the terminal notice goes only to the replica that watched first."""
        actions: list[Action] = []
        for key in list(self.keys_of(one.request)):
            held = self.find_accepted(key)
            if held is None or (held.tenant, held.worker, held.attempt) != (one.tenant, worker, one.attempt):
                continue
            cancelled = one.code == Cancelled.code
            if one.code is None:
                actions += self._tell_return(held)
            actions += self._tell_cancelled(held, one.output_tokens) if cancelled else self.end(held)
        return actions

    def _tell_return(self, held: Forwarded) -> list[TellReturn]:
        known = self.fleet.workers.get(held.worker)
        return held.tell_return() if known is not None and known.pauses else []

    def _tell_cancelled(self, held: Forwarded, output_tokens: int) -> list[Action]:
        """Workers tell no bare producer of it, as an offer that placement took back ends so too; but a worker that
        knows only one reader has told it."""
        ended = self.end(held)
        known = self.fleet.workers.get(held.worker)
        if held.encoding is Encoding.FRAMES or (known is not None and not known.attaches):
            return ended
        self.cancelled_total += 1
        frame = failed_frame(Cancelled("the request was cancelled"), held.request, held.attempt)
        return [*ended, held.fail(replace(frame, output_tokens=output_tokens))]

    def on_new_epoch(self, worker: str, epoch: str, now: float) -> None:
        """Requests that the former life accepted are lost; those of this one, before it was known, are not."""
        self._orphans.pop(worker, None)
        for forwarded in self._lost_at(worker, epoch):
            self.watch(forwarded, now)
        self._set_lost([f for f in self.watched.values() if f.worker == worker and f.epoch != epoch], now)

    def on_beat(self, worker: str, epoch: str, now: float) -> None:
        """Until the worker's record is back as well, each heartbeat renews the grace."""
        if not self.lost:
            return
        back = self._lost_at(worker, epoch)
        if worker in self.fleet.workers:
            for forwarded in back:
                self.watch(forwarded, now)
        else:
            self._set_lost(back, now)

    def on_joined(self, worker: str, epoch: str, now: float) -> list[Action]:
        """In the same life requests within their grace go on, and those given up are cancelled."""
        for back in self._lost_at(worker, epoch):
            self.watch(back, now)
        return [cancel for _, cancel in self._orphans.pop(worker, [])]

    def suspect(self, worker: str, heard_at: float, now: float) -> None:
        """Its requests are lost unless it shows up within the grace."""
        grace_s = SILENT_GRACE_S if now - heard_at >= LONG_SILENCE_S else LOST_GRACE_S
        self._set_lost([f for f in self.watched.values() if f.worker == worker], now, grace_s)

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lost in _due(self.lost, now):
            actions += self._lose(lost, now)
        for silent in _due(self.watched, now):
            actions += self._ask_or_abandon(silent, now)
        for name, orphans in list(self._orphans.items()):
            if orphans[-1][0] + ORPHANS_KEPT_S < now:
                del self._orphans[name]
        return actions

    def _ask_or_abandon(self, silent: Forwarded, now: float) -> list[Action]:
        """A worker that answers no question keeps the request; only placement stops watching it."""
        if silent.asks >= ASKS_LIMIT:
            self.abandoned_total += 1
            return self.end(silent)
        asks = silent.asks
        self.watch(silent, now)
        silent.asks = asks
        return [self._ask(silent)]

    def _ask(self, silent: Forwarded) -> AskStillRunning:
        silent.asks += 1
        reply = silent.reply(self.inbox_prefix)
        return AskStillRunning(silent.worker, ResendRequest(silent.request, silent.attempt, NOTHING_TO_RESEND, reply))

    def _lost_at(self, worker: str, epoch: str) -> list[Forwarded]:
        return [f for f in self.lost.values() if f.worker == worker and f.epoch == epoch]

    def _set_lost(self, gone: list[Forwarded], now: float, grace_s: float = LOST_GRACE_S) -> None:
        for forwarded in gone:
            self._forget_accepted(forwarded)
            forwarded.due = now + grace_s
            self.lost[forwarded.key] = forwarded
        if gone and grace_s < LOST_GRACE_S:
            self.lost = dict(sorted(self.lost.items(), key=lambda item: item[1].due))

    def _lose(self, lost: Forwarded, gone_at: float | None = None) -> list[Action]:
        """With `gone_at`, a worker that hangs rather than died is told to stop, now or on waking."""
        self.lost_total += 1
        cancel = lost.take_back()
        if gone_at is not None:
            orphans = self._orphans.setdefault(lost.worker, [])
            orphans.append((gone_at, cancel))
            del orphans[:-MAX_ORPHANS]
        error = WorkerLost(f"worker {lost.worker} was lost")
        # As of a further attempt: what still comes of this one, from a worker that was cut off, is an older one's.
        told = lost.fail(failed_frame(error, lost.request, lost.attempt + 1))
        return [cancel, *self.end(lost, failed=True), told]

    def _forget_accepted(self, forwarded: Forwarded) -> None:
        for table in (self.watched, self.lost):
            table.pop(forwarded.key, None)

    def check_integrity(self) -> None:
        """Every reader is in one state, offered to no worker twice, and the tables are in order."""
        keys = list(self)
        assert len(keys) == len(set(keys)) == len(self)
        for key in keys:
            found = self.find(key)
            assert found is not None
            assert key == found.key
        assert all(f.tried or f.attached for f in self.offered.values())
        assert all(len(set(f.tried)) == len(f.tried) for f in (*self.offered.values(), *self.parked.values()))
        assert all(f.carried_until is not None for f in self.parked.values())
        for table in (self.watched, self.lost):
            dues = [f.due for f in table.values()]
            assert dues == sorted(dues)
            assert all(key == f.key and f.epoch and f.worker for key, f in table.items())
            assert all(f.body is None and f.offer is None for f in table.values())
        assert all(self._orphans.values())


def _due(table: dict[str, Forwarded], now: float) -> list[Forwarded]:
    return list(takewhile(lambda forwarded: forwarded.due <= now, table.values()))
