"""Bookings: every way out releases, nothing stays."""

from __future__ import annotations

from dataclasses import replace

from placement_build import a_beat, a_core, a_record, an_acceptance, an_ask, backlog_in, load_of, requests_in
from placement_rig import Rig

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Answer, PlaceAsked, Tick, WorkerLeft, WorkerRegistered
from kvfleet.placement.workers.bookings import BOOKING_LIMIT_S, HEARTBEAT_PERIOD_S, Bookings
from kvfleet.placement.workers.workloads import Workloads
from kvproto.messages import Booked, BookedBatch, Passed, PlaceRequest, State


def asked(ask: PlaceRequest, tenant: str = "public") -> PlaceAsked:
    return PlaceAsked("_INBOX.x", tenant, ask)


def booked(core: PlacementCore) -> int:
    core.check_integrity()
    return core.stats().booked


def test_a_placement_is_booked_before_it_is_answered() -> None:
    core = a_core("w1", "w2")
    (answer,) = core.handle(asked(an_ask()), 1.0)
    assert isinstance(answer, Answer)
    assert answer.placement.request == "r1"
    assert booked(core) == 1
    assert load_of(core, answer.placement.worker) == 1


def test_a_heartbeat_takes_over_what_it_can_have_seen() -> None:
    core = a_core("w1")
    core.handle(asked(an_ask("old")), 1.0)
    core.handle(asked(an_ask("new")), 1.4)
    core.handle(a_beat("w1", running=1), 1.0 + HEARTBEAT_PERIOD_S)
    assert booked(core) == 2  # not more than a period later: it may be too early to show
    core.handle(a_beat("w1", running=1), 1.01 + HEARTBEAT_PERIOD_S)
    assert booked(core) == 1
    assert load_of(core, "w1") == 2


def test_a_heartbeat_of_another_life_takes_over_nothing() -> None:
    core = a_core("w1")
    core.handle(asked(an_ask()), 1.0)
    core.handle(a_beat("w1", epoch="e0", running=9), 3.0)
    assert booked(core) == 1
    assert core.fleet.workers["w1"].load.running == 0


def test_another_attempt_replaces_the_booking() -> None:
    core = a_core("w1", "w2")
    core.handle(asked(an_ask()), 1.0)
    core.handle(asked(an_ask(attempt=1, excluded=("w1",))), 1.1)
    assert booked(core) == 1
    assert core.bookings.requests_at("w1") == 0


def test_tenants_do_not_release_one_another() -> None:
    core = a_core("w1")
    core.handle(asked(an_ask(), "one"), 1.0)
    core.handle(asked(an_ask(), "two"), 1.0)
    assert booked(core) == 2


def test_a_worker_that_leaves_or_restarts_takes_its_bookings_along() -> None:
    core = a_core("w1", "w2")
    for i in range(20):
        core.handle(asked(an_ask(f"r{i}", session=f"s{i}")), 1.0)
    at = {w: core.bookings.requests_at(w) for w in ("w1", "w2")}
    core.handle(WorkerLeft("w1"), 1.1)
    assert booked(core) == at["w2"]
    core.handle(WorkerRegistered(a_record("w2", epoch="e2")), 1.2)
    assert booked(core) == 0


def test_only_who_goes_without_draining_is_counted_as_lost() -> None:
    core = a_core("w1", "w2")
    core.handle(WorkerRegistered(replace(a_record("w1"), state=State.DRAINING)), 1.0)
    core.handle(WorkerLeft("w1"), 1.1)
    assert core.undrained_total == 0
    core.handle(WorkerLeft("w2"), 1.2)
    core.handle(WorkerLeft("w2"), 1.3)
    assert core.undrained_total == 1


def test_without_heartbeats_a_booking_expires() -> None:
    core = a_core("w1")
    core.handle(asked(an_ask()), 1.0)
    core.handle(Tick(), 1.0 + BOOKING_LIMIT_S)
    assert booked(core) == 1
    core.handle(Tick(), 1.1 + BOOKING_LIMIT_S)
    assert booked(core) == 0


def test_releasing_twice_changes_nothing() -> None:
    workloads = Workloads()
    column = workloads.add(0, 16, 0.0)
    bookings = Bookings(workloads)
    bookings.book(Booked("t", "r", 0, "w", 10), column, 1.0)
    assert requests_in(workloads, column) == 1
    for _ in range(2):
        bookings.release(("t", "r"), 1.0)
        assert (len(bookings), bookings.requests_at("w")) == (0, 0)
        assert requests_in(workloads, column) == 0
    bookings.check_integrity()
    workloads.check_integrity()


def test_a_worker_that_is_quicker_than_the_word_of_a_booking_is_not_counted_twice() -> None:
    """Another replica shares its booking when the worker has already said what became of it."""
    rig = Rig("w0")
    running = (Passed.ACCEPTED, Passed.STARTED, Passed.FIRST_TOKEN)
    rig.pass_("w0", "running", *running, prompt=500)
    rig.pass_("w0", "over", *running, Passed.ENDED, prompt=500)
    for request in ("running", "over"):
        rig.tell(BookedBatch("p9", (Booked("public", request, 0, "w0", 5000),)))
    assert (len(rig.core.bookings), rig.core.bookings.running) == (0, 1)
    rig.beat("w0", running=1)
    assert load_of(rig.core, "w0") == 1
    assert backlog_in(rig.core.workloads, 0) == 0
    rig.core.check_integrity()


def test_what_a_heartbeat_has_counted_is_not_corrected_again() -> None:
    rig = Rig("w0")
    for number in range(10):
        rig.place(f"r{number}", prompt="x" * 4000)  # a thousand tokens, it seems
        rig.pass_("w0", f"r{number}", Passed.ACCEPTED)
    rig.beat("w0", queued=1000, waiting=10)  # it is a hundred each
    rig.pass_("w0", "r0", Passed.STARTED, prompt=100)
    assert backlog_in(rig.core.workloads, 0) == 1000


def test_there_are_never_more_than_so_many() -> None:
    loads = Workloads()
    column = loads.add(1.0, 16, 0.0)
    bookings = Bookings(loads, max_booked=8)
    for number in range(50):
        bookings.book(Booked("public", f"r{number}", 0, "w1", 10), column, float(number) / 100)
        if number % 2:
            bookings.hear("w1", an_acceptance(f"r{number}"), float(number) / 100)
        bookings.check_integrity()
    assert (len(bookings), bookings.running) == (7, 8)  # the last one was accepted
