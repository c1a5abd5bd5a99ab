"""What is being computed is as good as held, until it is there or is not going to be."""

from __future__ import annotations

from placement_build import a_core, a_generate, failed
from placement_rig import Rig, tokens

from kvproto.messages import Passed
from services.placement.actions import Forward
from services.placement.events import WorkerAnswered
from services.placement.promises import EVENTS_S, LIMIT_S, Promises


def test_two_requests_with_one_new_prefix_meet_though_no_event_was_heard() -> None:
    rig = Rig(*(f"w{number}" for number in range(8)))
    shared = tokens(1, 4000)
    first = rig.place("r0", shared + tokens(2, 100))
    rig.now += 0.001
    second = rig.place("r1", shared + tokens(3, 100))
    assert second.worker == first.worker
    assert second.expected_hit == {"device": 4000}


def test_a_promise_is_broken_with_its_request() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r0", tokens(1, 800))
    rig.place("r0", tokens(1, 800), attempt=1, excluded=(first.worker,))  # refused there
    assert len(rig.core.promises) == 1
    second = rig.place("r1", tokens(1, 800))
    assert second.worker != first.worker


def test_an_earlier_attempts_end_does_not_end_the_promise_of_the_next() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r", tokens(1, 800))
    second = rig.place("r", tokens(1, 800), attempt=1, excluded=(first.worker,))
    rig.pass_(first.worker, "r", Passed.ENDED)
    rig.wait(1.0)
    assert rig.place("other", tokens(1, 800)).worker == second.worker
    assert rig.place("another", tokens(1, 800)).expected_hit == {"device": 799}


def test_of_a_request_that_no_worker_was_heard_of_nothing_is_expected() -> None:
    rig = Rig("w0", "w1")
    first = rig.place("r", tokens(1, 800))
    rig.wait(0.6)
    rig.beat(first.worker)
    assert len(rig.core.promises) == 0


def test_a_bare_request_that_is_refused_promises_nothing() -> None:
    core = a_core("w1", policy="cost")
    (offer,) = core.handle(a_generate("r", prompt=None, prompt_ids=tokens(1, 800)), 1.0)
    assert len(core.promises) == 1
    core.handle(WorkerAnswered(failed("r", 0, "context_length_exceeded", retryable=False)), 1.1)
    assert len(core.promises) == 0
    assert isinstance(offer, Forward)


def test_what_was_promised_and_not_found_is_not_held_against_the_worker() -> None:
    rig = Rig("w0")
    for number in range(20):
        rig.place(f"a{number}", tokens(number, 800))
        rig.place(f"b{number}", tokens(number, 800))
        rig.pass_("w0", f"b{number}", Passed.ACCEPTED, Passed.STARTED, prompt=800)
    assert rig.core.feedback.belief("w0").value == "exact"


def test_promises_end() -> None:
    rig = Rig("w0")
    hashes = rig.hashes(tokens(1, 160))
    promises = Promises(1024, 4)
    promises.make(("t", "kept"), "w0", hashes, 0.0)
    promises.make(("t", "forgotten"), "w0", rig.hashes(tokens(2, 160)), 0.0)
    promises.fulfil(("t", "kept"), "w0", 1.0)
    promises.tick(1.0 + EVENTS_S)
    found = promises.depths(hashes, ["w0", "stranger"])
    assert found is not None
    assert found.tolist() == [10, 0]
    promises.tick(1.1 + EVENTS_S)
    assert len(promises) == 1
    promises.check_integrity()
    promises.tick(0.1 + LIMIT_S)
    assert len(promises) == 0
    assert promises.depths(hashes, ["w0"]) is None
    promises.check_integrity()


def test_a_worker_takes_its_promises_along() -> None:
    rig = Rig("w0")
    promises = Promises(1024, 2)
    for number, worker in enumerate(["w0", "w1", "w2"]):  # one more than there is room for
        promises.make(("t", str(number)), worker, rig.hashes(tokens(number, 160)), 0.0)
    assert len(promises) == 2
    promises.drop_worker("w0")
    promises.drop_worker("w0")
    assert len(promises) == 1
    promises.make(("t", "2"), "w2", rig.hashes(tokens(2, 160)), 0.0)
    assert len(promises) == 2
    promises.check_integrity()
