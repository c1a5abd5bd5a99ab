"""What callers and tenants use of their limits, and what headers say is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.ingress.http.error_bodies import error_headers
from kvfleet.ingress.http.limit_headers import duration, limit_headers
from kvfleet.ingress.limits import limiter as limits_module
from kvfleet.ingress.limits.callers import Caller, KeyLimits
from kvfleet.ingress.limits.limiter import DAY_S, Limiter, RunUsage
from kvproto.errors import InvalidRequest, LimitExceeded, PayloadTooLarge

MINUTELY = Caller("k", "t", limits=KeyLimits(tokens_per_minute=600))


def refused_s(limiter: Limiter, caller: Caller, tokens: int, now: float, unix_s: float = 0.0) -> float:
    """For how many seconds a prompt is refused; it costs nothing."""
    with pytest.raises(LimitExceeded) as error:
        limiter.charge(limiter.usage_of(caller), tokens, now, unix_s)
    assert error.value.retry_after_s is not None
    return error.value.retry_after_s


def test_prompts_are_taken_on_admission_and_tokens_as_they_come() -> None:
    limiter = Limiter()
    usage = limiter.usage_of(MINUTELY)
    limiter.charge(usage, 400, 0.0, 0.0)
    assert refused_s(limiter, MINUTELY, 300, 0.0) == pytest.approx(10.0)  # 200 are left, 10 come in a second
    for _ in range(150):
        usage.generated(2)
    assert usage.output_tokens == 300
    assert refused_s(limiter, MINUTELY, 300, 0.0) == pytest.approx(40.0), "a debt of 100"
    assert refused_s(limiter, MINUTELY, 300, 39.5) == pytest.approx(0.5)
    limiter.charge(limiter.usage_of(MINUTELY), 300, 40.0, 0.0)


def test_a_run_is_charged_once() -> None:
    limiter = Limiter()
    usage = limiter.usage_of(MINUTELY)
    for _ in range(5):
        limiter.charge(usage, 500, 0.0, 0.0)
    assert refused_s(limiter, MINUTELY, 101, 0.0) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["tokens_per_minute", "tokens_per_day"])
@pytest.mark.parametrize("of_tenant", [False, True])
def test_what_no_waiting_helps_is_refused_for_good(name: str, of_tenant: bool) -> None:
    said = KeyLimits(**{name: 100})
    caller = Caller("k", "t", tenant_limits=said) if of_tenant else Caller("k", "t", limits=said)
    limiter = Limiter()
    limiter.charge(limiter.usage_of(caller), 100, 0.0, 0.0)
    with pytest.raises(PayloadTooLarge) as error:
        limiter.charge(limiter.usage_of(caller), 101, 0.0, 0.0)
    assert f"101 tokens, and {name} of {'tenant t' if of_tenant else 'this API key'} is 100" in error.value.message
    assert error_headers(error.value) == []


def test_a_days_tokens_are_counted_until_midnight() -> None:
    caller = Caller("k", "t", limits=KeyLimits(tokens_per_day=1000))
    limiter = Limiter()
    evening = 20_000 * DAY_S + 0.75 * DAY_S
    usage = limiter.usage_of(caller)
    limiter.charge(usage, 300, 0.0, evening)
    usage.generated(600)
    assert refused_s(limiter, caller, 101, 0.0, evening + 100) == pytest.approx(DAY_S / 4 - 100)
    limiter.charge(limiter.usage_of(caller), 100, 0.0, evening + 200)
    limiter.charge(limiter.usage_of(caller), 1000, 0.0, evening + DAY_S / 4)
    assert refused_s(limiter, caller, 1, 0.0, evening + DAY_S / 4) == pytest.approx(DAY_S)


def test_a_tenants_limits_are_of_all_its_callers() -> None:
    both = KeyLimits(max_concurrent=2, requests_per_minute=12, tokens_per_minute=600)
    one, two, other = (Caller(name, "u" if name == "c" else "t", tenant_limits=both) for name in "abc")
    limiter = Limiter()
    limiter.admit(one, 0.0, 0.0)
    limiter.admit(two, 0.0, 0.0)
    with pytest.raises(LimitExceeded) as error:
        limiter.admit(one, 0.0, 0.0)
    assert error.value.retry_after_s == pytest.approx(5.0), "the longest of the waits"
    limiter.release(two)
    with pytest.raises(LimitExceeded, match="12 requests per minute with tenant t"):
        limiter.admit(one, 0.0, 0.0)
    limiter.admit(other, 0.0, 0.0)
    limiter.charge(limiter.usage_of(one), 600, 0.0, 0.0)
    assert refused_s(limiter, two, 10, 0.0) == pytest.approx(5.0), "for its request; its tokens take one"
    limiter.charge(limiter.usage_of(other), 600, 0.0, 0.0)
    limiter.check_integrity()


def test_each_choice_counts_in_what_runs_at_once() -> None:
    caller = Caller("k", "t", limits=KeyLimits(max_concurrent=4), tenant_limits=KeyLimits(max_concurrent=6))
    limiter = Limiter()
    limiter.admit(caller, 0.0, 0.0, choices=3)
    with pytest.raises(LimitExceeded, match="4 requests at once with this API key, each choice counts"):
        limiter.admit(caller, 0.0, 0.0, choices=2)
    limiter.admit(caller, 0.0, 0.0)
    limiter.release(caller, choices=3)
    other = Caller("l", "t", tenant_limits=caller.tenant_limits)
    with pytest.raises(LimitExceeded, match="6 requests at once with tenant t"):
        limiter.admit(other, 0.0, 0.0, choices=6)
    with pytest.raises(InvalidRequest, match=r"n: at most 6 choices run at once with tenant t, got 7"):
        limiter.admit(other, 0.0, 0.0, choices=7)
    limiter.check_integrity()


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 50), st.booleans()), max_size=40))
def test_no_debt_is_more_than_max_concurrent_times_max_tokens(asks: list[tuple[int, int, bool]]) -> None:
    """Whatever `n` says, and however long each choice goes on."""
    most, longest = 5, 50
    caller = Caller("k", "t", limits=KeyLimits(max_concurrent=most, tokens_per_minute=100, max_tokens=longest))
    limiter = Limiter()
    running: list[tuple[int, RunUsage]] = []
    for choices, generated, ends in asks:
        try:
            limiter.admit(caller, 0.0, 0.0, choices=choices)
        except (LimitExceeded, InvalidRequest):
            continue
        usage = limiter.usage_of(caller)
        try:
            limiter.charge(usage, 1, 0.0, 0.0)
        except LimitExceeded:
            limiter.release(caller, choices=choices)
            continue
        running.append((choices, usage))
        if ends:
            for count, usage in running:
                usage.generated(count * generated)
                limiter.release(caller, choices=count)
            running.clear()
        own = limiter.accounts(caller)[0]
        own.settle(0.0, 0.0)
        assert own.tokens.level is not None
        assert own.tokens.level >= -most * longest
        limiter.check_integrity()


def test_a_place_while_a_body_is_read() -> None:
    caller = Caller("k", "t", limits=KeyLimits(max_concurrent=2, requests_per_minute=6))
    limiter = Limiter()
    limiter.reserve(caller, 0.0, 0.0)
    with pytest.raises(LimitExceeded, match="6 requests per minute") as error:
        limiter.reserve(caller, 0.0, 0.0)
    assert error.value.retry_after_s == pytest.approx(10.0)
    limiter.reserve(caller, 0.0, 0.0, charged=False)
    with pytest.raises(LimitExceeded, match="at once"):
        limiter.reserve(caller, 0.0, 0.0, charged=False)
    limiter.check_integrity()
    limiter.unreserve(caller, charged=False)
    limiter.unreserve(caller)
    limiter.admit(caller, 0.0, 0.0)  # nothing of the rate was taken
    limiter.check_integrity()


def test_a_refused_request_uses_nothing() -> None:
    """Of the key nothing is taken when the tenant's limit refuses."""
    caller = Caller("k", "t", limits=KeyLimits(requests_per_minute=60), tenant_limits=KeyLimits(max_concurrent=1))
    limiter = Limiter()
    limiter.admit(caller, 0.0, 0.0)
    for _ in range(20):
        with pytest.raises(LimitExceeded, match="at once with tenant t"):
            limiter.admit(caller, 0.0, 0.0)
    limiter.release(caller)
    for _ in range(9):
        limiter.admit(caller, 0.0, 0.0)
        limiter.release(caller)


def test_counters_outlive_other_limits() -> None:
    """As a reload of the keys brings them: the accounts are by name."""
    limiter = Limiter()
    limiter.charge(limiter.usage_of(MINUTELY), 600, 0.0, 0.0)
    limiter.admit(MINUTELY, 0.0, 0.0)
    less = Caller("k", "t", limits=KeyLimits(max_concurrent=1, tokens_per_minute=60))
    with pytest.raises(LimitExceeded):
        limiter.admit(less, 0.0, 0.0)
    assert refused_s(limiter, less, 60, 0.0) == pytest.approx(60.0)
    limiter.release(less)
    limiter.check_integrity()
    unlimited = Caller("k", "t")
    limiter.admit(unlimited, 0.0, 0.0)
    limiter.charge(limiter.usage_of(unlimited), 10**9, 0.0, 0.0)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 100), st.integers(0, 200)), max_size=40))
def test_whoever_waits_as_told_gets_in_and_the_rate_holds(steps: list[tuple[float, int, int]]) -> None:
    caller = Caller("k", "t", limits=KeyLimits(requests_per_minute=30), tenant_limits=KeyLimits(tokens_per_minute=100))
    limiter = Limiter()
    now, used = 0.0, 0
    for passed, prompt, generated in steps:
        now += passed
        for _ in range(2):
            try:
                limiter.admit(caller, now, 0.0)
                break
            except LimitExceeded as error:
                now += error.retry_after_s or 0.0
        else:
            raise AssertionError("told a time that was not enough")
        usage = limiter.usage_of(caller)
        try:
            limiter.charge(usage, prompt, now, 0.0)
        except LimitExceeded as error:
            now += error.retry_after_s or 0.0
            limiter.charge(usage, prompt, now, 0.0)
        used += prompt
        assert used <= 100 + now / 60 * 100 + 1e-3, "before what it generates: that is a debt"
        usage.generated(generated)
        used += generated
        limiter.release(caller)
        limiter.check_integrity()


def test_accounts_that_nobody_would_miss_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "MAX_ACCOUNTS", 10)
    limiter = Limiter()
    said = KeyLimits(requests_per_minute=60, tokens_per_day=5)
    busy, poor, *others = (Caller(f"oidc:{n}", f"t{n}", limits=said) for n in range(30))
    limiter.admit(busy, 0.0, 0.0)
    limiter.charge(limiter.usage_of(poor), 5, 0.0, 0.0)
    for caller in others:
        limiter.admit(caller, 0.0, 0.0)
        limiter.release(caller)
    limiter.admit(others[0], 100.0, 0.0)
    assert len(list(limiter.every())) == 2 + 1 + 2  # busy and the last one with their tenants; poor
    with pytest.raises(LimitExceeded):
        limiter.charge(limiter.usage_of(poor), 1, 100.0, 0.0)
    limiter.release(busy)
    limiter.release(others[0])
    limiter.check_integrity()


def test_headers_say_what_is_left() -> None:
    limiter = Limiter()
    assert limit_headers(limiter, Caller("free", "f"), 0.0, 0.0) == []
    caller = Caller(
        "k",
        "t",
        limits=KeyLimits(requests_per_minute=600, tokens_per_minute=600),
        tenant_limits=KeyLimits(1, 60.0, 6000.0),
    )
    limiter.admit(caller, 0.0, 0.0)
    usage = limiter.usage_of(caller)
    limiter.charge(usage, 200, 0.0, 0.0)
    assert dict(limit_headers(limiter, caller, 0.0, 0.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"9",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"400",
        b"x-ratelimit-reset-tokens": b"20s",
    }
    usage.generated(1000)
    debt = dict(limit_headers(limiter, caller, 0.5, 0.0))
    assert debt[b"x-ratelimit-remaining-tokens"] == b"0"
    assert debt[b"x-ratelimit-reset-tokens"] == b"2m0s"
    assert debt[b"x-ratelimit-reset-requests"] == b"500ms"


def test_durations() -> None:
    cases = {0: "0s", 0.0004: "1ms", 0.12: "120ms", 1: "1s", 1.2: "2s", 60: "1m0s", 90.5: "1m31s", 3725: "1h2m5s"}
    assert {seconds: duration(seconds) for seconds in cases} == cases
