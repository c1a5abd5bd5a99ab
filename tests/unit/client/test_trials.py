"""What a request may still try, and what its reader is told when nothing is left."""

from __future__ import annotations

import pytest

from kvproto.errors import DeadlineExceeded, InvalidRequest, NoWorkers, Unavailable, WorkerLost
from kvproto.messages import Sampling
from kvproto.streams.generation import BEGUN_PATIENCE_S, Generation, Trials


def trials(**changes: object) -> Trials:
    return Trials(Generation("demo", Sampling(9), (1,), **changes), 100.0)  # type: ignore[arg-type]


def test_attempts_are_counted_and_the_last_error_says_what_was_tried() -> None:
    tried = trials(attempts=3)
    for at, worker in ((101.0, "w1"), (102.0, "w2")):
        assert not tried.failed(worker, WorkerLost("is gone"), at, accepted=True)
    assert tried.excluded == ["w1", "w2"]
    last = Unavailable("is full", field="prompt", retry_after_s=7.0)
    with pytest.raises(Unavailable) as over:
        tried.failed("w3", last, 112.25, accepted=True)
    told = tried.told(over.value, 112.25)
    assert told.message == "gave up after 3 attempts in 12.2 s, the last at worker w3: is full"
    assert (type(told), told.code, told.http_status) == (Unavailable, "unavailable", 503)
    assert (told.field, told.retry_after_s) == ("prompt", 7.0)


def test_one_attempt_is_told_as_it_was() -> None:
    tried, error = trials(attempts=1), WorkerLost("is gone")
    with pytest.raises(WorkerLost):
        tried.failed("w1", error, 101.0, accepted=True)
    assert tried.told(error, 101.0) is error


def test_what_is_wrong_with_the_request_ends_it_at_once_and_says_no_more() -> None:
    tried, error = trials(), InvalidRequest("no", field="n")
    tried.failed("w1", WorkerLost("is gone"), 101.0, accepted=True)
    with pytest.raises(InvalidRequest):
        tried.failed("w2", error, 102.0, accepted=False)
    assert tried.told(error, 102.0) is error


def test_where_nobody_is_left_the_error_names_the_last_one() -> None:
    tried = trials()
    tried.failed("w1", WorkerLost("is gone"), 101.0, accepted=True)
    told = tried.told(NoWorkers("nobody is ready", retry_after_s=2.0), 131.5)
    assert told.message == "nobody is ready; gave up after 1 attempt in 31.5 s, the last at worker w1: is gone"
    assert (told.code, told.retry_after_s) == ("no_workers", 2.0)
    late = DeadlineExceeded("the request's deadline passed")
    assert "the last at worker w1: is gone" in tried.told(late, 700.0).message


def test_refusals_cost_patience_and_what_has_begun_has_more() -> None:
    tried = trials(attempts=1, patience_s=5.0)
    for second in range(5):
        tried.failed("w1", Unavailable("is full"), 100.0 + second, accepted=False)
    with pytest.raises(Unavailable):
        tried.failed("w1", Unavailable("is full"), 105.5, accepted=False)
    begun = trials(patience_s=5.0)
    begun.failed("w1", WorkerLost("is gone"), 200.0, accepted=True)
    assert begun.may_wait(200.0 + BEGUN_PATIENCE_S)
    assert not begun.may_wait(200.0 + BEGUN_PATIENCE_S, 0.1)


def test_asking_the_same_one_again_waits_a_little() -> None:
    tried = trials()
    assert not tried.failed("w1", WorkerLost("is gone"), 101.0, accepted=False)
    assert not tried.failed("w2", WorkerLost("is gone"), 101.0, accepted=False)
    assert tried.failed("w1", WorkerLost("is gone"), 101.0, accepted=False)
    assert tried.excluded == ["w1"]


def test_a_hand_over_costs_nothing_and_excludes_whoever_moved() -> None:
    tried = trials(attempts=1)
    tried.failed("w1", Unavailable("is full"), 101.0, accepted=False)
    for second in range(20):
        assert not tried.moved(f"m{second}", 102.0 + second)
        assert tried.excluded == [f"m{second}"]
    assert tried.moved("m19", 130.0), "nobody else is there: it waits"


def test_a_deadline_ends_all_patience() -> None:
    tried = trials(deadline_s=3.0)
    assert tried.may_wait(102.9)
    assert not tried.may_wait(103.1)
