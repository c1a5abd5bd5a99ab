"""Who may start: the process's own limit, callers' and tenants', and what is told to those who may not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.ingress.http.error_bodies import error_body, error_headers, loggable, status_of
from kvfleet.ingress.limits.admission import FREE_RETURNS, Admission
from kvfleet.ingress.limits.callers import Caller, KeyLimits
from kvproto.errors import Cancelled, Draining, InvalidRequest, KvfleetError, LimitExceeded, Unavailable


def admission_of(most: int = 100) -> Admission:
    return Admission(most, lambda: 0.0)


def test_limits_of_the_process_and_of_a_key() -> None:
    admission = admission_of(3)
    one, two = Caller("one", limits=KeyLimits(max_concurrent=2)), Caller("two")
    admission.admit(one, 0.0)
    admission.admit(one, 0.0)
    with pytest.raises(LimitExceeded):
        admission.admit(one, 0.0)
    admission.admit(two, 0.0)
    with pytest.raises(Unavailable):
        admission.admit(two, 0.0)
    admission.release(one)
    admission.admit(one, 0.0)
    admission.draining = True
    with pytest.raises(Draining):
        admission.admit(two, 0.0)
    assert admission.refused_total == 3
    admission.check_integrity()


def test_a_rate_says_when_to_come_back() -> None:
    admission = admission_of()
    key = Caller("k", limits=KeyLimits(requests_per_minute=60))
    for _ in range(10):  # the burst
        admission.admit(key, 5.0)
    with pytest.raises(LimitExceeded) as error:
        admission.admit(key, 5.25)
    assert error.value.retry_after_s == pytest.approx(0.75)
    admission.admit(key, 5.25 + 0.76)


def test_who_comes_back_runs_again_and_is_not_charged_again() -> None:
    admission = admission_of()
    key = Caller("k", limits=KeyLimits(requests_per_minute=6, max_concurrent=1))
    admission.admit(key, 0.0)
    admission.admit(key, 0.0, repeat=True)  # reads what runs already
    with pytest.raises(LimitExceeded, match="at once"):
        admission.admit(key, 0.0, returns=1)
    admission.release(key, repeat=True)
    admission.release(key)
    for returns in range(1, FREE_RETURNS + 1):
        admission.admit(key, 0.0, returns=returns)
        admission.release(key)
    with pytest.raises(LimitExceeded, match="per minute"):  # a client that only cuts and comes back is a load
        admission.admit(key, 0.0, returns=FREE_RETURNS + 1)
    admission.check_integrity()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 5)), max_size=60))
def test_counts_add_up_whatever_happens(steps: list[tuple[str, bool, float]]) -> None:
    admission = admission_of(5)
    both = KeyLimits(max_concurrent=4)
    keys = {
        name: Caller(name, "c" if name == "c" else "ab", limits=KeyLimits(3, 120.0), tenant_limits=both)
        for name in "abc"
    }
    running: list[str] = []
    now = 0.0
    for name, leaves, passed in steps:
        now += passed
        if leaves and name in running:
            running.remove(name)
            admission.release(keys[name])
        elif not leaves:
            try:
                admission.admit(keys[name], now)
                running.append(name)
            except (LimitExceeded, Unavailable):
                pass
        admission.check_integrity()
        assert admission.running == len(running) <= 5
        assert all(running.count(one) <= 3 for one in "abc")
        assert running.count("a") + running.count("b") <= 4


def test_errors_as_clients_read_them() -> None:
    error = LimitExceeded("too many", retry_after_s=1.2)
    assert error_headers(error) == [(b"retry-after", b"2"), (b"x-should-retry", b"true")]
    assert json.loads(error_body(InvalidRequest("must be 5", field="n"))) == {
        "error": {"message": "n: must be 5", "type": "invalid_request_error", "param": "n", "code": "invalid_request"}
    }
    assert status_of(Cancelled("closing")) == 503


def test_errors_as_logs_have_them() -> None:
    """What a caller sent may be a secret; a message may repeat it."""
    assert loggable(InvalidRequest("must be 5, got 'secret'", field="n")) == "invalid_request (n)"
    assert loggable(Unavailable("only it knows the policy 'secret'", field="policy")) == "unavailable (policy)"
    assert loggable(LimitExceeded("too many")) == "limit_exceeded"
    assert loggable(KvfleetError("the disk is full")) == "the disk is full"
