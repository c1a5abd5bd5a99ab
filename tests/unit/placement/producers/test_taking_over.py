"""What a draining worker or placement lets go of: carried on or watched on by a replica, each reader told once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import a_core, a_generate, a_record, accepted, failed, finished

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import (
    Action,
    AskStillRunning,
    Cancel,
    CapsuleHeard,
    Fail,
    Forward,
    NobodyListens,
    TakenOver,
    Tick,
    WatchesHeard,
    WorkerAnswered,
    WorkerLeft,
    WorkerRegistered,
)
from kvfleet.placement.io import intake
from kvfleet.placement.producers.forwarding import CARRY_S, PARKED_S
from kvfleet.placement.producers.in_flight import ACKNOWLEDGE_S, LOST_GRACE_S
from kvproto import codec
from kvproto.errors import InvalidRequest
from kvproto.messages import (
    Capsule,
    Encoding,
    GenerateRequest,
    Milestone,
    Milestones,
    Moved,
    Passed,
    Progress,
    Sampling,
    State,
    Watch,
    Watches,
)

REPLY = "_wrk.w1.x"
PRODUCER = "_INBOX.p"


def a_capsule(attempt: int = 0, **fields: object) -> CapsuleHeard:
    request = GenerateRequest(
        **(  # type: ignore[arg-type]
            {
                "request": "r1",
                "attempt": attempt,
                "model": "demo",
                "sampling": Sampling(9, seed=5),
                "inbox": PRODUCER,
                "prompt_ids": (1, 2, 3),
                "output_ids": (4, 5),
                "text_sent": 7,
                "encoding": Encoding.JSON,
                "watcher": "p9",
                "source": "w1",
                "handed_over": True,
            }
            | fields
        )
    )
    return CapsuleHeard(REPLY, Capsule("acme", "w1", request))


def draining(core: PlacementCore, worker: str = "w1") -> PlacementCore:
    core.handle(WorkerRegistered(a_record(worker, state=State.DRAINING)), 0.5)
    return core


def tell(
    core: PlacementCore, worker: str, passed: Passed, *, attempt: int = 1, tenant: str = "acme", code: str | None = None
) -> list[Action]:
    one = Milestone(tenant, "r1", attempt, passed, code=code)
    return core.handle(Milestones(worker, "e1", (one,)), 2.5)


def of(kind: type, actions: list[Action]) -> list:  # type: ignore[type-arg]
    return [a for a in actions if isinstance(a, kind)]


class TestCapsule:
    def test_goes_on_at_another_worker_with_all_that_it_brought(self) -> None:
        core = draining(a_core("w1", "w2"))
        taken, forward = core.handle(a_capsule(), 1.0)
        assert taken == TakenOver(REPLY)
        assert isinstance(forward, Forward)
        request = forward.request
        assert (forward.worker, forward.tenant, request.attempt, request.watcher) == ("w2", "acme", 1, "p1")
        assert (request.source, request.handed_over, request.inbox, request.encoding) == (
            "w1", True, PRODUCER, Encoding.JSON,
        )  # fmt: skip
        assert (request.output_ids, request.text_sent, request.sampling.seed) == ((4, 5), 7, 5)
        assert core.handle(WorkerAnswered(accepted("r1", 1, "w2")), 1.01) == []  # it may not have all blocks yet
        assert tell(core, "w2", Passed.ACCEPTED) == tell(core, "w2", Passed.STARTED, attempt=0) == []
        assert tell(core, "w3", Passed.STARTED) == tell(core, "w2", Passed.STARTED, tenant="public") == []
        (cancel,) = tell(core, "w2", Passed.STARTED)
        assert isinstance(cancel, Cancel)
        assert (cancel.worker, cancel.cancel.request, cancel.cancel.attempt) == ("w1", "r1", 0)
        assert tell(core, "w2", Passed.FIRST_TOKEN) == []  # once
        core.handle(WorkerAnswered(finished("r1", 1)), 2.0)
        assert len(core.in_flight) == 0
        core.check_integrity()

    @pytest.mark.parametrize("how", ["finished", "failed", "cancelled", "milestone", "lost", "handed over again"])
    def test_the_worker_that_handed_it_over_may_go_however_it_ends_before_it_has_started(self, how: str) -> None:
        core = draining(a_core("w1", "w2", "w3", policy="round_robin"))
        (first,) = of(Forward, core.handle(a_capsule(), 1.0))
        core.handle(WorkerAnswered(accepted("r1", 1, first.worker)), 1.01)
        if how == "milestone":
            actions = tell(core, first.worker, Passed.ENDED)
        elif how == "lost":
            actions = core.handle(WorkerLeft(first.worker), 2.0) + core.handle(Tick(), 2.0 + LOST_GRACE_S)
            assert [type(a) for a in actions][-1] is Fail  # nothing comes after it
        elif how == "handed over again":
            capsule = Capsule("acme", first.worker, replace(first.request, attempt=1))
            actions = core.handle(CapsuleHeard(REPLY, capsule), 2.0)
        else:
            frame = finished("r1", 1) if how == "finished" else failed("r1", 1, how, retryable=False)
            actions = core.handle(WorkerAnswered(frame), 2.0)
        assert [(c.worker, c.cancel.attempt) for c in of(Cancel, actions) if c.worker == "w1"] == [("w1", 0)]
        core.check_integrity()

    def test_whoever_watched_it_hears_moved_and_lets_go(self) -> None:
        core = a_core("w1", "w2")
        (forward,) = of(Forward, core.handle(a_generate(tenant="acme"), 1.0))
        core.handle(WorkerAnswered(accepted("r1", 0, forward.worker)), 1.1)
        core.handle(WorkerAnswered(Moved("r1", 0, 2)), 1.2)
        assert len(core.in_flight) == 0

    def test_the_same_replica_goes_on_watching_though_moved_comes_later(self) -> None:
        core = a_core("w1")
        core.handle(a_generate(tenant="acme", inbox=PRODUCER), 1.0)
        core.handle(WorkerAnswered(accepted("r1", 0, "w1")), 1.1)
        core.handle(WorkerRegistered(a_record("w2")), 1.1)
        draining(core)
        core.handle(a_capsule(), 1.2)
        core.handle(WorkerAnswered(Moved("r1", 0, 2)), 1.21)
        core.handle(WorkerAnswered(accepted("r1", 1, "w2")), 1.25)
        assert len(core.in_flight) == 1
        actions = core.handle(WorkerLeft("w2"), 2.0) + core.handle(Tick(), 2.0 + LOST_GRACE_S)
        assert [fail.inbox for fail in of(Fail, actions)] == [PRODUCER]
        core.check_integrity()

    def test_without_a_successor_one_is_looked_for_and_found(self) -> None:
        core = draining(a_core("w1"))
        assert core.handle(a_capsule(), 1.0) == [TakenOver(REPLY)]
        assert core.handle(Tick(), 1.1 + PARKED_S) == []
        core.handle(WorkerRegistered(a_record("w2")), 3.0)
        (forward,) = of(Forward, core.handle(Tick(), 3.1 + PARKED_S))
        assert forward.worker == "w2"
        core.check_integrity()

    def test_for_ten_seconds_then_the_producer_hears_once_and_the_worker_may_go(self) -> None:
        core = draining(a_core("w1"))
        core.handle(a_capsule(), 1.0)
        actions: list[Action] = []
        for tick in range(1, 150):
            actions += core.handle(Tick(), 1.0 + tick / 10)
        (fail,) = of(Fail, actions)
        assert (fail.inbox, fail.encoding, fail.failed.code, fail.failed.retryable) == (
            PRODUCER, Encoding.JSON, "no_workers", True,
        )  # fmt: skip
        assert [cancel.worker for cancel in of(Cancel, actions)] == ["w1"]
        assert len(core.in_flight) == 0
        assert CARRY_S == 10.0

    @pytest.mark.parametrize("how", ["refuses", "silent", "deaf", "leaves"])
    def test_a_successor_that_does_not_take_it_is_passed_over(self, how: str) -> None:
        core = draining(a_core("w1", "w2", "w3", policy="round_robin"))
        (first,) = of(Forward, core.handle(a_capsule(), 1.0))
        event = {
            "refuses": WorkerAnswered(failed("r1", 1, "overloaded", retryable=True)),
            "silent": Tick(),
            "deaf": NobodyListens("r1", 1),
            "leaves": WorkerLeft(first.worker),
        }[how]
        (second,) = of(Forward, core.handle(event, 1.0 + ACKNOWLEDGE_S))
        assert {first.worker, second.worker} == {"w2", "w3"}
        assert (second.request.attempt, second.request.source, second.request.handed_over) == (2, "w1", True)

    def test_who_was_passed_over_is_asked_again_and_its_late_word_of_acceptance_does_not_count(self) -> None:
        core = draining(a_core("w1", "w2"))
        core.handle(a_capsule(), 1.0)
        (leave,) = core.handle(Tick(), 1.0 + ACKNOWLEDGE_S)  # silent
        assert (leave.worker, leave.cancel.attempt) == ("w2", 1)
        assert len(core.in_flight) == 1
        (leave,) = core.handle(WorkerAnswered(accepted("r1", 1, "w2")), 1.1)
        assert (leave.worker, leave.cancel.attempt, leave.cancel.inbox) == ("w2", 1, PRODUCER)
        (again,) = of(Forward, core.handle(Tick(), 2.0))
        assert (again.worker, again.request.attempt) == ("w2", 2)
        core.handle(WorkerAnswered(accepted("r1", 2, "w2")), 2.01)
        (cancel,) = tell(core, "w2", Passed.STARTED, attempt=2)
        assert (cancel.worker, cancel.cancel.attempt) == ("w1", 0)
        core.check_integrity()

    def test_a_replica_that_is_full_leaves_it_to_the_worker(self) -> None:
        core = draining(a_core("w1", "w2", limit=1))
        core.handle(a_generate("r9"), 1.0)
        assert core.handle(a_capsule(), 1.0) == []

    def test_two_readers_of_one_request_are_carried_on_both(self) -> None:
        core = draining(a_core("w1", "w2"))
        core.handle(a_capsule(), 1.0)
        (second,) = of(Forward, core.handle(a_capsule(inbox="_INBOX.q"), 1.0))
        assert (second.worker, second.request.inbox) == ("w2", "_INBOX.q")
        assert len(core.in_flight) == 2
        core.check_integrity()


class TestLeaving:
    """A replica stops while something is on its way to a worker."""

    @pytest.mark.parametrize("state", ["parked", "offered", "parked again"])
    def test_a_capsule_is_carried_on_by_another_replica(self, state: str) -> None:
        going = draining(a_core("w1") if state == "parked" else a_core("w1", "w2"))
        going.handle(a_capsule(deadline_ms=60_000), 1.0)
        if state == "parked again":
            going.handle(WorkerAnswered(failed("r1", 1, "overloaded", retryable=True)), 1.01)
        actions = going.forwarding.leave(2.0)
        (carry,) = of(Capsule, actions)
        assert [(c.worker, c.cancel.attempt, c.cancel.inbox) for c in of(Cancel, actions)] == (
            [("w2", 1, PRODUCER)] if state == "offered" else []
        )
        assert of(Fail, actions) == []
        assert len(going.in_flight) == len(going.bookings) == 0
        going.check_integrity()
        staying = draining(a_core("w1", "w2"))
        capsule = codec.decode(Capsule, codec.encode(carry))
        (forward,) = staying.handle(CapsuleHeard("", capsule), 5.0)
        assert isinstance(forward, Forward)
        assert forward.request.attempt == (1 if state == "parked" else 2)  # none that a worker knows as taken back
        assert (forward.request.deadline_ms, forward.request.output_ids) == (59_000, (4, 5))
        staying.handle(WorkerAnswered(accepted("r1", forward.request.attempt, "w2")), 5.1)
        (let_go,) = tell(staying, "w2", Passed.STARTED, attempt=forward.request.attempt)
        assert (let_go.worker, let_go.cancel.attempt) == ("w1", 0)  # type: ignore[union-attr]

    def test_what_is_only_offered_is_taken_back_and_its_producer_hears(self) -> None:
        core = a_core("w1")
        core.handle(a_generate(inbox=PRODUCER), 1.0)
        leave, fail = core.forwarding.leave(1.01)
        assert isinstance(leave, Cancel)
        assert isinstance(fail, Fail)
        assert (leave.worker, leave.cancel.attempt, leave.cancel.inbox) == ("w1", 0, PRODUCER)
        assert (fail.inbox, fail.failed.code, fail.failed.retryable) == (PRODUCER, "unavailable", True)
        assert len(core.in_flight) == len(core.bookings) == 0

    def test_a_source_waits_no_longer_for_what_is_watched(self) -> None:
        core = draining(a_core("w1", "w2"))
        core.handle(a_capsule(), 1.0)
        core.handle(WorkerAnswered(accepted("r1", 1, "w2")), 1.01)
        (let_go,) = core.forwarding.leave(2.0)
        assert (let_go.worker, let_go.cancel.attempt) == ("w1", 0)  # type: ignore[union-attr]
        assert len(core.in_flight.watches()) == 1

    def test_who_takes_over_and_is_full_tells_the_producer(self) -> None:
        core = draining(a_core("w1", "w2", limit=1))
        core.handle(a_generate("r9"), 1.0)
        actions = core.handle(CapsuleHeard("", a_capsule().capsule), 1.0)
        assert [(f.inbox, f.failed.code) for f in of(Fail, actions)] == [(PRODUCER, "unavailable")]
        assert [c.worker for c in of(Cancel, actions)] == ["w1"]
        assert len(core.in_flight) == 1


class TestWatches:
    def watch(self, **fields: object) -> WatchesHeard:
        one = {"tenant": "acme", "request": "r1", "attempt": 2, "worker": "w1", "epoch": "e1", "inbox": PRODUCER}
        return WatchesHeard(Watches("p9", (Watch(**(one | fields)),)))  # type: ignore[arg-type]

    def test_what_a_replica_lets_go_of_is_watched_on_by_another(self) -> None:
        left = a_core("w1")
        left.handle(a_generate(tenant="acme", inbox=PRODUCER, encoding=Encoding.JSON), 1.0)
        left.handle(WorkerAnswered(accepted("r1", 0, "w1")), 1.1)
        (watch,) = left.in_flight.watches()
        assert watch == Watch("acme", "r1", 0, "w1", "e1", PRODUCER, Encoding.JSON)
        core = a_core("w1")
        (ask,) = core.handle(WatchesHeard(Watches("p9", (watch,))), 2.0)
        assert isinstance(ask, AskStillRunning)  # it may have ended on the way
        core.handle(WorkerAnswered(Progress("r1", 0, 5)), 2.1)
        actions = core.handle(WorkerLeft("w1"), 3.0) + core.handle(Tick(), 3.0 + LOST_GRACE_S)
        assert [(f.inbox, f.encoding, f.failed.code) for f in of(Fail, actions)] == [
            (PRODUCER, Encoding.JSON, "worker_lost")
        ]

    @pytest.mark.parametrize("told", ["milestone", "notice"])
    def test_its_end_is_heard(self, told: str) -> None:
        core = a_core("w1")
        core.handle(self.watch(), 2.0)
        if told == "notice":
            core.handle(WorkerAnswered(finished("r1", 2)), 2.1)
        else:
            core.handle(Milestones("w1", "e1", (Milestone("acme", "r1", 2, Passed.ENDED),)), 2.1)
        assert len(core.in_flight) == 0

    def test_who_is_told_twice_answers_twice_and_watches_once(self) -> None:
        core = a_core("w1")
        heard = WatchesHeard(self.watch().watches, "_plc.p9.x")
        for now in (2.0, 2.1):
            assert core.handle(heard, now)[0] == TakenOver("_plc.p9.x")
        assert len(core.in_flight) == 1

    def test_what_is_known_to_have_ended_is_not_watched(self) -> None:
        core = a_core("w1")
        core.handle(Milestones("w1", "e1", (Milestone("acme", "r1", 2, Passed.ENDED),)), 1.0)
        assert core.handle(self.watch(), 2.0) == []

    def test_of_one_that_was_cancelled_on_the_way_the_worker_is_asked_and_the_producer_told(self) -> None:
        core = a_core("w1")
        tell(core, "w1", Passed.ENDED, attempt=2, code="cancelled")
        (ask,) = core.handle(self.watch(), 2.6)
        assert isinstance(ask, AskStillRunning)
        (fail,) = core.handle(WorkerAnswered(failed("r1", 2, "cancelled", retryable=False)), 2.7)
        assert isinstance(fail, Fail)
        assert (fail.inbox, fail.failed.code) == (PRODUCER, "cancelled")

    @pytest.mark.parametrize("worker", ["gone", "in another life"])
    def test_what_was_lost_meanwhile_is_told(self, worker: str) -> None:
        core = a_core()
        if worker != "gone":
            core.handle(WorkerRegistered(a_record("w1", epoch="e2")), 1.0)
        core.handle(self.watch(), 2.0)
        (fail,) = of(Fail, core.handle(Tick(), 2.0 + LOST_GRACE_S))
        assert (fail.inbox, fail.failed.code, fail.failed.attempt) == (PRODUCER, "worker_lost", 3)


class TestIntake:
    def test_reads_what_workers_and_replicas_send(self) -> None:
        event = a_capsule()
        assert intake.read_capsule(REPLY, codec.encode(event.capsule)) == event

    def test_a_replica_of_an_older_version_waits_for_no_answer(self) -> None:
        assert intake.read_capsule("", codec.encode(a_capsule().capsule)).reply == ""
        assert intake.read_watches("", codec.encode(TestWatches().watch().watches)).reply == ""

    @pytest.mark.parametrize("reply", ["x", "kvf.worker.w1.cancel"])
    def test_answers_inboxes_alone(self, reply: str) -> None:
        with pytest.raises(InvalidRequest):
            intake.read_capsule(reply, codec.encode(a_capsule().capsule))
        with pytest.raises(InvalidRequest):
            intake.read_watches(reply, codec.encode(TestWatches().watch().watches))

    @pytest.mark.parametrize(
        "wrong", [{"inbox": "kvf.worker.w1.cancel"}, {"inbox": "_ing.x.b"}, {"request": "r.1"}, {"request": ""}]
    )
    def test_no_subject_can_be_made_of_what_they_say(self, wrong: dict[str, str]) -> None:
        with pytest.raises(InvalidRequest):
            intake.read_capsule(REPLY, codec.encode(a_capsule(**wrong).capsule))
        (watch,) = TestWatches().watch(**wrong).watches.items
        with pytest.raises(InvalidRequest):
            intake.read_watches(REPLY, codec.encode(Watches("p9", (watch,))))

    @pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\x80", b"\x07\x80", b"{}"])
    def test_garbage_is_refused(self, data: bytes) -> None:
        for read in (lambda: intake.read_capsule(REPLY, data), lambda: intake.read_watches(REPLY, data)):
            with pytest.raises(InvalidRequest):
                read()
