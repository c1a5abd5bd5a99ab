"""Limits of several ingresses together: what they tell one another, whatever becomes of the reports."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.ingress.http.limit_headers import limit_headers
from kvfleet.ingress.limits import limiter as limits
from kvfleet.ingress.limits import shared_usage
from kvfleet.ingress.limits.callers import Caller, KeyLimits
from kvfleet.ingress.limits.limiter import DAY_S, Account, Limiter
from kvfleet.ingress.limits.shared_usage import FORGET_S, MAX_REPEATED, MAX_REPORTED, SILENT_S, SharedUsage
from kvfleet.ingress.limits.shared_usage_exchange import PERIOD_S
from kvproto import codec
from kvproto.errors import LimitExceeded
from kvproto.messages import AccountUsage, UsageReport

PAYLOAD = 1024 * 1024
NOON = 20_000 * DAY_S + DAY_S / 2
RATE = Caller("k", "t", limits=KeyLimits(requests_per_minute=60, tokens_per_minute=6000))  # bursts of 10 and 6,000
BUSY = Caller("k", "t", tenant_limits=KeyLimits(max_concurrent=4))
DAILY = Caller("k", "t", limits=KeyLimits(tokens_per_day=1000))


class Ingress:
    """As much of one as counts; its reports cross the codec."""

    def __init__(self, name: str, now: float = 0.0, epoch: str = "e") -> None:
        self.limiter = Limiter()
        self.usage = SharedUsage(self.limiter, name, epoch, now)

    def reports(self, now: float, unix_s: float = NOON) -> list[bytes]:
        self.usage.expire(now)
        return [codec.encode(report) for report in self.usage.reports(now, unix_s, PAYLOAD)]

    def receive(self, data: bytes, now: float, unix_s: float = NOON) -> None:
        self.usage.receive(codec.decode(UsageReport, data), now, unix_s)
        self.usage.check_integrity()

    def admits(self, caller: Caller, now: float = 0.0) -> bool:
        try:
            self.limiter.admit(caller, now, NOON)
        except LimitExceeded:
            return False
        return True

    def serves(self, caller: Caller, now: float = 0.0) -> bool:
        admitted = self.admits(caller, now)
        if admitted:
            self.limiter.release(caller)
        return admitted

    def charges(self, caller: Caller, tokens: int, now: float = 0.0, unix_s: float = NOON) -> bool:
        try:
            self.limiter.charge(self.limiter.usage_of(caller), tokens, now, unix_s)
        except LimitExceeded:
            return False
        return True

    def account(self, caller: Caller) -> Account:
        return self.limiter.accounts(caller)[0]

    def account_of_all(self, caller: Caller) -> Account:
        """All of its tenant's callers together."""
        return self.limiter.accounts(caller)[1]

    def level(self, caller: Caller, now: float) -> tuple[float | None, float | None]:
        """Requests and tokens of the caller's own that are left."""
        account = self.account(caller)
        account.settle(now, NOON)
        return account.requests.level, account.tokens.level

    def left(self, caller: Caller, now: float = 0.0) -> dict[bytes, bytes]:
        return dict(limit_headers(self.limiter, caller, now, NOON))


@dataclass
class Fleet:
    ingresses: list[Ingress]
    lost: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, count: int) -> Fleet:
        return cls([Ingress(f"i{n}") for n in range(count)])

    def turn(self, now: float) -> int:
        """All tell, then all hear; returns how many reports there were."""
        said = [data for one in self.ingresses for data in one.reports(now)]
        for data in said:
            for one in self.ingresses:
                one.receive(data, now)
        return len(said)


def entry(tenant: str = "t", caller: str = "k", **said: int | float | bool) -> AccountUsage:
    return AccountUsage(tenant, **{"life": 1, "caller": caller, **said})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- counting together


def test_what_others_admit_is_taken_from_the_bucket() -> None:
    fleet = Fleet.of(3)
    one, two, three = fleet.ingresses
    assert [one.serves(RATE) for _ in range(11)] == [True] * 10 + [False]
    assert two.serves(RATE), "nobody has told it yet"
    assert one.charges(RATE, 4000)
    fleet.turn(0.25)
    assert not two.serves(RATE, 0.25)
    assert not three.serves(RATE, 0.25), "it had no account of that name before"
    assert [any_.left(RATE, 0.25)[b"x-ratelimit-remaining-tokens"] for any_ in fleet.ingresses] == [
        b"2025",
        b"2000",  # what came back meanwhile found a full bucket
        b"2000",
    ]
    assert two.left(RATE, 1.9)[b"x-ratelimit-remaining-requests"] == b"0"
    assert two.serves(RATE, 2.25), "11 were admitted, 1 has come back, and this one"
    assert not two.serves(RATE, 2.3)


def test_generated_tokens_leave_their_debt_everywhere() -> None:
    fleet = Fleet.of(2)
    one, two = fleet.ingresses
    one.limiter.admit(RATE, 0.0, NOON)
    usage = one.limiter.usage_of(RATE)
    one.limiter.charge(usage, 5000, 0.0, NOON)
    fleet.turn(0.0)
    for n in range(1, 5):
        usage.generated(750)
        assert fleet.turn(n * PERIOD_S) == (n == 4), "what is only generated is told of once a second"
    assert two.level(RATE, 1.0)[1] == pytest.approx(6000 - 5000 - 3000 + 100)
    assert not two.charges(RATE, 1, 1.0)


def test_what_runs_elsewhere_counts_until_its_ingress_is_silent() -> None:
    fleet = Fleet.of(3)
    one, two, three = fleet.ingresses
    assert [one.admits(BUSY) for _ in range(3)] == [True] * 3
    assert two.admits(BUSY)
    fleet.turn(0.25)
    assert not any(any_.admits(BUSY, 0.25) for any_ in fleet.ingresses)
    two.limiter.release(BUSY)
    fleet.turn(0.5)
    assert three.admits(BUSY, 0.5)
    fleet.ingresses.remove(one)  # killed
    quiet_at = 0.5 + SILENT_S
    for n in range(int(SILENT_S / PERIOD_S)):
        fleet.turn(0.75 + n * PERIOD_S)
        assert not two.serves(Caller("k", "t", tenant_limits=KeyLimits(max_concurrent=2)), 0.75 + n * PERIOD_S)
    fleet.turn(quiet_at + PERIOD_S)
    assert two.limiter.accounts(BUSY)[1].running_elsewhere == 1, "what three runs is still told"
    assert three.limiter.accounts(BUSY)[1].running_elsewhere == 0
    assert [two.admits(BUSY, 4.0) for _ in range(4)] == [True] * 3 + [False]


def test_a_new_life_of_an_ingress_has_nothing_running() -> None:
    two = Ingress("i2")
    first = Ingress("i1", epoch="1")
    assert [first.admits(BUSY) for _ in range(4)] == [True] * 4
    (late,) = first.reports(0.25)
    two.receive(late, 0.25)
    assert not two.admits(BUSY, 0.25)
    second = Ingress("i1", now=0.5, epoch="2")
    assert second.admits(BUSY, 0.5)
    two.receive(*second.reports(0.6), 0.6)
    two.receive(late, 0.7)
    assert two.usage.refused_total == 1, "of a life that is over"
    assert [two.admits(BUSY, 0.7) for _ in range(4)] == [True] * 3 + [False]


def test_nothing_is_told_where_nothing_is_limited() -> None:
    one = Ingress("i1")
    free = Caller("free", "f", limits=KeyLimits(max_tokens=5))
    one.limiter.admit(free, 0.0, NOON)
    assert one.charges(free, 100)
    assert one.reports(0.25) == []
    one.limiter.release(free)
    assert one.reports(2.0) == []


def test_what_is_as_new_is_told_a_last_time() -> None:
    fleet = Fleet.of(2)
    one, two = fleet.ingresses
    assert one.serves(RATE)
    told = [fleet.turn(n * PERIOD_S) for n in range(12)]
    assert [n for n, reports in enumerate(told) if reports] == [0, 4], "used, and as new again"
    assert two.usage._peer_accounts == 0
    assert one.serves(RATE, 10.0)
    fleet.turn(10.0)
    assert two.level(RATE, 10.0)[0] == 9
    assert [one.serves(RATE, 10.0) for _ in range(10)] == [True] * 9 + [False]


def test_the_last_word_may_be_lost() -> None:
    one, two = Ingress("i1"), Ingress("i2")
    assert one.serves(RATE)
    two.receive(*one.reports(0.0), 0.0)
    assert one.reports(1.0), "lost"
    assert one.serves(RATE, 5.0)
    two.receive(*one.reports(5.0), 5.0)
    assert two.level(RATE, 5.0)[0] == 9


# ---------------------------------------------------------------------- reports that are lost, doubled, overtaken


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**32), st.integers(5, 80))
def test_whatever_happens_to_reports_all_agree_in_the_end(count: int, seed: int, steps: int) -> None:
    """Time stands still, so nothing comes back into the buckets."""
    chance = random.Random(seed)
    said = KeyLimits(10_000, requests_per_minute=6e6, tokens_per_minute=1e6, tokens_per_day=10**9)
    callers = [Caller(name, "t", limits=said, tenant_limits=said) for name in "ab"]
    fleet = Fleet.of(count)
    flying: deque[bytes] = deque()
    running: list[tuple[Ingress, Caller]] = []
    requests = tokens = 0
    for _ in range(steps):
        one, caller, what = chance.choice(fleet.ingresses), chance.choice(callers), chance.random()
        if what < 0.4:
            one.limiter.admit(caller, 0.0, NOON)
            running.append((one, caller))
            requests += 1
        elif what < 0.6 and running:
            there, ended = running.pop(chance.randrange(len(running)))
            there.limiter.release(ended)
        elif what < 0.8:
            more = chance.randrange(100)
            usage = one.limiter.usage_of(caller)
            one.limiter.charge(usage, 7, 0.0, NOON)
            usage.generated(more)
            tokens += 7 + more
        flying.extend(one.reports(0.0))
        while flying and chance.random() < 0.6:
            at = chance.randrange(len(flying))
            data = flying[at]
            if chance.random() < 0.8:
                del flying[at]  # else it comes again
            if chance.random() < 0.7:
                chance.choice(fleet.ingresses).receive(data, 0.0)
    for one in fleet.ingresses:
        one.usage.report_again()
    fleet.turn(0.0)
    for one in fleet.ingresses:
        everybody = one.limiter.accounts(callers[0])[1]
        everybody.settle(0.0, NOON)
        assert everybody.running + everybody.running_elsewhere == len(running)
        assert everybody.requests.level == 1e6 - requests
        assert everybody.tokens.level == 1e6 - tokens
        assert everybody.day_tokens == tokens


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_nothing_is_ever_counted_twice(seed: int, loses: bool) -> None:
    """Over many lives of accounts and many reports under way: a day's tokens are the sum of all that was heard."""
    chance = random.Random(seed)
    one, two = Ingress("i1"), Ingress("i2")
    callers = [Caller(name, "t", limits=KeyLimits(tokens_per_minute=60_000)) for name in "abc"]
    used = dict.fromkeys("abc", 0)
    flying: deque[bytes] = deque()
    now = 0.0
    for _ in range(60):
        now += chance.choice((0.02, 0.3, 1.1))
        caller = chance.choice(callers)
        if chance.random() < 0.5:
            tokens = chance.choice((5, 500))
            assert one.charges(caller, tokens, now)
            used[caller.name] += tokens
        flying.extend(one.reports(now))
        while flying and chance.random() < 0.6:
            at = chance.randrange(min(4, len(flying)))
            data = flying[at]
            if chance.random() < 0.8:
                del flying[at]
            if not loses or chance.random() < 0.7:
                two.receive(data, now)
        for name, total in used.items():
            found = two.limiter.find(("t", name))
            assert found is None or found.day_tokens <= total
    if loses:
        return
    in_order, counted = Ingress("i3"), Ingress("i4")
    for turn in range(40):
        now += 0.3
        if turn < 20:
            assert counted.charges(callers[turn % 3], 500, now)
        for data in counted.reports(now):
            in_order.receive(data, now)
            in_order.receive(data, now)
    assert sum(in_order.account(caller).day_tokens for caller in callers) == 20 * 500


def test_what_was_overtaken_says_nothing_of_what_runs() -> None:
    one, two = Ingress("i1"), Ingress("i2")
    assert one.admits(BUSY)
    assert one.admits(BUSY)
    before = one.reports(0.25)
    one.limiter.release(BUSY)
    for data in (*one.reports(0.5), *before):
        two.receive(data, 0.6)
        assert two.limiter.accounts(BUSY)[1].running_elsewhere == 1


def test_a_life_that_is_over_is_not_heard_of_again() -> None:
    said = [
        entry(running=1, requests=3, requests_per_minute=60.0),
        entry(ended=True),
        entry(life=2, requests=1),
        entry(caller="l", running=1),
    ]
    one = Ingress("me")
    for seq, at in ((1, 0), (3, 1), (2, 0), (4, 2), (2, 0)):
        one.receive(codec.encode(UsageReport("p", "e", seq, (said[at],))), 0.0)
    assert one.level(RATE, 0.0)[0] is not None
    known = one.usage._peers["p"].accounts
    assert {key: (heard.life, heard.requests, heard.running) for key, heard in known.items()} == {("t", "k"): (2, 1, 0)}
    one.receive(codec.encode(UsageReport("p", "e", 9, (entry(life=2, ended=True), said[3]))), 0.0)
    assert known.keys() == {("t", "l")}, "what is in the same report is not of old"


# ---------------------------------------------------------------------- the promise


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(0.002, 0.4))
def test_the_fleet_admits_no_more_than_its_limit_and_what_arrives_within_one_period(
    count: int, seed: int, mean_s: float
) -> None:
    """Requests, prompts and concurrency; each ingress has a phase of its own."""
    chance = random.Random(seed)
    said = KeyLimits(max_concurrent=12, requests_per_minute=120, tokens_per_minute=3000)
    burst, per_s, tokens_per_s = 20.0, 2.0, 50.0
    caller = Caller("k", "t", tenant_limits=said)
    fleet = Fleet.of(count)
    next_turn = [chance.uniform(0, PERIOD_S) for _ in range(count)]
    arrived: deque[tuple[float, int]] = deque()
    ends: list[tuple[float, Ingress]] = []
    requests = tokens = 0
    now = 0.0
    while now < 20.0:
        now += chance.expovariate(1 / mean_s) if chance.random() < 0.9 else 2.0
        for at, n in sorted((at, n) for n, at in enumerate(next_turn)):
            when = at
            while when <= now:
                for end in [one for one in ends if one[0] <= when]:
                    ends.remove(end)
                    end[1].limiter.release(caller)
                for data in fleet.ingresses[n].reports(when):
                    for one in fleet.ingresses:
                        one.receive(data, when)
                when += PERIOD_S
            next_turn[n] = when
        for end in [one for one in ends if one[0] <= now]:
            ends.remove(end)
            end[1].limiter.release(caller)
        one, prompt = chance.choice(fleet.ingresses), chance.randrange(1, 400)
        while arrived and arrived[0][0] < now - PERIOD_S:
            arrived.popleft()
        if one.admits(caller, now):
            arrived.append((now, prompt))
            ends.append((now + chance.expovariate(0.5), one))
            requests += 1
            within = len(arrived)
            assert len(ends) <= 12 + within - 1, now
            assert requests <= burst + per_s * now + within - 1 + 1e-3, now
            if one.charges(caller, prompt, now):
                tokens += prompt
                assert tokens <= 3000 + tokens_per_s * now + sum(size for _, size in arrived) + 1e-3, now


def test_many_ingresses_share_one_limit() -> None:
    """Ten, and a caller who sends to all of them as fast as it can: it gets what one would give it."""
    fleet = Fleet.of(10)
    caller = Caller("k", "t", limits=KeyLimits(requests_per_minute=600))
    admitted = 0
    for turn in range(120):
        now = turn * PERIOD_S
        admitted += sum(one.serves(caller, now) for one in fleet.ingresses for _ in range(2))
        for one in fleet.ingresses:
            for data in one.reports(now):
                for other in fleet.ingresses:
                    other.usage.receive(codec.decode(UsageReport, data), now, NOON)
    assert 300 <= admitted <= 100 + 300 + 20, "of half a minute; and no less than the rate"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 300), st.integers(0, 400), st.booleans()), max_size=30))
def test_alone_it_counts_as_it_would_without(steps: list[tuple[float, int, int, bool]]) -> None:
    said = KeyLimits(max_concurrent=2, requests_per_minute=40, tokens_per_minute=900, tokens_per_day=4000)
    caller = Caller("k", "t", limits=said)
    plain, shared = Limiter(), Ingress("i1")
    now = 0.0
    for passed, prompt, generated, leaves in steps:
        now += passed
        shared.reports(now)
        outcomes = []
        for limiter in (plain, shared.limiter):
            try:
                limiter.admit(caller, now, NOON)
            except LimitExceeded as error:
                outcomes.append(("no request", error.retry_after_s))
                continue
            usage = limiter.usage_of(caller)
            try:
                limiter.charge(usage, prompt, now, NOON)
                usage.generated(generated)
                outcomes.append(("served", 0.0))
            except LimitExceeded as error:
                outcomes.append(("no tokens", error.retry_after_s))
            if leaves:
                limiter.release(caller)
        assert outcomes[0][0] == outcomes[1][0]
        assert outcomes[0][1] == pytest.approx(outcomes[1][1], abs=1e-4)


# ---------------------------------------------------------------------- who comes later, who was away


def test_a_newcomer_takes_what_is_lacking_and_counts_nothing_twice() -> None:
    one = Ingress("i1")
    assert [one.serves(RATE) for _ in range(8)] == [True] * 8
    assert one.charges(RATE, 3000)
    one.reports(0.25)
    known, unknown = Ingress("i2", now=1.0), Ingress("i3", now=1.0)
    assert known.serves(RATE, 1.0), "before it had heard anybody"
    (report,) = one.reports(1.25)
    known.receive(report, 1.25)
    unknown.receive(report, 1.25)
    assert known.level(RATE, 1.25) == pytest.approx((2 + 1.25, 3125))
    assert unknown.level(RATE, 1.25) == pytest.approx((2 + 1.25, 3125))
    assert one.serves(RATE, 1.25)
    (report,) = one.reports(1.5)
    for newcomer in (known, unknown):
        newcomer.receive(report, 1.5)
        assert newcomer.level(RATE, 1.5)[0] == pytest.approx(1 + 1.5)


def test_who_is_there_tells_a_newcomer_at_once() -> None:
    one, two = Ingress("i1"), Ingress("i2", now=9.0)
    assert one.charges(RATE, 3000)
    assert one.reports(9.0)
    assert not one.reports(9.25)
    assert two.charges(RATE, 10, 9.3)
    one.receive(*two.reports(9.3), 9.3)
    assert one.reports(9.5)


def test_a_restarted_ingress_learns_of_the_day_from_those_who_are_left() -> None:
    fleet = Fleet.of(2)
    one, two = fleet.ingresses
    assert one.charges(DAILY, 500)
    assert two.charges(DAILY, 100)
    fleet.turn(0.25)
    assert two.account(DAILY).day_tokens == 600
    again = Ingress("i0", now=60.0, epoch="f")
    fleet.ingresses[0] = again
    fleet.turn(60.25)
    assert not again.charges(DAILY, 401, 60.5)
    assert again.charges(DAILY, 400, 60.5)
    fleet.turn(61.0)
    assert two.account(DAILY).day_tokens == 1000


def test_one_that_served_nothing_of_a_day_still_tells_of_it() -> None:
    one, two = Ingress("i1"), Ingress("i2")
    two.limiter.accounts(DAILY)
    assert one.charges(DAILY, 700)
    two.receive(*one.reports(0.25), 0.25)
    later = Ingress("i3", now=30.0)
    later.receive(*two.reports(30.0), 30.0)
    assert later.account(DAILY).day_tokens == 700


def test_a_day_ends_by_ones_own_clock() -> None:
    midnight = NOON + DAY_S / 2
    early, late = Ingress("i1"), Ingress("i2")
    for now, unix_s, tokens in ((0.0, midnight - 1, 600), (0.5, midnight + 0.5, 700)):
        assert early.charges(DAILY, tokens, now, unix_s)
        assert late.charges(DAILY, 100, now, midnight - 1)
        late.receive(*early.reports(now, unix_s), now, midnight - 1)
    assert late.account(DAILY).day_tokens == 800, "600 of its day, not those of the next one"
    assert late.charges(DAILY, 100, 2.0, midnight + 0.5)
    late.receive(*early.reports(2.0, midnight + 2), 2.0, midnight + 0.5)
    assert late.account(DAILY).day_tokens == 800
    newcomer = Ingress("i3", now=2.0)
    (report,) = early.reports(3.0, midnight + 3)
    newcomer.receive(report, 3.0, midnight - 1)
    assert newcomer.account(DAILY).day_tokens == 0, "nor of one that comes by its clock before that"


def test_yesterdays_tokens_are_told_of_no_more() -> None:
    one = Ingress("i1")
    assert one.charges(DAILY, 600)
    assert one.reports(0.25)
    (ended,) = one.reports(60.0, NOON + DAY_S)
    assert codec.decode(UsageReport, ended).accounts[0].ended
    assert one.reports(62.0, NOON + DAY_S) == []


def test_an_outage_costs_a_caller_one_bucket_at_most() -> None:
    """Ten minutes in which two ingresses cannot hear one another: each admits the whole rate, and then they go on."""
    both = Caller("k", "t", limits=KeyLimits(requests_per_minute=60, tokens_per_minute=6000, tokens_per_day=10**6))
    fleet = Fleet.of(2)
    one, two = fleet.ingresses
    assert one.charges(both, 100)
    assert two.charges(both, 100)
    fleet.turn(0.25)
    for second in range(600):
        for ingress in fleet.ingresses:
            assert ingress.serves(both, float(second)), "nobody is refused for that"
            assert ingress.charges(both, 90, float(second))
    fleet.turn(600.0)
    for ingress in fleet.ingresses:
        assert ingress.level(both, 600.0) == pytest.approx((-10, -6000))
        assert ingress.account(both).day_tokens == 2 * 600 * 90 + 200, "the day's are all counted"
        assert ingress.serves(both, 611.1)


def test_a_peer_that_comes_back_is_not_counted_twice() -> None:
    one, two = Ingress("i1"), Ingress("i2")
    daily = Caller("k", "t", limits=KeyLimits(requests_per_minute=60, tokens_per_day=10**6))
    assert one.charges(daily, 500)
    two.limiter.accounts(daily)
    two.receive(*one.reports(0.25), 0.25)
    two.usage.expire(FORGET_S + 1)
    assert two.usage._peer_accounts == 0
    two.receive(*one.reports(FORGET_S + 2), FORGET_S + 2)
    assert two.account(daily).day_tokens == 500


# ---------------------------------------------------------------------- bounds


def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_usage, "MAX_PEERS", 3)
    one = Ingress("me")
    for n in range(5):
        one.receive(codec.encode(UsageReport(f"p{n}", "e", 1, (entry(running=1),))), 0.0)
    assert (one.usage.peers, one.usage.refused_total) == (3, 2)
    one.receive(codec.encode(UsageReport("me", "e", 1, (entry(running=1),))), 0.0)
    assert one.usage.refused_total == 2, "its own come back to it"
    one.receive(codec.encode(UsageReport("p9", "e", 1, (entry(running=2),))), SILENT_S + 1)
    assert one.usage.peers == 1, "a silent one made room"
    assert one.account(Caller("k", "t")).running_elsewhere == 4, "those who may come back run until `expire`"


def test_accounts_of_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_usage, "MAX_PEER_ACCOUNTS", 5)
    one = Ingress("me")
    one.receive(codec.encode(UsageReport("p", "e", 1, tuple(entry(caller=f"c{n}", requests=1) for n in range(9)))), 0.0)
    assert one.usage.refused_total == 4
    one.receive(codec.encode(UsageReport("p", "e", 2, tuple(entry(caller=f"c{n}", ended=True) for n in range(9)))), 0.0)
    assert one.usage._peer_accounts == 0


def test_a_report_fits_into_a_message() -> None:
    one = Ingress("i" * 64)
    said = KeyLimits(max_concurrent=5, requests_per_minute=0.7, tokens_per_minute=1e9, tokens_per_day=10**15)
    callers = [Caller("\N{SNOWMAN}" * 128 + f"{n:05}", "t" * 64, limits=said) for n in range(200)]
    for caller in callers:
        one.limiter.admit(caller, 0.0, NOON)
        assert one.charges(caller, 900_000_000)
    reports = one.usage.reports(0.3, NOON, 40_000)
    assert sum(len(report.accounts) for report in reports) == 200
    assert len(reports) > 4
    assert max(len(codec.encode(report)) for report in reports) <= 40_000
    assert len({report.seq for report in reports}) == len(reports)


def names_told(one: Ingress, now: float) -> list[str]:
    return [each.caller for report in one.usage.reports(now, NOON, PAYLOAD) for each in report.accounts]


def test_those_told_of_longest_ago_come_first() -> None:
    one = Ingress("i1")
    callers = [Caller(f"c{n}", "t", limits=KeyLimits(max_concurrent=5)) for n in range(MAX_REPORTED + 100)]
    told = []
    for now in (0.25, 0.5):
        for caller in callers:
            assert one.admits(caller)
        told.append(set(names_told(one, now)))
    assert len(told[0]) == MAX_REPORTED
    assert len(told[0] | told[1]) == len(callers)


def test_what_is_quiet_is_repeated_a_few_at_a_time_and_what_runs_at_once() -> None:
    one = Ingress("i1")
    count = 6 * MAX_REPEATED
    for n in range(count):
        assert one.charges(Caller(f"c{n}", "t", limits=KeyLimits(tokens_per_day=1000)), 10)
    assert one.admits(Caller("runs", "u", limits=KeyLimits(max_concurrent=1)))
    assert len(names_told(one, 0.0)) == count + 1
    seen: list[str] = []
    for turn in range(7):
        names = names_told(one, 1.0 + turn * PERIOD_S)
        assert len(names) == MAX_REPEATED + (turn in (0, 4)), "which takes none of their room"
        seen += names
    assert len(set(seen)) == count + 1


def test_only_what_was_not_heard_of_for_long_is_forgotten() -> None:
    one = Ingress("me")

    def receive(seq: int, now: float, *names: str, requests: int, age_s: float = 0.0) -> None:
        said = (entry(caller=name, requests=requests, age_s=age_s, requests_per_minute=60.0) for name in names)
        one.receive(codec.encode(UsageReport("p", "e", seq, tuple(said))), now)

    receive(1, 0.0, "a", "b", requests=1)
    receive(2, FORGET_S, "a", requests=1)
    one.usage.expire(FORGET_S + 1)
    assert one.usage._peers["p"].accounts.keys() == {("t", "a")}
    for seq, requests in ((3, 5), (4, 6)):
        receive(seq, FORGET_S + 2, "b", requests=requests, age_s=FORGET_S)
    b = Caller("b", "t", limits=KeyLimits(requests_per_minute=60))
    assert one.level(b, FORGET_S + 2)[0] == 9, "some of the first five were counted already"


def test_accounts_that_only_others_use_are_bounded_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", 4)
    monkeypatch.setattr(limits, "MAX_OPENED_ACCOUNTS", 8)
    one = Ingress("me")

    def receive(seq: int, now: float, *said: AccountUsage) -> None:
        one.receive(codec.encode(UsageReport("p", "e", seq, said)), now)

    receive(1, 0.0, *(entry(caller=f"c{n}", running=1) for n in range(10)))
    assert (len(list(one.limiter.every())), one.usage.refused_total) == (8, 2)
    assert one.admits(Caller("own", "o"), 20.0), "those who ask here are let in"
    assert len(list(one.limiter.every())) == 8 + 2, "and what runs elsewhere is kept"
    receive(2, 20.1, *(entry(caller=f"c{n}") for n in range(10)))
    assert one.usage.refused_total == 4
    receive(3, 40.0, entry(caller="c9"))
    assert len(list(one.limiter.every())) == 1 + 2, "the others were as new"
    receive(4, 40.0, entry(caller="c1", requests=1))
    one.limiter.release(Caller("own", "o"))


def test_an_account_without_room_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Ingress("me")
    one.receive(codec.encode(UsageReport("p", "e", 1, (entry(requests=1, age_s=1.0),))), 2.0)
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", -1)
    monkeypatch.setattr(limits, "MAX_OPENED_ACCOUNTS", 0)
    one.limiter._make_room(2.0, NOON)
    one.receive(codec.encode(UsageReport("p", "e", 2, (entry(requests=2, age_s=2.0, running=1),))), 3.0)
    assert (one.usage._peer_accounts, one.usage.refused_total) == (0, 1)
    monkeypatch.undo()
    again = entry(requests=50, age_s=3.0, lacking_requests=4.0, requests_per_minute=60.0)
    one.receive(codec.encode(UsageReport("p", "e", 3, (again,))), 4.0)
    assert one.level(RATE, 4.0)[0] == 6, "what was counted of it before is not known any more"


def test_limits_that_are_gone_are_told_of_no_more() -> None:
    one, two = Ingress("i1"), Ingress("i2")
    assert one.admits(BUSY)
    two.receive(*one.reports(0.25), 0.25)
    free = Caller("k", "t")
    assert one.admits(free, 1.0)
    one.limiter.release(free)
    two.receive(*one.reports(1.5), 1.5)
    assert two.account_of_all(BUSY).running_elsewhere == 1, "it runs on, and there the limit may still be"
    one.limiter.release(BUSY)
    two.receive(*one.reports(2.0), 2.0)
    assert one.reports(5.0) == []
    assert two.usage._peer_accounts == 0


def test_a_stream_that_began_before_a_limit_does_not_bring_its_bucket_back_full() -> None:
    """The keys are reloaded while it runs: the limit is new, and it is the old stream that ends."""
    one = Ingress("i1")
    free, bound = Caller("k", "t"), Caller("k", "t", limits=KeyLimits(tokens_per_minute=1000))
    assert one.admits(free)
    old = one.limiter.usage_of(free)
    assert one.admits(bound, 1.0)
    assert one.charges(bound, 1000, 1.0)
    one.limiter.release(free)
    one.reports(1.25)
    assert one.admits(bound, 1.3)
    assert not one.charges(bound, 1000, 1.3)
    with pytest.raises(LimitExceeded):
        one.limiter.charge(old, 1000, 1.3, NOON)
    assert not one.charges(bound, 1000, 1.3), "nor did the old usage, which is charged by the limits in force"


def test_an_account_where_something_runs_has_not_ended() -> None:
    """Whatever becomes of its limits: the others would forget what runs."""
    one, two = Ingress("i1"), Ingress("i2")
    assert one.admits(RATE)
    two.receive(*one.reports(0.25), 0.25)
    assert one.admits(Caller("k", "t"), 1.0)
    for now in (1.25, 2.5, 3.75):
        (report,) = one.reports(now)
        (told,) = codec.decode(UsageReport, report).accounts
        assert (told.running, told.ended) == (2, False)
        two.receive(report, now)
        assert two.account(RATE).running_elsewhere == 2
    for _ in range(2):
        one.limiter.release(RATE)
    (report,) = one.reports(4.0)
    assert [(told.running, told.ended) for told in codec.decode(UsageReport, report).accounts] == [(0, True)]
    assert one.reports(5.5) == []
