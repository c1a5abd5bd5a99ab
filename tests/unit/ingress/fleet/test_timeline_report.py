"""The course of streams as placements remember it, and the moments of workers as an ingress hears of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from ingress_build import sent

from kvfleet.ingress.fleet.openapi import openapi_document
from kvfleet.ingress.fleet.timeline import KEPT, Turning, WorkerMoment, WorkerMoments, timeline_report
from kvfleet.ingress.telemetry.stream_courses import Stay, StreamCourse
from kvproto.fleet_view import Change, WorkerView
from kvproto.messages import Actual, Decision, State, WorkerRecord

ENDED = Actual(True, {"device": 16}, 0.1, 0.25, 9, True, None, 1.5)
RUNS = Actual(True, {"host": 32}, 0.1, 0.25)
T0 = 1_763_700_000_000


def decided(request: str, attempt: int, worker: str, at: int, actual: Actual, tenant: str = "acme") -> Decision:
    return Decision(
        request, attempt, tenant, "demo", T0 + at, "cost", worker, "cheapest", 40, {}, None, (), 0, "p0", actual
    )


def report(
    *decisions: Decision,
    own: tuple[StreamCourse, ...] = (),
    moments: tuple[WorkerMoment, ...] = (),
    limit: int = 50,
    every_worker: bool = True,
) -> dict[str, Any]:
    """As it is sent, in its described form."""
    answer: dict[str, Any] = sent(timeline_report(T0 + 9000, own, decisions, moments, limit, every_worker=every_worker))
    components = openapi_document()["components"]
    jsonschema_rs.validate({**components["schemas"]["TimelineAnswer"], "components": components}, answer)
    return answer


def stays(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    (stream,) = answer["streams"]
    return [
        (one["worker_id"], one["end"], one["ended_unix_ms"] and one["ended_unix_ms"] - T0) for one in stream["stays"]
    ]


def test_a_stream_has_its_moments() -> None:
    answer = report(decided("r", 0, "w0", 0, ENDED))
    assert answer == {
        "now_unix_ms": T0 + 9000,
        "streams": [
            {
                "request_id": "r",
                "tenant": "acme",
                "model": "demo",
                "prompt_tokens": 40,
                "stays": [
                    {
                        "attempt": 0,
                        "worker_id": "w0",
                        "placed_unix_ms": T0,
                        "started_unix_ms": T0 + 100,
                        "first_token_unix_ms": T0 + 250,
                        "ended_unix_ms": T0 + 1500,
                        "end": "done",
                        "cached_tokens": {"device": 16},
                        "output_tokens": 9,
                    }
                ],
            }
        ],
        "workers": [],
    }


def test_one_that_runs_has_no_end_yet() -> None:
    assert stays(report(decided("r", 0, "w0", 0, RUNS))) == [("w0", None, None)]
    assert report(decided("r", 0, "w0", 0, Actual()))["streams"][0]["stays"][0]["started_unix_ms"] is None


def test_a_hand_over_and_its_successor() -> None:
    moved = Actual(True, {}, 0.1, 0.2, 5, True, "moved", 2.0)
    both = decided("r", 1, "w1", 2010, RUNS), decided("r", 0, "w0", 0, moved)
    assert stays(report(*both)) == [("w0", "moved", 2000), ("w1", None, None)]


@pytest.mark.parametrize(
    ("what", "at", "next_at", "expected"),
    [
        (Turning.DIED, 700, None, ("w0", "lost", 700)),
        (Turning.DIED, 700, 900, ("w0", "lost", 700)),
        (Turning.DIED, 900, 700, ("w0", "lost", 700)),  # its client saw it sooner
        (Turning.DIED, -700, None, ("w0", None, None)),  # an earlier life of that name
        (Turning.DRAINED, 700, None, ("w0", "lost", 700)),
        (Turning.DRAINING, 700, None, ("w0", None, None)),
        (Turning.JOINED, 700, 900, ("w0", "lost", 900)),
    ],
)
def test_what_never_told_of_its_end(
    what: Turning, at: int, next_at: int | None, expected: tuple[str, str | None, int | None]
) -> None:
    following = [] if next_at is None else [decided("r", 1, "w1", next_at, RUNS)]
    moments = WorkerMoment(T0 + at - 1, "w9", Turning.DIED), WorkerMoment(T0 + at, "w0", what)
    assert stays(report(*following, decided("r", 0, "w0", 0, RUNS), moments=moments))[0] == expected


def test_of_two_replicas_that_decided_the_same_attempt_the_one_counts_that_was_followed() -> None:
    accepted, unheard = decided("r", 0, "w0", 5, RUNS), decided("r", 0, "w1", 9, Actual())
    assert [one[0] for one in stays(report(accepted, unheard))] == ["w0"]
    assert [one[0] for one in stays(report(unheard, accepted))] == ["w0"]


def test_streams_are_newest_first_by_their_last_attempt_and_tenants_with_one_id_are_two() -> None:
    answer = report(
        decided("r", 0, "w0", 0, RUNS), decided("s", 0, "w0", 5, RUNS), decided("r", 1, "w1", 9, RUNS),
        decided("s", 0, "w0", 7, RUNS, tenant="other"),
    )  # fmt: skip
    assert [(one["request_id"], one["tenant"], len(one["stays"])) for one in answer["streams"]] == [
        ("r", "acme", 2), ("s", "other", 1), ("s", "acme", 1),
    ]  # fmt: skip


def test_who_may_not_see_the_fleet_sees_the_workers_of_its_streams() -> None:
    moments = WorkerMoment(T0, "w0", Turning.DIED), WorkerMoment(T0 + 1, "w1", Turning.JOINED)
    for every_worker, seen in ((True, ["w0", "w1"]), (False, ["w1"])):
        answer = report(decided("r", 0, "w1", 0, RUNS), moments=moments, every_worker=every_worker)
        assert [one["worker_id"] for one in answer["workers"]] == seen


def test_an_ingress_knows_its_own_streams_better_than_placement() -> None:
    own = StreamCourse("r", "acme", "demo", 40, [Stay(0, "w0", T0, None, None, T0 + 70, "lost", None, 3)])
    answer = report(decided("r", 0, "w0", 0, RUNS), decided("s", 0, "w1", 5, RUNS), own=(own,))
    assert [one["request_id"] for one in answer["streams"]] == ["s", "r"]
    assert answer["streams"][1] == sent(own)
    assert [one["request_id"] for one in report(decided("s", 0, "w1", 5, RUNS), own=(own,), limit=1)["streams"]] == [
        "s"
    ]
    others = replace(own, tenant="other")
    assert len(report(decided("r", 0, "w0", 0, RUNS), own=(others,))["streams"]) == 2


def heard(*changes: tuple[Change, State]) -> list[tuple[int, str, str]]:
    clock = iter(range(1_000_000))
    moments = WorkerMoments(lambda: next(clock))
    for change, state in changes:
        dead = state is State.DEAD
        record = WorkerRecord("w0", "e", "l", State.READY if dead else state, "m", "a", "h", 1, (1, 1))
        view = WorkerView(record, dead_since=1.0 if dead else None)
        moments.on_change(change, view)
    return [(one.unix_ms, one.worker_id, one.what.value) for one in moments.moments]


def whats(*changes: tuple[Change, State]) -> list[str]:
    return [what for _, _, what in heard(*changes)]


def test_a_worker_that_drained_did_not_die() -> None:
    assert heard(
        (Change.JOINED, State.STARTING), (Change.UPDATED, State.READY), (Change.UPDATED, State.DRAINING),
        (Change.UPDATED, State.DRAINING), (Change.LEFT, State.DEAD),
    ) == [(0, "w0", "joined"), (1, "w0", "draining"), (2, "w0", "drained")]  # fmt: skip
    assert whats((Change.UPDATED, State.READY), (Change.LEFT, State.DEAD)) == ["died"]


def test_a_new_life_of_the_same_name_ends_the_one_before() -> None:
    assert whats((Change.NEW_EPOCH, State.STARTING)) == ["died", "joined"]
    drained = (Change.UPDATED, State.DRAINING), (Change.NEW_EPOCH, State.READY), (Change.LEFT, State.DEAD)
    assert whats(*drained) == ["draining", "drained", "joined", "died"]


def test_the_oldest_moments_give_way() -> None:
    many = heard(*[(Change.LEFT, State.DEAD)] * (KEPT + 10))
    assert (len(many), many[0][0]) == (KEPT, 10)
