"""The course of a stream as its trail tells it, and that the trail behind hears all of it."""

from __future__ import annotations

from typing import Any

import pytest
from ingress_build import sent

from kvfleet.ingress.telemetry.stream_courses import KEPT, STAYS_KEPT, CourseTrail, StreamCourses
from kvproto.client import Generation
from kvproto.errors import Cancelled, DeadlineExceeded, KvfleetError, WorkerLost
from kvproto.messages import Placement, Sampling, Started
from kvproto.streams.stream import Stream
from kvproto.trace_context import Trail


class Recorded(Trail):
    def __init__(self) -> None:
        super().__init__("00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("calls", "traceparent"):
            self.calls.append(name)
        return super().__getattribute__(name)


class Clock:
    now = 1000

    def __call__(self) -> int:
        self.now += 10
        return self.now


def generation(request: str = "r", tenant: str = "acme", model: str = "demo") -> Generation:
    return Generation(model, Sampling(8), (1, 2, 3), tenant=tenant, request=request)


@pytest.fixture
def courses() -> StreamCourses:
    return StreamCourses(Clock())


def followed(courses: StreamCourses, of: Generation | None = None) -> CourseTrail:
    trail = courses.follow(of or generation(), Trail())
    trail.stream = Stream("r", 100, lambda: 0.0)
    return trail


def ends(courses: StreamCourses) -> list[tuple[str, str | None]]:
    return [(stay.worker_id, stay.end) for one in courses.of(None, None) for stay in one.stays]


def test_one_attempt_from_its_placement_to_its_end(courses: StreamCourses) -> None:
    behind = Recorded()
    trail = courses.follow(generation(), behind)
    assert trail.traceparent == behind.traceparent
    trail.stream = Stream("r", 100, lambda: 0.0)
    assert (trail.placing(0), courses.of(None, None)) == (behind.traceparent, [])
    trail.placed(Placement("r", "w0", 0))
    assert trail.attempting("w0", 0) == behind.traceparent
    trail.started(Started("r", 0, "w0", 3, {"host": 2}, 0.25))
    trail.first_token()
    assert ends(courses) == [("w0", None)]
    trail.stream.assembly.choices[0].ids.extend((7, 8))
    trail.attempt_ended(None, moved=False)
    trail.closed(None)
    assert trail.stream is None, "what it has generated is not kept for this"
    assert sent(courses.of("acme", "demo")) == [
        {
            "request_id": "r",
            "tenant": "acme",
            "model": "demo",
            "prompt_tokens": 3,
            "stays": [
                {
                    "attempt": 0,
                    "worker_id": "w0",
                    "placed_unix_ms": 1010,
                    "started_unix_ms": 1260,
                    "first_token_unix_ms": 1020,
                    "ended_unix_ms": 1030,
                    "end": "done",
                    "cached_tokens": {"host": 2},
                    "output_tokens": 2,
                }
            ],
        }
    ]
    assert behind.calls == ["placing", "placed", "attempting", "started", "first_token", "attempt_ended", "closed"]


@pytest.mark.parametrize(
    ("error", "moved", "end"),
    [
        (None, True, "moved"),
        (WorkerLost("it is gone"), False, "lost"),
        (Cancelled("by its client"), False, "cancelled"),
    ],
)
def test_how_an_attempt_ends(courses: StreamCourses, error: KvfleetError | None, moved: bool, end: str) -> None:
    trail = followed(courses)
    trail.attempting("w0", 0)
    trail.attempt_ended(error, moved=moved)
    trail.unplaced(WorkerLost("none is left"))
    trail.attempting("w1", 1)
    assert ends(courses) == [("w0", end), ("w1", None)]
    trail.closed(Cancelled("the client is closing"))
    assert ends(courses) == [("w0", end), ("w1", "cancelled")]


def test_an_attempt_that_ends_before_its_worker_is_asked_changes_none(courses: StreamCourses) -> None:
    trail = followed(courses)
    trail.attempt_ended(DeadlineExceeded("passed"), moved=False)
    assert ends(courses) == []
    trail.attempting("w0", 0)
    trail.attempt_ended(WorkerLost("it is gone"), moved=False)
    trail.attempt_ended(DeadlineExceeded("passed"), moved=False)
    trail.closed(DeadlineExceeded("passed"))
    assert ends(courses) == [("w0", "lost")]


def test_a_request_that_goes_on_later_has_one_course(courses: StreamCourses) -> None:
    for worker in ("w0", "w1"):
        trail = followed(courses)
        trail.attempting(worker, 0)
        trail.attempt_ended(Cancelled("the client left"), moved=False)
        trail.closed(None)
    assert [len(one.stays) for one in courses.of(None, None)] == [2]


def test_tenants_and_models_are_apart(courses: StreamCourses) -> None:
    for of in (generation(), generation(tenant="other"), generation("s", model="m")):
        followed(courses, of).attempting("w0", 0)
    assert [one.request_id for one in courses.of("acme", None)] == ["r", "s"]
    assert [one.request_id for one in courses.of("other", None)] == ["r"]
    assert [one.tenant for one in courses.of(None, "demo")] == ["acme", "other"]


def test_what_is_kept_is_bounded(courses: StreamCourses) -> None:
    trail = followed(courses)
    for attempt in range(STAYS_KEPT + 5):
        trail.attempting(f"w{attempt}", attempt)
        trail.attempt_ended(None, moved=True)
    assert [one.worker_id for one in courses.of(None, None)[0].stays] == [f"w{n}" for n in range(5, STAYS_KEPT + 5)]
    for number in range(KEPT):
        followed(courses, generation(f"r{number}")).attempting("w0", 0)
    assert len(courses.by_request) == KEPT
    assert courses.of(None, None)[0].request_id == "r0"
    trail.attempting("w9", 99)  # one that is not kept any more goes on
