"""Requests of bare producers that a worker has accepted, watched to their end. Pure.

    watched ──terminal notice, or the worker's milestone (it told the producer itself)──▶ over
      │ │ └────of a cancel, of which it tells no bare producer──▶ Failed(cancelled)
      │ ▲
      │ │ back within 0.6 s, same life: its heartbeats count
      ▼ │ worker left, restarted or silent
     lost ──0.6 s──▶ Failed(worker_lost)

A watch that a replica which goes hands on goes on here: the worker is asked at once, as its notices went to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from kvfleet.placement.actions import Action, AskStillRunning, Cancel, failed_frame
from kvfleet.placement.producers.forwarded import Forwarded
from kvfleet.placement.workers.fleet import Fleet
from kvproto.errors import Cancelled, WorkerLost
from kvproto.messages import TERMINAL, CancelRequest, Encoding, Failed, Frame, Milestone, Progress, ResendRequest, Watch

LOST_GRACE_S = 0.6  # whose connection alone was cut is back by then, and a heartbeat says so
SILENT_GRACE_S = 0.1  # after a long silence nobody is coming back; a terminal notice may still be on its way
LONG_SILENCE_S = 2.5
ASK_AGAIN_S = 15.0  # a notice lost in an outage would be waited for for ever
ASKS_LIMIT = 4
ORPHANS_KEPT_S = 60.0  # a hung worker that wakes is told what to cancel
MAX_ORPHANS = 65_536  # of one worker
NOTHING_TO_RESEND = 2**62  # from this index on: only the question "are you still there?"


class AcceptedRequests:
    """Owned by the core. Both tables are ordered by `due`."""

    def __init__(self, inbox_prefix: str, fleet: Fleet, over: Callable[[Forwarded, bool], None]) -> None:
        self.lost_total = 0
        self.cancelled_total = 0  # told to producers
        self.abandoned_total = 0
        self._inbox_prefix = inbox_prefix
        self._fleet = fleet
        self._over = over  # is told of each that ends, and whether it is lost
        self._watched: dict[str, Forwarded] = {}
        self._lost: dict[str, Forwarded] = {}
        self._orphans: dict[str, list[tuple[float, Cancel]]] = {}

    def __len__(self) -> int:
        return len(self._watched) + len(self._lost)

    def get(self, key: str) -> Forwarded | None:
        return self._watched.get(key) or self._lost.get(key)

    def due(self) -> float | None:
        """When the earliest grace ends; questions are not urgent enough to count."""
        return next(iter(self._lost.values())).due if self._lost else None

    # ------------------------------------------------------------------ begin and end

    def watch(self, forwarded: Forwarded, now: float) -> None:
        self._remove(forwarded)
        forwarded.due, forwarded.asks = now + ASK_AGAIN_S, 0
        forwarded.body = forwarded.offer = None  # they can be large
        self._watched[forwarded.key] = forwarded
        known = self._fleet.workers.get(forwarded.worker)
        if known is not None and forwarded.epoch != known.epoch:
            # The last word of a life that is over; one that is only just beginning shows itself within the grace.
            self._set_lost([forwarded], now)

    def adopt(self, forwarded: Forwarded, now: float) -> list[Action]:
        """What another replica was watching."""
        self.watch(forwarded, now)
        if forwarded.worker not in self._fleet.workers:
            self._set_lost([forwarded], now)
        return [self._ask(forwarded)]

    def release(self, forwarded: Forwarded) -> list[Action]:
        """Somebody else watches it from now on."""
        return self._end(forwarded)

    def release_sources(self) -> list[Action]:
        """Nobody here will hear that they have started."""
        return [
            one for table in (self._lost, self._watched) for held in table.values() for one in held.release_source()
        ]

    def watches(self) -> tuple[Watch, ...]:
        return tuple(forwarded.watch() for table in (self._lost, self._watched) for forwarded in table.values())

    # ------------------------------------------------------------------ workers speak

    def on_frame(self, key: str, frame: Frame, now: float) -> list[Action]:
        held = self.get(key)
        if held is None or held.attempt != frame.attempt:
            return []
        if isinstance(frame, Failed) and frame.code == WorkerLost.code and held.asks:
            return self._lose(held)  # the answer to our question: it forgot the request, so nobody else will end it
        if isinstance(frame, Failed) and frame.code == Cancelled.code:
            return self._tell_cancelled(held, frame.output_tokens)
        if isinstance(frame, TERMINAL):
            return self._end(held)
        if isinstance(frame, Progress) and key in self._watched:
            self.watch(held, now)
        return []

    def on_ended(self, worker: str, one: Milestone, keys: Iterable[str]) -> list[Action]:
        """All readers of an attempt have been told how it ended. Notices go to the replica that watched first."""
        actions: list[Action] = []
        for key in list(keys):
            held = self.get(key)
            if held is None or (held.tenant, held.worker, held.attempt) != (one.tenant, worker, one.attempt):
                continue
            cancelled = one.code == Cancelled.code
            actions += self._tell_cancelled(held, one.output_tokens) if cancelled else self._end(held)
        return actions

    def _tell_cancelled(self, held: Forwarded, output_tokens: int) -> list[Action]:
        """A worker tells no bare producer of it: what placement took back ends so too, but that is not watched under
        its number any more. One that knows of one reader only has told it."""
        ended = self._end(held)
        known = self._fleet.workers.get(held.worker)
        if held.encoding is Encoding.FRAMES or (known is not None and not known.attaches):
            return ended
        self.cancelled_total += 1
        frame = failed_frame(Cancelled("the request was cancelled"), held.request, held.attempt)
        return [*ended, held.fail(replace(frame, output_tokens=output_tokens))]

    # ------------------------------------------------------------------ workers come and go

    def on_new_epoch(self, worker: str, epoch: str, now: float) -> None:
        """What its former life accepted is lost; what this one did, before it was known, is not."""
        self._orphans.pop(worker, None)
        for forwarded in self._lost_at(worker, epoch):
            self.watch(forwarded, now)
        self._set_lost([f for f in self._watched.values() if f.worker == worker and f.epoch != epoch], now)

    def on_beat(self, worker: str, epoch: str, now: float) -> None:
        """It lives, and is reached. Until its record is back as well, each heartbeat renews the grace."""
        if not self._lost:
            return
        back = self._lost_at(worker, epoch)
        if worker in self._fleet.workers:
            for forwarded in back:
                self.watch(forwarded, now)
        else:
            self._set_lost(back, now)

    def on_joined(self, worker: str, epoch: str, now: float) -> list[Action]:
        """Back in the same life: requests still within their grace go on, those given up are cancelled."""
        for back in self._lost_at(worker, epoch):
            self.watch(back, now)
        return [cancel for _, cancel in self._orphans.pop(worker, [])]

    def suspect(self, worker: str, heard_at: float, now: float) -> None:
        """A worker did not answer: its requests are lost unless it shows up within the grace."""
        grace_s = SILENT_GRACE_S if now - heard_at >= LONG_SILENCE_S else LOST_GRACE_S
        self._set_lost([f for f in self._watched.values() if f.worker == worker], now, grace_s)

    # ------------------------------------------------------------------ time passes

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for lost in _due(self._lost, now):
            actions += self._lose(lost, now)
        for silent in _due(self._watched, now):
            actions += self._ask_or_abandon(silent, now)
        for name, orphans in list(self._orphans.items()):
            if orphans[-1][0] + ORPHANS_KEPT_S < now:
                del self._orphans[name]
        return actions

    def _ask_or_abandon(self, silent: Forwarded, now: float) -> list[Action]:
        """A worker that answers no question keeps the request; only placement stops watching it."""
        if silent.asks >= ASKS_LIMIT:
            self.abandoned_total += 1
            return self._end(silent)
        asks = silent.asks
        self.watch(silent, now)
        silent.asks = asks
        return [self._ask(silent)]

    def _ask(self, silent: Forwarded) -> AskStillRunning:
        silent.asks += 1
        reply = silent.reply(self._inbox_prefix)
        return AskStillRunning(silent.worker, ResendRequest(silent.request, silent.attempt, NOTHING_TO_RESEND, reply))

    # ------------------------------------------------------------------ states

    def _lost_at(self, worker: str, epoch: str) -> list[Forwarded]:
        return [f for f in self._lost.values() if f.worker == worker and f.epoch == epoch]

    def _set_lost(self, gone: list[Forwarded], now: float, grace_s: float = LOST_GRACE_S) -> None:
        for forwarded in gone:
            self._remove(forwarded)
            forwarded.due = now + grace_s
            self._lost[forwarded.key] = forwarded
        if gone and grace_s < LOST_GRACE_S:
            self._lost = dict(sorted(self._lost.items(), key=lambda item: item[1].due))

    def _lose(self, lost: Forwarded, gone_at: float | None = None) -> list[Action]:
        """Tell the producer; with `gone_at`, a worker that hangs rather than died is told to stop, now or on waking."""
        self.lost_total += 1
        cancel = Cancel(lost.worker, CancelRequest(lost.request, lost.attempt, lost.inbox))
        if gone_at is not None:
            orphans = self._orphans.setdefault(lost.worker, [])
            orphans.append((gone_at, cancel))
            del orphans[:-MAX_ORPHANS]
        error = WorkerLost(f"worker {lost.worker} was lost")
        told = lost.fail(failed_frame(error, lost.request, lost.attempt))
        return [cancel, *self._end(lost, lost=True), told]  # told last: nothing should come after it

    def _end(self, forwarded: Forwarded, *, lost: bool = False) -> list[Action]:
        self._remove(forwarded)
        self._over(forwarded, lost)
        return [*forwarded.release_source()]

    def _remove(self, forwarded: Forwarded) -> None:
        for table in (self._watched, self._lost):
            table.pop(forwarded.key, None)

    def check_integrity(self) -> None:
        """Every request is in one state, and the tables are in order. Raises AssertionError."""
        assert not self._watched.keys() & self._lost.keys()
        for table in (self._watched, self._lost):
            dues = [f.due for f in table.values()]
            assert dues == sorted(dues)
            assert all(key == f.key and f.epoch and f.worker for key, f in table.items())
            assert all(f.body is None and f.offer is None for f in table.values())
        assert all(self._orphans.values())


def _due(table: dict[str, Forwarded], now: float) -> list[Forwarded]:
    due = []
    for forwarded in table.values():
        if forwarded.due > now:
            break
        due.append(forwarded)
    return due
