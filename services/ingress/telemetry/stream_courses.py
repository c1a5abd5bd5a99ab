"""The course of this ingress's own streams: each attempt's worker and moments, also where no placement placed it. Pure
but for the clock that it is given.

    placed ──▶ started ──▶ first token ──▶ ended: done, moved, an error's code; lost: its worker went
       queue      prefill      decode
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvfleet.ingress.http.answer_types import Described, Natural
from kvproto.errors import KvfleetError, WorkerLost
from kvproto.messages import Placement, Started
from kvproto.streams.generation import Generation
from kvproto.streams.stream import Stream
from kvproto.trace_context import Trail

KEPT = 512  # streams
STAYS_KEPT = 16  # of one stream
DONE, MOVED, LOST = "done", "moved", "lost"


class Stay(Described):
    """One attempt at a worker. Moments that have not come, or of which nothing was heard, are null."""

    attempt: Natural
    worker_id: str
    placed_unix_ms: Natural
    started_unix_ms: Natural | None
    first_token_unix_ms: Natural | None
    ended_unix_ms: Natural | None
    end: str | None
    cached_tokens: dict[str, Natural] | None
    output_tokens: Natural


class StreamCourse(Described):
    request_id: str
    tenant: str
    model: str
    prompt_tokens: Natural
    stays: list[Stay]


@dataclass(eq=False, slots=True)
class StreamCourses:
    """Owned by the event loop. The oldest give way."""

    unix_ms: Callable[[], int]
    by_request: OrderedDict[tuple[str, str], StreamCourse] = field(default_factory=OrderedDict)

    def follow(self, generation: Generation, trail: Trail) -> CourseTrail:
        """Notes what becomes of a stream, and tells `trail` the same. A request that goes on has one course."""
        assert generation.request is not None
        key = generation.tenant, generation.request
        course = self.by_request.get(key)
        if course is None:
            prompt = len(generation.prompt_ids)
            course = self.by_request[key] = StreamCourse(key[1], key[0], generation.model, prompt, [])
            if len(self.by_request) > KEPT:
                self.by_request.popitem(last=False)
        return CourseTrail(course, self.unix_ms, trail)

    def of(self, tenant: str | None, model: str | None) -> list[StreamCourse]:
        """Those that a worker has, or had."""
        return [
            one
            for one in self.by_request.values()
            if one.stays and tenant in (None, one.tenant) and model in (None, one.model)
        ]


class CourseTrail(Trail):
    """Of one stream. `stream` counts its tokens, until it is closed."""

    def __init__(self, course: StreamCourse, unix_ms: Callable[[], int], trail: Trail) -> None:
        self.traceparent = trail.traceparent
        self.stream: Stream | None = None
        self._course = course
        self._unix_ms = unix_ms
        self._trail = trail

    def placing(self, attempt: int) -> str | None:
        return self._trail.placing(attempt)

    def placed(self, placement: Placement) -> None:
        self._trail.placed(placement)

    def unplaced(self, error: KvfleetError) -> None:
        self._trail.unplaced(error)

    def attempting(self, worker: str, attempt: int) -> str | None:
        stays = self._course.stays
        stays.append(Stay(attempt, worker, self._unix_ms(), None, None, None, None, None, 0))
        del stays[:-STAYS_KEPT]
        return self._trail.attempting(worker, attempt)

    def started(self, frame: Started) -> None:
        stay = self._course.stays[-1]
        stay.started_unix_ms = stay.placed_unix_ms + round(1000 * frame.queue_s)
        stay.cached_tokens = frame.cached
        self._trail.started(frame)

    def first_token(self) -> None:
        self._course.stays[-1].first_token_unix_ms = self._unix_ms()
        self._trail.first_token()

    def attempt_ended(self, error: KvfleetError | None, *, moved: bool) -> None:
        end = MOVED if moved else DONE
        if error is not None:
            end = LOST if isinstance(error, WorkerLost) else error.code
        self._end(end)
        self._trail.attempt_ended(error, moved=moved)

    def closed(self, error: KvfleetError | None) -> None:
        self._end(error.code if error is not None else DONE)  # its driver was cancelled amid an attempt
        self.stream = None
        self._trail.closed(error)

    def _end(self, end: str) -> None:
        """Of the attempt that runs, if there is one: it may end before its worker is asked."""
        stays = self._course.stays
        if stays and stays[-1].end is None:
            stays[-1].ended_unix_ms, stays[-1].end = self._unix_ms(), end
            if self.stream is not None:
                stays[-1].output_tokens = self.stream.assembly.tokens
