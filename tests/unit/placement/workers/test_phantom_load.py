"""Load of requests that are placed and never sent: it is bounded, short-lived, and nobody's demand."""

from __future__ import annotations

import pytest
from placement_build import a_core, an_acceptance, an_ask, backlog_in, load_of
from placement_rig import RATE, Rig, tokens

from kvfleet.placement.events import Answer, Fail, PlaceAsked, Tick
from kvfleet.placement.workers.bookings import BOOKING_LIMIT_S, CAUGHT_S, TRUSTED, WORD_S, Bookings, PhantomLimits
from kvfleet.placement.workers.workloads import Workloads
from kvproto.errors import Overloaded, from_code
from kvproto.messages import Booked, BookedBatch, Load, Passed, PlaceRequest, Rates

LIMITS = PhantomLimits()


def ask_for(rig: Rig, tenant: str, ask: PlaceRequest) -> str:
    """The worker, or the error that refuses it."""
    action = rig.core.handle(PlaceAsked("_ing.x.y", tenant, ask), rig.now)[0]
    if isinstance(action, Fail):
        raise from_code(action.failed.code, action.failed.message)
    assert isinstance(action, Answer)
    return action.placement.worker


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_never_sent_is_gone_a_second_after_its_asker_stopped_waiting(shared: bool) -> None:
    core = a_core("w1", shares=True)
    answer, share = core.handle(PlaceAsked("_ing.x.y", "public", an_ask(deadline_ms=50)), 1.0)
    assert isinstance(answer, Answer)
    assert isinstance(share, BookedBatch)
    if shared:  # to a replica that hears of it
        core = a_core("w1")
        core.handle(BookedBatch("p2", share.items), 1.0)
    core.handle(Tick(), 1.0 + WORD_S)
    assert (len(core.bookings), load_of(core, "w1")) == (1, 1)
    core.handle(Tick(), 1.06 + WORD_S)
    assert (len(core.bookings), load_of(core, "w1")) == (0, 0)
    core.check_integrity()


def test_a_replica_of_the_former_version_says_nothing_of_it() -> None:
    core = a_core("w1")
    core.handle(BookedBatch("p2", (Booked("public", "r1", 0, "w1", 9),)), 1.0)
    core.handle(Tick(), 1.0 + BOOKING_LIMIT_S)
    assert len(core.bookings) == 1
    core.handle(Tick(), 1.1 + BOOKING_LIMIT_S)
    assert len(core.bookings) == 0


def test_a_word_of_it_keeps_it() -> None:
    rig = Rig("w0")
    rig.place("r1", tokens(1, 500), deadline_ms=50)
    rig.pass_("w0", "r1", Passed.ACCEPTED)
    rig.wait(60.0)
    assert (len(rig.core.bookings), rig.core.bookings.running) == (0, 1)


def test_who_only_asks_has_nobody_else_refused() -> None:
    """At first it counts for somewhat more than once it is caught."""
    rig = Rig("w0", "w1")
    for round_, seconds in enumerate((TRUSTED * LIMITS.seconds, LIMITS.seconds)):
        for number in range(300):
            ask_for(rig, "loud", an_ask(f"r{round_}.{number}", prompt_ids=tokens(number, 8_000)))
        for worker in ("w0", "w1"):
            backlog = backlog_in(rig.core.workloads, rig.core.fleet.workers[worker].column)
            assert seconds * RATE / 2 < backlog <= seconds * RATE
        if not round_:
            rig.wait(BOOKING_LIMIT_S + 0.1)
            for worker in ("w0", "w1"):
                rig.beat(worker)
    assert ask_for(rig, "quiet", an_ask("mine", prompt_ids=(1, 2, 3), max_wait_s=LIMITS.seconds))
    with pytest.raises(Overloaded):  # the control: what waits counts
        ask_for(rig, "quiet", an_ask("hasty", prompt_ids=(1, 2, 3), max_wait_s=1.0))
    assert rig.core.bookings.phantoms_total > 250
    rig.core.check_integrity()


def test_a_burst_of_long_prompts_counts_until_the_workers_word_is_here() -> None:
    """Else all of a burst would go where the first went."""
    workloads = Workloads()
    column = workloads.add(0, 16, 0.0)
    workloads.report(column, Load(), Rates(RATE, 20.0, 1_000.0, {}), (), 1.0)
    bookings = Bookings(workloads)

    def book(at: float) -> int:
        return sum(
            len(bookings.book(Booked("a", f"{at}.{n}", 0, "w1", int(RATE), silent_ms=1000), column, at))
            for n in range(40)
        )

    assert book(1.0) == 0, "40 s of prefill"
    for number in range(40):
        bookings.hear("w1", an_acceptance(f"1.0.{number}", "a"), 1.0)
    assert book(2.0) == 0
    assert len(bookings.expire(4.0)) == 40
    assert book(5.0) == 40 - LIMITS.seconds, "some were never sent"
    bookings.expire(7.0)
    bookings.expire(7.0 + CAUGHT_S)
    assert book(8.0 + CAUGHT_S) == 0
    bookings.check_integrity()


def test_it_is_no_demand() -> None:
    rig = Rig("w0")
    for number in range(50):
        rig.place(f"r{number}", tokens(number, 2_000))
    rig.wait(100.0)
    rig.beat("w0")
    for number in range(50):
        rig.place(f"s{number}", tokens(number, 2_000))
    rig.wait(15.0)
    (signals,) = rig.core.autoscaler.signals()
    assert (signals.queue_depth, signals.saturation, signals.desired) == (0, 0.0, 1)


def test_what_makes_room_is_expected_nowhere() -> None:
    rig = Rig("w0")
    for number in range(300):
        rig.place(f"r{number}", tokens(number, 32))
    assert len(rig.core.bookings) == LIMITS.requests
    assert len(rig.core.inflight) == LIMITS.requests
    rig.core.check_integrity()


def test_the_newest_of_each_tenant_at_each_worker_count_and_the_accepted_all_do() -> None:
    workloads = Workloads()
    columns = {worker: workloads.add(0, 16, 0.0) for worker in ("w1", "w2")}
    bookings = Bookings(workloads, limits=PhantomLimits(requests=2))
    for tenant in ("a", "b"):
        for worker, column in columns.items():
            for number in range(5):
                gone = bookings.book(Booked(tenant, f"{worker}.{number}", 0, worker, 10), column, 1.0)
                assert gone == ([(tenant, f"{worker}.{number - 2}")] if number >= 2 else [])
    assert len(bookings) == 8
    for worker in columns:
        for number in range(5):
            bookings.hear(worker, an_acceptance(f"{worker}.{number}", "a"), 1.0)
        bookings.check_integrity()
    assert (len(bookings), bookings.running) == (4, 4)
    for number in range(5, 9):
        bookings.book(Booked("a", f"r{number}", 0, "w1", 10), columns["w1"], 1.0)
        bookings.hear("w1", an_acceptance(f"r{number}", "a"), 1.0)
    assert (len(bookings), bookings.running) == (4, 8)
    bookings.check_integrity()


def test_one_that_is_too_large_by_itself_counts() -> None:
    rig = Rig("w0")
    rig.place("big", tokens(1, int(RATE * LIMITS.seconds * TRUSTED * 2)))
    assert len(rig.core.bookings) == 1
    rig.place("small", tokens(2, 32))
    assert len(rig.core.bookings) == 1
