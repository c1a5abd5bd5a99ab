"""What callers and tenants use of their limits. Pure: time is passed in.

Rates are token buckets. That of requests holds 10 seconds' worth (one at least), so short bursts pass; that of tokens a
minute's worth, so a prompt of up to `tokens_per_minute` can pass at all. A prompt is taken when its run starts,
generated tokens as they come: these may leave a debt, which the next request waits for. As each choice counts in
`max_concurrent`, no debt is more than that many times `max_tokens`. What waiting cannot help is refused for good. A
day's tokens are counted from midnight UTC.

    reserve ─▶ a place while the body is read: who is over a limit is refused before ─▶ unreserve
    admit ─▶ one of requests_per_minute, of max_concurrent one for each choice ─▶ release
    charge ─▶ the prompt, of tokens_per_minute and tokens_per_day; once for all who read the same run
    `RunUsage.generated` ─▶ the hot path: two integers; taken from the buckets at the next check
    `used_elsewhere` ◀─ what other ingresses have counted of the same account; `shared_usage` knows how
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvfleet.ingress.limits.callers import Caller, KeyLimits
from kvproto.errors import InvalidRequest, LimitExceeded, PayloadTooLarge

BURST_S = 10.0
MINUTE_S = 60.0
DAY_S = 86_400.0
BUSY_RETRY_S = 1.0  # when a request will end is not known
MAX_ACCOUNTS = 10_000  # beyond so many, those that are as good as new are dropped
MAX_OPENED_ACCOUNTS = 2 * MAX_ACCOUNTS  # beyond so many, none is opened for what runs elsewhere alone
ROUNDING = 1e-6
Key = tuple[str, str]  # tenant, caller's name; "": all of the tenant's callers together


@dataclass(slots=True)
class TokenBucket:
    """What may be used at once; below zero: a debt. None: no request has used it yet, so it is full."""

    level: float | None = None
    filled_at: float = 0.0

    def fill(self, per_minute: float, capacity: float, used: float, now: float) -> float:
        """Take what was used, add what the time since the last call brought; returns the level."""
        if self.level is None:
            self.level = capacity - used
        else:
            self.level = min(capacity, self.level - used + (now - self.filled_at) * per_minute / MINUTE_S)
        self.filled_at = now
        return self.level

    def take(self, count: float) -> None:
        assert self.level is not None
        self.level -= count

    def take_late(self, count: float, capacity: float) -> None:
        """What was used some time ago, when this bucket could not know. It leaves a debt of one bucket at most: what
        ingresses admitted while they could not reach one another must not shut a caller out for as long again."""
        if self.level is not None:
            self.level = max(self.level - count, min(self.level, -capacity))

    def lacking(self, per_minute: float, capacity: float, used: float, now: float) -> float:
        """What would be missing from it after a `fill` now."""
        if self.level is None:
            return used
        return max(0.0, capacity - (self.level - used + (now - self.filled_at) * per_minute / MINUTE_S))


@dataclass(slots=True)
class ReportedLife:
    """What was reported of an account elsewhere, since it last was as a new one. Owned by `shared_usage`."""

    life: int
    born_at: float
    at: float  # the last time


@dataclass(slots=True)
class Account:
    """What one caller, or all callers of one tenant, use: here, and elsewhere as far as that is known."""

    key: Key
    running: int = 0  # choices
    reading: int = 0  # requests whose body is being read
    asking: int = 0  # of these, those that the rate of requests will count
    generated: int = 0  # since the last settling
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    day: int = 0
    day_tokens: int = 0
    running_elsewhere: int = 0

    # for those elsewhere: what was counted here, since it was new
    asked: int = 0
    spent: int = 0  # as of the last settling
    own_day_tokens: int = 0  # those of `day`
    touched: bool = False  # used otherwise than by `generated`, and not reported yet
    reported: ReportedLife | None = None

    def settle(self, limits: KeyLimits, now: float, unix_s: float) -> None:
        """Bring all up to now. A limit that is new begins with a full bucket."""
        generated, self.generated = self.generated, 0
        day = int(unix_s // DAY_S)
        if day != self.day:
            self.day, self.day_tokens, self.own_day_tokens = day, 0, 0
        self.day_tokens += generated
        self.own_day_tokens += generated
        self.spent += generated
        if limits.requests_per_minute:
            self.requests.fill(limits.requests_per_minute, request_burst(limits), 0.0, now)
        else:
            self.requests.level = None
        if limits.tokens_per_minute:
            self.tokens.fill(limits.tokens_per_minute, limits.tokens_per_minute, generated, now)
        else:
            self.tokens.level = None

    def used_elsewhere(
        self, limits: KeyLimits, requests: float, tokens: float, now: float, unix_s: float, *, late: bool
    ) -> None:
        """Other ingresses have counted so much more, a moment ago; `late`: perhaps long ago."""
        self.settle(limits, now, unix_s)
        for bucket, count, capacity in (
            (self.requests, requests, request_burst(limits)),
            (self.tokens, tokens, limits.tokens_per_minute),
        ):
            if count and bucket.level is not None:
                if late:
                    bucket.take_late(count, capacity)
                else:
                    bucket.take(count)

    def known_elsewhere(
        self,
        limits: KeyLimits,
        lacking_requests: float,
        lacking_tokens: float,
        day_tokens: int,
        now: float,
        unix_s: float,
    ) -> None:
        """As much is gone already, by the count of one who was here before; of each bucket twice its worth at most."""
        self.settle(limits, now, unix_s)
        for bucket, lacking, capacity in (
            (self.requests, lacking_requests, request_burst(limits)),
            (self.tokens, lacking_tokens, limits.tokens_per_minute),
        ):
            if bucket.level is not None:
                bucket.level = min(bucket.level, max(capacity - lacking, -capacity))
        self.day_tokens = max(self.day_tokens, day_tokens)

    def lacking(self, limits: KeyLimits, now: float) -> tuple[float, float]:
        """Requests and tokens until its buckets are full; nothing is settled."""
        requests = tokens = 0.0
        if limits.requests_per_minute:
            requests = self.requests.lacking(limits.requests_per_minute, request_burst(limits), 0.0, now)
        if limits.tokens_per_minute:
            tokens = self.tokens.lacking(limits.tokens_per_minute, limits.tokens_per_minute, float(self.generated), now)
        return requests, tokens

    def is_idle(self, limits: KeyLimits) -> bool:
        """Whether a new account would say the same; settled just now."""
        requests, tokens = self.requests.level, self.tokens.level
        return (
            not self.running
            and not self.reading
            and not self.running_elsewhere
            and (requests is None or requests >= request_burst(limits) - ROUNDING)
            and (tokens is None or tokens >= limits.tokens_per_minute - ROUNDING)
            and not (limits.tokens_per_day and self.day_tokens)
        )


@dataclass(slots=True)
class RunUsage:
    """What one run costs, however many read it: its prompt once, its tokens as they come. Its first caller pays."""

    caller: Caller
    own: Account
    tenants: Account
    model: str | None = None  # once it is known
    prompt_tokens: int = 0  # once they are charged
    output_tokens: int = 0
    cached_tokens: int = 0

    def generated(self, count: int) -> None:
        """The hot path: once for each read of the stream."""
        self.output_tokens += count
        self.own.generated += count
        self.tenants.generated += count


@dataclass(slots=True)
class Limiter:
    """The accounts of one process, by name: they outlive every reload of the keys. Owned by the event loop.

    An account has the limits of the caller that was admitted last: what began before a reload ends under those that
    are in force by then, and brings none of its own back.
    """

    _own: dict[Key, tuple[Account, KeyLimits]] = field(default_factory=dict)
    _tenants: dict[str, tuple[Account, KeyLimits]] = field(default_factory=dict)
    _dropped_at: float = -BURST_S

    def accounts(self, caller: Caller) -> tuple[tuple[Account, KeyLimits, str], tuple[Account, KeyLimits, str]]:
        """The caller's, and its tenant's, with the limits in force, and how messages call them. One that is not here
        is opened with the caller's."""
        own = self._own.get(name := (caller.tenant, caller.name))
        if own is None:
            own = self._own[name] = (Account(name), caller.limits)
        all_ = self._tenants.get(caller.tenant)
        if all_ is None:
            all_ = self._tenants[caller.tenant] = (Account((caller.tenant, "")), caller.tenant_limits)
        return (*own, "this API key"), (*all_, f"tenant {caller.tenant}")

    def find(self, key: Key) -> tuple[Account, KeyLimits] | None:
        """One that is here, with the limits in force."""
        return self._own.get(key) if key[1] else self._tenants.get(key[0])

    def open(self, key: Key, limits: KeyLimits, now: float, unix_s: float) -> tuple[Account, KeyLimits] | None:
        """One that is not here, as no request here has used it: with these limits until one does. None: there are
        too many."""
        if max(len(self._own), len(self._tenants)) > MAX_ACCOUNTS:
            self._make_room(now, unix_s)
            if max(len(self._own), len(self._tenants)) >= MAX_OPENED_ACCOUNTS:
                return None
        opened = Account(key), limits
        if key[1]:
            self._own[key] = opened
        else:
            self._tenants[key[0]] = opened
        return opened

    def usage_of(self, caller: Caller) -> RunUsage:
        own, tenants = self.accounts(caller)
        return RunUsage(caller, own[0], tenants[0])

    def reserve(self, caller: Caller, now: float, unix_s: float, *, charged: bool = True) -> None:
        """A place for a request that is yet to be read; nothing of a rate is taken before `admit`. From now on the
        caller's limits are in force. Raises LimitExceeded."""
        for account, _ in self._checked(caller, 1, now, unix_s, charged=charged):
            account.reading += 1
            account.asking += charged

    def unreserve(self, caller: Caller, *, charged: bool = True) -> None:
        """It has been read, or given up."""
        for account, _, _ in self.accounts(caller):
            account.reading -= 1
            account.asking -= charged

    def admit(self, caller: Caller, now: float, unix_s: float, *, choices: int = 1, charged: bool = True) -> None:
        """Count one more request in; one that is not `charged` is not of the rate. Raises LimitExceeded, and
        InvalidRequest for more choices than may ever run at once."""
        for account, limits in self._checked(caller, choices, now, unix_s, charged=charged):
            account.running += choices
            account.asked += charged
            account.touched = True
            if charged and limits.requests_per_minute:
                account.requests.take(1.0)

    def release(self, caller: Caller, *, choices: int = 1) -> None:
        for account, _, _ in self.accounts(caller):
            account.running -= choices
            account.touched = True

    def _checked(
        self, caller: Caller, choices: int, now: float, unix_s: float, *, charged: bool
    ) -> list[tuple[Account, KeyLimits]]:
        """The accounts, settled, of a caller who may start so much more, beside what is being read."""
        if len(self._own) > MAX_ACCOUNTS:
            self._make_room(now, unix_s)
        self._put_in_force(caller)
        both = self.accounts(caller)
        waits: list[tuple[float, str]] = []
        for account, limits, whose in both:
            account.settle(limits, now, unix_s)
            most = limits.max_concurrent
            if most and choices > most:
                raise InvalidRequest(f"at most {most} choices run at once with {whose}, got {choices}", field="n")
            if most and account.running + account.running_elsewhere + account.reading + choices > most:
                waits.append((BUSY_RETRY_S, f"at most {most} requests at once with {whose}, each choice counts"))
            if charged and (wait := request_wait(account, limits)):
                waits.append((wait, f"at most {limits.requests_per_minute:g} requests per minute with {whose}"))
        if waits:
            raise _refusal(waits)
        return [(account, limits) for account, limits, _ in both]

    def charge(self, usage: RunUsage, prompt_tokens: int, now: float, unix_s: float) -> None:
        """Take a run's prompt, once. Raises PayloadTooLarge for one that would never pass, LimitExceeded."""
        both = self.accounts(usage.caller)
        usage.own, usage.tenants = both[0][0], both[1][0]  # while it was parked its accounts may have been dropped
        if usage.prompt_tokens:
            return
        waits: list[tuple[float, str]] = []
        for account, limits, whose in both:
            account.settle(limits, now, unix_s)
            for name, limit in (
                ("tokens_per_minute", limits.tokens_per_minute),
                ("tokens_per_day", limits.tokens_per_day),
            ):
                if limit and prompt_tokens > limit:
                    raise PayloadTooLarge(
                        f"{prompt_tokens} tokens, and {name} of {whose} is {limit:g}: no waiting helps", field="prompt"
                    )
            if wait := token_wait(account, limits, prompt_tokens):
                per_minute = f"at most {limits.tokens_per_minute:g} tokens per minute with {whose}"
                # By then another request must be free too.
                waits.append((max(wait, request_wait(account, limits)), per_minute))
            if limits.tokens_per_day and account.day_tokens + prompt_tokens > limits.tokens_per_day:
                wait = DAY_S - unix_s % DAY_S
                waits.append((wait, f"at most {limits.tokens_per_day} tokens a day with {whose}"))
        if waits:
            raise _refusal(waits)
        usage.prompt_tokens = prompt_tokens
        for account, limits, _ in both:
            account.day_tokens += prompt_tokens
            account.own_day_tokens += prompt_tokens
            account.spent += prompt_tokens
            account.touched = True
            if limits.tokens_per_minute:
                account.tokens.take(prompt_tokens)

    def every(self) -> Iterator[Account]:
        """Those of callers, then those of tenants."""
        return (account for account, _ in self.with_limits())

    def with_limits(self) -> Iterator[tuple[Account, KeyLimits]]:
        """The same with the limits in force."""
        return chain(self._own.values(), self._tenants.values())

    @property
    def running(self) -> int:
        """Choices of all callers."""
        return sum(account.running for account, _ in self._own.values())

    @property
    def reading(self) -> int:
        return sum(account.reading for account, _ in self._own.values())

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts do not add up."""
        assert all(account.running >= 0 and account.generated >= 0 for account in self.every())
        assert all(0 <= account.asking <= account.reading for account in self.every())
        assert all(account.running_elsewhere >= 0 for account in self.every())
        assert all(account.own_day_tokens <= account.day_tokens for account in self.every())
        assert all(self.find(account.key) == (account, limits) for account, limits in self.with_limits())
        assert self.running == sum(account.running for account, _ in self._tenants.values())
        for tenant, (account, _) in self._tenants.items():
            assert account.running == sum(own.running for (of, _), (own, _) in self._own.items() if of == tenant)

    def _put_in_force(self, caller: Caller) -> None:
        (own, own_limits, _), (tenants, tenant_limits, _) = self.accounts(caller)
        if own_limits is not caller.limits:
            self._own[own.key] = own, caller.limits
        if tenant_limits is not caller.tenant_limits:
            self._tenants[caller.tenant] = tenants, caller.tenant_limits

    def _make_room(self, now: float, unix_s: float) -> None:
        if now >= self._dropped_at + BURST_S:
            self._drop_idle(now, unix_s)
            self._dropped_at = now

    def _drop_idle(self, now: float, unix_s: float) -> None:
        for account, limits in self.with_limits():
            account.settle(limits, now, unix_s)
        self._own = {name: one for name, one in self._own.items() if not one[0].is_idle(one[1])}
        self._tenants = {name: one for name, one in self._tenants.items() if not one[0].is_idle(one[1])}


def is_counted(limits: KeyLimits) -> bool:
    """Whether there is anything that its callers could use up."""
    return bool(
        limits.max_concurrent or limits.requests_per_minute or limits.tokens_per_minute or limits.tokens_per_day
    )


def request_burst(limits: KeyLimits) -> float:
    """Requests that may start at once."""
    return max(1.0, limits.requests_per_minute / MINUTE_S * BURST_S)


def request_wait(account: Account, limits: KeyLimits) -> float:
    """Seconds until one more request may start, beside those that are being read; of an account that is settled."""
    level = account.requests.level
    if level is None or level - account.asking >= 1.0 - ROUNDING:
        return 0.0
    return (1.0 + account.asking - level) * MINUTE_S / limits.requests_per_minute


def token_wait(account: Account, limits: KeyLimits, tokens: int) -> float:
    """Seconds until so many tokens may be taken; of an account that is settled."""
    level = account.tokens.level
    if level is None or level >= tokens - ROUNDING:
        return 0.0
    return (tokens - level) * MINUTE_S / limits.tokens_per_minute


def _refusal(waits: list[tuple[float, str]]) -> LimitExceeded:
    """All must have passed, so the longest is the one to tell."""
    wait, why = max(waits)
    return LimitExceeded(why, retry_after_s=wait)
