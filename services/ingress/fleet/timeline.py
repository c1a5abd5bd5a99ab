"""The course of streams over workers, and the moments when workers came, drained and went. Pure.

An ingress tells of its own streams by itself, of those of other ingresses and of producers as placement replicas
remember them. By these an attempt is lost whose worker went, or that another one followed without a word of its end. Of
workers each ingress hears by itself, since its own begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvfleet.ingress.http.answer_types import Described, Natural
from kvfleet.ingress.telemetry.stream_courses import DONE, LOST, Stay, StreamCourse
from kvproto.fleet_view import Change, WorkerView
from kvproto.messages import Decision, State

KEPT = 256  # moments: some tens of minutes of a fleet in trouble


class Turning(StrEnum):
    """What happened to a worker."""

    JOINED = "joined"
    DRAINING = "draining"
    DRAINED = "drained"  # it has gone, as it was to
    DIED = "died"


class WorkerMoment(Described):
    unix_ms: Natural
    worker_id: str
    what: Turning


class TimelineAnswer(Described):
    """Streams whose last attempt is the newest first; moments of workers oldest first."""

    now_unix_ms: Natural
    streams: list[StreamCourse]
    workers: list[WorkerMoment]


@dataclass(eq=False, slots=True)
class WorkerMoments:
    """Owned by the event loop, which tells it of each change of a worker."""

    unix_ms: Callable[[], int]
    moments: deque[WorkerMoment] = field(default_factory=lambda: deque(maxlen=KEPT))
    draining: set[str] = field(default_factory=set)

    def on_change(self, change: Change, view: WorkerView) -> None:
        worker = view.record.id
        if change is Change.LEFT or change is Change.NEW_EPOCH:
            self._note(worker, Turning.DRAINED if worker in self.draining else Turning.DIED)
            self.draining.discard(worker)
        if change is Change.JOINED or change is Change.NEW_EPOCH:
            self._note(worker, Turning.JOINED)
        if view.state is State.DRAINING and worker not in self.draining:
            self.draining.add(worker)
            self._note(worker, Turning.DRAINING)

    def _note(self, worker: str, what: Turning) -> None:
        self.moments.append(WorkerMoment(self.unix_ms(), worker, what))


def timeline_report(
    now_unix_ms: int,
    own: Iterable[StreamCourse],
    decisions: Iterable[Decision],
    moments: Sequence[WorkerMoment],
    limit: int,
    *,
    every_worker: bool,
) -> TimelineAnswer:
    """Of at most `limit` streams. Unless it is to tell of `every_worker`, of those alone that these streams were at."""
    attempts: dict[tuple[str, str], dict[int, Decision]] = {}
    for one in sorted(decisions, key=lambda one: (one.actual.accepted, one.unix_ms)):
        attempts.setdefault((one.tenant, one.request), {})[one.attempt] = one  # of several replicas', the accepted one
    courses = {key: _course([of_one[at] for at in sorted(of_one)], moments) for key, of_one in attempts.items()}
    courses |= {(one.tenant, one.request_id): one for one in own}
    streams = sorted(courses.values(), key=lambda one: one.stays[-1].placed_unix_ms, reverse=True)[:limit]
    seen = {stay.worker_id for stream in streams for stay in stream.stays}
    return TimelineAnswer(now_unix_ms, streams, [one for one in moments if every_worker or one.worker_id in seen])


def _course(stream: Sequence[Decision], moments: Sequence[WorkerMoment]) -> StreamCourse:
    last = stream[-1]
    following = [*(one.unix_ms for one in stream[1:]), None]
    stays = [_stay(one, next_ms, moments) for one, next_ms in zip(stream, following, strict=True)]
    return StreamCourse(last.request, last.tenant, last.model, last.prompt_tokens, stays)


def _stay(decision: Decision, next_ms: int | None, moments: Sequence[WorkerMoment]) -> Stay:
    actual, placed = decision.actual, decision.unix_ms
    ended = end = None
    if actual.ended:
        ended, end = _after(placed, actual.total_s), actual.code or DONE
    else:
        gone = [
            one.unix_ms
            for one in moments
            if one.worker_id == decision.worker
            and one.unix_ms >= placed
            and one.what in (Turning.DIED, Turning.DRAINED)
        ]
        known = [moment for moment in (next_ms, *gone[:1]) if moment is not None]
        if known:
            ended, end = min(known), LOST
    return Stay(
        decision.attempt,
        decision.worker,
        placed,
        _after(placed, actual.queue_s),
        _after(placed, actual.ttft_s),
        ended,
        end,
        actual.cached,
        actual.output_tokens,
    )


def _after(unix_ms: int, seconds: float | None) -> int | None:
    return None if seconds is None else unix_ms + round(1000 * seconds)
