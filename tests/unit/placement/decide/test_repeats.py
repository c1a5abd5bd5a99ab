"""A request that is asked for again: attached to what runs or just ended, and done anew only if nobody has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import PREFIX, a_beat, a_core, a_generate, a_record, accepted, an_ask, failed, finished

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.decide.repeats import ENDED_S, PLACED_S, Repeats
from kvfleet.placement.events import (
    Action,
    Answer,
    AskStillRunning,
    Cancel,
    Fail,
    Forward,
    PlaceAsked,
    Tick,
    WorkerAnswered,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.producers.forwarding import ATTACH_S
from kvfleet.placement.producers.in_flight import LOST_GRACE_S
from kvproto.messages import Booked, BookedBatch, Milestone, Milestones, Passed, Placement

KEY = ("public", "r1")


def place(core: PlacementCore, now: float, tenant: str = "public", **fields: object) -> Placement:
    (answer,) = core.handle(PlaceAsked("_INBOX.x", tenant, an_ask(**fields)), now)  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    return answer.placement


def tell(
    core: PlacementCore, worker: str, passed: Passed, now: float, *, attempt: int = 0, code: str | None = None
) -> list[Action]:
    one = Milestone("public", "r1", attempt, passed, code=code)
    return core.handle(Milestones(worker, "e1", (one,)), now)


def the_forward(actions: list[Action]) -> Forward:
    (forward,) = [a for a in actions if isinstance(a, Forward)]
    return forward


def the_failures(actions: list[Action]) -> list[str]:
    return [a.inbox for a in actions if isinstance(a, Fail)]


class TestClients:
    def test_what_runs_is_attached_to_and_booked_once(self) -> None:
        core = a_core("w1", "w2", "w3", policy="round_robin")
        first = place(core, 1.0)
        again = place(core, 1.1)
        assert (again.worker, again.attempt, again.attached, again.expected_hit) == (first.worker, 0, True, {})
        assert not first.attached
        assert len(core.bookings) == 1
        tell(core, first.worker, Passed.ACCEPTED, 1.2)
        core.handle(a_beat(first.worker), 20.0)
        assert place(core, 20.0).attached  # long after the booking is forgotten

    def test_a_later_attempt_of_its_own_is_placed(self) -> None:
        core = a_core("w1", "w2", policy="round_robin")
        first = place(core, 1.0)
        second = place(core, 2.0, attempt=1, excluded=(first.worker,))
        assert (second.attached, second.attempt) == (False, 1)
        assert second.worker != first.worker
        assert place(core, 2.1).worker == second.worker  # a repeat goes to the latest

    def test_nothing_is_attached_to_a_worker_that_is_excluded(self) -> None:
        core = a_core("w1", "w2", policy="round_robin")
        first = place(core, 1.0)
        again = place(core, 1.1, excluded=(first.worker,))
        assert (again.attached, again.attempt) == (False, 1)

    @pytest.mark.parametrize("gone", ["left", "restarted"])
    def test_what_was_lost_with_its_worker_is_done_anew(self, gone: str) -> None:
        core = a_core("w1")
        place(core, 1.0)
        tell(core, "w1", Passed.STARTED, 1.1)
        restarted = WorkerRegistered(a_record("w1", epoch="e2"))
        core.handle(WorkerLeft("w1") if gone == "left" else restarted, 2.0)
        if gone == "left":
            core.handle(WorkerRegistered(a_record("w1", epoch="e2")), 2.1)
        again = place(core, 2.2)
        assert (again.attached, again.attempt) == (False, 1)
        core.check_integrity()

    def test_a_result_is_repeated_as_long_as_its_worker_can(self) -> None:
        core = a_core("w1")
        place(core, 1.0)
        tell(core, "w1", Passed.ENDED, 5.0)
        core.handle(Tick(), 5.0 + ENDED_S - 1)
        assert place(core, 5.0 + ENDED_S - 1).attached
        core.handle(Tick(), 5.1 + ENDED_S)
        again = place(core, 5.1 + ENDED_S)
        assert (again.attached, again.attempt) == (False, 0)

    @pytest.mark.parametrize("code", ["cancelled", "engine_failure", "moved", "overloaded"])
    def test_what_ended_otherwise_than_finished_is_done_anew(self, code: str) -> None:
        core = a_core("w1")
        place(core, 1.0)
        tell(core, "w1", Passed.ENDED, 5.0, code=code)
        again = place(core, 5.1)
        assert (again.attached, again.attempt) == (False, 1)

    def test_another_tenants_request_of_the_same_id_is_another(self) -> None:
        core = a_core("w1")
        place(core, 1.0)
        assert not place(core, 1.1, tenant="acme").attached

    def test_other_replicas_know_from_what_is_shared_and_from_milestones(self) -> None:
        core = a_core("w1", "w2")
        shared = Booked("public", "r1", 2, "w2", 10)
        core.handle(BookedBatch("p2", (shared,)), 1.0)
        assert (place(core, 1.1).worker, place(core, 1.1).attempt) == ("w2", 2)
        tell(core, "w1", Passed.ACCEPTED, 1.2, attempt=3)
        assert (place(core, 1.3).worker, place(core, 1.3).attempt) == ("w1", 3)
        tell(core, "w2", Passed.ENDED, 1.4, attempt=2, code="moved")  # a late word of what it was before
        assert place(core, 1.5).attached

    def test_a_placement_that_nobody_made_use_of_is_forgotten(self) -> None:
        core = a_core("w1")
        place(core, 1.0)
        core.handle(Tick(), 1.1 + PLACED_S)
        assert not place(core, 1.1 + PLACED_S).attached

    def test_it_is_bounded(self) -> None:
        repeats = Repeats(max_kept=8)
        for number in range(100):
            key = "public", f"r{number}"
            repeats.place(key, "w1", "e1", 0, float(number))
            if number % 3:
                repeats.on_milestone("w1", "e1", Milestone(*key, 0, Passed.STARTED), float(number))
            if number % 3 == 2:
                repeats.on_milestone("w1", "e1", Milestone(*key, 0, Passed.ENDED), float(number))
            repeats.check_integrity()
        assert 16 < len(repeats) <= 24


class TestProducers:
    def begin(self, core: PlacementCore) -> Forward:
        first = the_forward(core.handle(a_generate(inbox="_INBOX.a"), 1.0))
        core.handle(WorkerAnswered(accepted("r1", 0, first.worker)), 1.01)
        return first

    def test_a_second_reader_gets_the_same_attempt_of_the_same_worker(self) -> None:
        core = a_core("w1", "w2", "w3", policy="round_robin")
        first = self.begin(core)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b"), 1.1))
        assert (again.worker, again.request.attempt, again.request.inbox) == (first.worker, 0, "_INBOX.b")
        assert again.request.sampling == first.request.sampling
        assert again.reply != first.reply
        assert again.reply.endswith(".0")
        key = again.reply.split(".")[-2]
        core.handle(WorkerAnswered(accepted("r1", 0, first.worker), key), 1.11)
        assert len(core.in_flight) == 2
        actions = core.handle(WorkerLeft(first.worker), 2.0) + core.handle(Tick(), 2.0 + LOST_GRACE_S)
        assert sorted(the_failures(actions)) == ["_INBOX.a", "_INBOX.b"]
        core.check_integrity()
        assert len(core.in_flight) == 0

    def test_a_replica_that_never_saw_it_attaches_and_hears_of_the_end(self) -> None:
        core = a_core("w1", "w2")
        tell(core, "w2", Passed.ACCEPTED, 1.0, attempt=1)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b"), 1.1))
        assert (again.worker, again.request.attempt) == ("w2", 1)
        core.handle(WorkerAnswered(accepted("r1", 1, "w2")), 1.2)
        assert len(core.in_flight) == 1
        tell(core, "w2", Passed.ENDED, 1.3, attempt=1)
        assert len(core.in_flight) == 0
        assert the_failures(core.handle(WorkerLeft("w2"), 2.0) + core.handle(Tick(), 3.0)) == []

    def test_a_result_is_asked_of_who_has_it(self) -> None:
        core = a_core("w1", "w2", policy="round_robin")
        first = self.begin(core)
        core.handle(WorkerAnswered(finished("r1", 0)), 1.5)
        tell(core, first.worker, Passed.ENDED, 1.5)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b"), 2.0))
        assert (again.worker, again.request.attempt) == (first.worker, 0)

    def test_a_refusal_of_the_repeat_is_the_repeats_alone(self) -> None:
        core = a_core("w1", "w2")
        first = self.begin(core)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b", prompt="something else"), 1.1))
        refusal = failed("r1", 0, "invalid_request", retryable=False)
        actions = core.handle(WorkerAnswered(refusal, again.reply.split(".")[-2]), 1.2)
        assert the_failures(actions) == ["_INBOX.b"]
        assert len(core.in_flight) == 1
        core.handle(WorkerLeft(first.worker), 2.0)
        assert the_failures(core.handle(Tick(), 2.0 + LOST_GRACE_S)) == ["_INBOX.a"]

    def test_a_repeat_on_the_same_inbox_is_watched_once(self) -> None:
        core = a_core("w1")
        self.begin(core)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.a"), 1.1))
        assert again.request.attempt == 0
        key = again.reply.removeprefix(f"{PREFIX}.r.").removesuffix(".0")  # a worker writes there, so it is our inbox
        assert key.partition("~")[0] == "r1" != key
        for answer in (
            accepted("r1", 0, "w1"),
            failed("r1", 0, "unavailable", retryable=True),
            failed("r1", 0, "invalid_request", retryable=False),
            finished("r1", 0),
        ):
            assert core.handle(WorkerAnswered(answer, key), 1.2) == []
            assert len(core.in_flight) == 1
        assert core.forwarding.late_acceptances_total == 0
        core.check_integrity()

    def test_what_its_worker_has_not_from_the_beginning_on_is_done_once_more(self) -> None:
        core = a_core("w1", "w2")
        first = self.begin(core)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b"), 1.1))
        tell(core, first.worker, Passed.STARTED, 1.2)
        refusal = failed("r1", 0, "unavailable", retryable=True)
        key = again.reply.split(".")[-2]
        anew = the_forward(core.handle(WorkerAnswered(refusal, key), 1.3))
        assert (anew.request.attempt, anew.request.inbox) == (1, "_INBOX.b")
        core.handle(WorkerAnswered(accepted("r1", 1, anew.worker), key), 1.31)
        assert len(core.in_flight) == 2
        core.handle(WorkerAnswered(finished("r1", 1), key), 1.4)
        assert len(core.in_flight) == 1
        core.check_integrity()

    def test_nothing_is_attached_at_a_worker_of_an_older_version(self) -> None:
        core = a_core()
        for record in (a_record("w1"), a_record("w2")):
            core.handle(WorkerRegistered(replace(record, attaches=False)), 0.0)
        self.begin(core)
        again = the_forward(core.handle(a_generate(inbox="_INBOX.b"), 1.1))
        assert again.request.attempt == 1
        actions = core.handle(Tick(), 1.2) + core.handle(Tick(), 4.0)
        assert {c.cancel.attempt for c in actions if isinstance(c, Cancel)} <= {1, 2}  # the first one's goes on
        assert core.handle(a_generate(inbox="_INBOX.a"), 4.1) == []  # its answer is on the way there
        placed = place(core, 4.1)
        assert not placed.attached
        assert placed.attempt > 0

    def test_a_worker_that_turns_out_to_know_of_readers_is_attached_to(self) -> None:
        core = a_core()
        core.handle(WorkerRegistered(replace(a_record("w1"), attaches=False)), 0.0)
        self.begin(core)
        core.handle(WorkerRegistered(a_record("w1")), 1.05)
        assert the_forward(core.handle(a_generate(inbox="_INBOX.b"), 1.1)).request.attempt == 0

    def test_who_has_it_and_does_not_answer_costs_the_repeat_alone(self) -> None:
        core = a_core("w1", "w2")
        first = self.begin(core)
        core.handle(a_generate(inbox="_INBOX.b"), 1.1)
        assert the_failures(core.handle(Tick(), 1.0 + ATTACH_S)) == []
        actions = core.handle(Tick(), 1.2 + ATTACH_S)
        assert the_failures(actions) == ["_INBOX.b"]
        (leave,) = [a for a in actions if isinstance(a, Cancel)]
        assert (leave.worker, leave.cancel.attempt, leave.cancel.inbox) == (first.worker, 0, "_INBOX.b")
        assert len(core.in_flight) == 1

    def test_what_all_refused_is_offered_anew_as_a_later_attempt(self) -> None:
        core = a_core("w1")
        the_forward(core.handle(a_generate(), 1.0))
        refusal = failed("r1", 0, "draining", retryable=True)
        assert the_failures(core.handle(WorkerAnswered(refusal), 1.01))
        again = the_forward(core.handle(a_generate(), 1.02))
        assert again.request.attempt == 1

    def test_no_question_is_asked_about_a_repeat_that_is_not_watched(self) -> None:
        core = a_core("w1")
        self.begin(core)
        core.handle(a_generate(inbox="_INBOX.a"), 1.1)
        core.handle(a_beat("w1"), 17.0)
        assert len([a for a in core.handle(Tick(), 17.0) if isinstance(a, AskStillRunning)]) == 1


def test_the_least_time_to_wait_that_a_worker_named_is_passed_on() -> None:
    core = a_core("w1", "w2")
    core.handle(a_generate(), 1.0)
    told = []
    for attempt, wait in ((0, 7.0), (1, 3.0)):
        refusal = failed("r1", attempt, "overloaded", retryable=True)
        actions = core.handle(WorkerAnswered(type(refusal)(**{**_fields(refusal), "retry_after_s": wait})), 1.01)
        told += [a.failed for a in actions if isinstance(a, Fail)]
    assert [(one.code, one.retry_after_s) for one in told] == [("no_workers", 3.0)]


def _fields(frame: object) -> dict[str, object]:
    return {name: getattr(frame, name) for name in frame.__slots__}  # type: ignore[attr-defined]


class CountedName(str):
    """A worker's name that counts what it is compared with."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        type(self).compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_dropping_a_worker_costs_what_it_had_and_not_what_others_have() -> None:
    repeats = Repeats()
    for number in range(6_000):
        worker = CountedName("gone" if number % 2_000 == 0 else f"w{number % 50}")
        key = "public", f"r{number}"
        repeats.place(key, worker, "e1", 0, 1.0)
        if number >= 2_000:
            repeats.on_milestone(worker, "e1", Milestone(*key, 0, Passed.STARTED), 2.0)
        if number >= 4_000:
            repeats.on_milestone(worker, "e1", Milestone(*key, 0, Passed.ENDED), 3.0)
    CountedName.compared = 0
    repeats.drop_worker("gone")
    assert CountedName.compared < 50
    repeats.check_integrity()
    for number in (0, 2_000, 4_000):
        known = repeats.find(("public", f"r{number}"))
        assert known is not None
        assert not known.is_there
    assert repeats.find(("public", "r1")).is_there  # type: ignore[union-attr]
    CountedName.compared = 0
    repeats.drop_worker("nobody")
    assert CountedName.compared < 50


class TestTwoReplicasAtOnce:
    """One request is asked for twice, of two replicas, before either has told the other: both place attempt 0."""

    @pytest.mark.parametrize("workers", [("w1",), ("w1", "w2")])
    def test_each_asker_has_a_worker_and_whoever_comes_next_joins_one_of_them(self, workers: tuple[str, ...]) -> None:
        first, second = a_core(*workers, policy="round_robin"), a_core(*workers, policy="round_robin")
        if len(workers) == 2:
            place(second, 0.5, request="other", session="s")  # so that the next one goes to the other worker
            second.bookings.release(("public", "other"), 0.5)
        given = [place(core, 1.0) for core in (first, second)]
        assert [one.attempt for one in given] == [0, 0]
        assert not any(one.attached for one in given)
        assert {one.worker for one in given} == set(workers), (
            "one worker, where the second joins; or two, who both do it"
        )
        for core, other in ((first, given[1]), (second, given[0])):
            batch = BookedBatch("another", (Booked("public", "r1", 0, other.worker, 3),))
            core.handle(batch, 1.002)
            assert len(core.bookings) == 1, "it is booked once, at the worker that was heard of last"
            for one in given:
                tell(core, one.worker, Passed.ACCEPTED, 1.1)
                tell(core, one.worker, Passed.STARTED, 1.2)
            again = place(core, 1.3)
            assert (again.attached, again.attempt) == (True, 0)
            assert again.worker == given[-1].worker, "who has said so last, at every replica"
            for one in given:
                tell(core, one.worker, Passed.ENDED, 2.0)
            core.handle(a_beat(given[0].worker), 3.0)
            core.handle(Tick(), 8.0)
            assert (len(core.bookings), core.bookings.running) == (0, 0)
            core.check_integrity()
