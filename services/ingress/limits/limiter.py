"""What callers and tenants use of their limits. Pure: time is passed in.

Rates are token buckets. The one of requests holds 10 seconds' worth (one at least), for bursts; the one of tokens a
minute's worth, so that a prompt of `tokens_per_minute` can pass. Generated tokens may leave a debt, of `max_concurrent`
times `max_tokens` at most; the next request waits for it. A day's tokens count from midnight UTC.

    reserve ─▶ a place while the body is read ─▶ unreserve
    admit ─▶ one of requests_per_minute, of max_concurrent one for each choice ─▶ release
    charge ─▶ the prompt, of tokens_per_minute and tokens_per_day; once for all readers of a run
    `RunUsage.generated` ─▶ the hot path: two integers; taken from the buckets at the next check
    `used_elsewhere` ◀─ what other ingresses have counted of the same account (`shared_usage`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from kvfleet.ingress.limits.callers import BURST_S, MINUTE_S, NO_LIMITS, Caller, KeyLimits
from kvproto.errors import InvalidRequest, LimitExceeded, PayloadTooLarge

DAY_S = 86_400.0
BUSY_RETRY_S = 1.0  # when a request will end is not known
MAX_ACCOUNTS = 10_000  # beyond so many, those that are as good as new are dropped
MAX_OPENED_ACCOUNTS = 2 * MAX_ACCOUNTS  # beyond so many, none is opened for what runs elsewhere alone
ROUNDING = 1e-6
Key = tuple[str, str]  # tenant, caller's name; "": all of the tenant's callers together


@dataclass(slots=True)
class TokenBucket:
    """A `level` below zero is a debt; None: no limit, or not used yet, so it is full."""

    level: float | None = None
    per_minute: float = 0.0
    capacity: float = 0.0
    filled_at: float = 0.0

    def level_at(self, now: float, used: float) -> float:
        """The level after taking `used`, and refilled since the last `fill`."""
        if self.level is None:
            return self.capacity - used
        return min(self.capacity, self.level - used + (now - self.filled_at) * self.per_minute / MINUTE_S)

    def fill(self, now: float, per_minute: float, capacity: float, used: float) -> None:
        self.per_minute, self.capacity = per_minute, capacity
        self.level = self.level_at(now, used) if per_minute else None
        self.filled_at = now

    def lacking(self, now: float, used: float) -> float:
        """How much is missing until it is full; changes nothing."""
        return self.capacity - self.level_at(now, used) if self.per_minute else 0.0

    def wait_s(self, count: float) -> float:
        """Seconds until `count` may be taken, of a bucket filled just now."""
        if self.level is None or self.level >= count - ROUNDING:
            return 0.0
        return (count - self.level) * MINUTE_S / self.per_minute

    def take(self, count: float, least: float = -math.inf) -> None:
        """Down to the debt `least`, unless it is deeper already."""
        if self.level is not None and count:
            self.level = max(self.level - count, min(self.level, least))

    @property
    def is_full(self) -> bool:
        return self.level is None or self.level >= self.capacity - ROUNDING


@dataclass(slots=True)
class Account:
    """The usage of one caller, or of a tenant's callers together: here, and elsewhere as far as known."""

    key: Key
    limits: KeyLimits = NO_LIMITS  # in force
    running: int = 0  # choices
    reading: int = 0  # requests whose body is being read
    asking: int = 0  # of these, those that the rate of requests will count
    generated: int = 0  # since the last settling
    requests: TokenBucket = field(default_factory=TokenBucket)
    tokens: TokenBucket = field(default_factory=TokenBucket)
    day: int = 0
    day_tokens: int = 0
    running_elsewhere: int = 0

    # counted here since it was new; `shared_usage` reports it to other ingresses
    asked: int = 0
    spent: int = 0  # as of the last settling
    own_day_tokens: int = 0  # those of `day`
    touched: bool = False  # used otherwise than by `generated`, and not reported yet
    life: int = 0  # what was reported of it since it last was as a new one; 0: nothing was
    born_at: float = 0.0  # when that began
    reported_at: float = -math.inf  # the last time

    @property
    def whose(self) -> str:
        tenant, caller = self.key
        return "this API key" if caller else f"tenant {tenant}"

    def settle(self, now: float, unix_s: float) -> None:
        """Bring all up to now. A new limit begins with a full bucket."""
        generated, self.generated = self.generated, 0
        day = int(unix_s // DAY_S)
        if day != self.day:
            self.day, self.day_tokens, self.own_day_tokens = day, 0, 0
        self.day_tokens += generated
        self.own_day_tokens += generated
        self.spent += generated
        limits = self.limits
        self.requests.fill(now, limits.requests_per_minute, limits.request_burst, 0.0)
        self.tokens.fill(now, limits.tokens_per_minute, limits.tokens_per_minute, generated)

    def used_elsewhere(self, requests: float, tokens: float, now: float, unix_s: float, *, late: bool) -> None:
        """Other ingresses have counted so much more. `late`: perhaps long ago, unknown here. Then it leaves a debt of
        one bucket at most: admissions of separated ingresses must not shut a caller out for as long again."""
        self.settle(now, unix_s)
        for bucket, count in ((self.requests, requests), (self.tokens, tokens)):
            bucket.take(count, -bucket.capacity if late else -math.inf)

    def known_elsewhere(
        self, lacking_requests: float, lacking_tokens: float, day_tokens: int, now: float, unix_s: float
    ) -> None:
        """So much is gone already, as an older ingress counts; of each bucket twice its capacity at most."""
        self.settle(now, unix_s)
        for bucket, lacking in ((self.requests, lacking_requests), (self.tokens, lacking_tokens)):
            if bucket.level is not None:
                bucket.level = min(bucket.level, max(bucket.capacity - lacking, -bucket.capacity))
        self.day_tokens = max(self.day_tokens, day_tokens)

    def is_idle(self) -> bool:
        """Whether a new account would be equal to this one, settled just now."""
        is_used = self.running or self.reading or self.running_elsewhere
        is_used = is_used or (self.limits.tokens_per_day and self.day_tokens)
        return not is_used and self.requests.is_full and self.tokens.is_full


@dataclass(slots=True)
class RunUsage:
    """The cost of one run, however many read it. Its first caller pays."""

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
    """The accounts of one process, by name; they outlive reloads of the keys. Owned by the event loop. An account has
    the limits of the caller that was admitted last, also for requests that began before a reload."""

    _own: dict[Key, Account] = field(default_factory=dict)
    _tenants: dict[Key, Account] = field(default_factory=dict)
    _dropped_at: float = -BURST_S

    def accounts(self, caller: Caller) -> tuple[Account, Account]:
        """The caller's, and its tenant's; opened if missing."""
        own = self._own.get(key := (caller.tenant, caller.name))
        if own is None:
            own = self._own[key] = Account(key, caller.limits)
        all_ = self._tenants.get(key := (caller.tenant, ""))
        if all_ is None:
            all_ = self._tenants[key] = Account(key, caller.tenant_limits)
        return own, all_

    def find(self, key: Key) -> Account | None:
        return (self._own if key[1] else self._tenants).get(key)

    def open(self, key: Key, limits: KeyLimits, now: float, unix_s: float) -> Account | None:
        """One that no request here has used yet. None: there are too many."""
        if max(len(self._own), len(self._tenants)) > MAX_ACCOUNTS:
            self._make_room(now, unix_s)
            if max(len(self._own), len(self._tenants)) >= MAX_OPENED_ACCOUNTS:
                return None
        opened = (self._own if key[1] else self._tenants)[key] = Account(key, limits)
        return opened

    def usage_of(self, caller: Caller) -> RunUsage:
        return RunUsage(caller, *self.accounts(caller))

    def reserve(self, caller: Caller, now: float, unix_s: float, *, charged: bool = True) -> None:
        """A place for a request that is yet to be read; `admit` takes from the rates. The caller's limits are in force
        from now on. Raises LimitExceeded."""
        for account in self._checked(caller, 1, now, unix_s, asked=int(charged)):
            account.reading += 1
            account.asking += charged

    def unreserve(self, caller: Caller, *, charged: bool = True) -> None:
        for account in self.accounts(caller):
            account.reading -= 1
            account.asking -= charged

    def admit(
        self, caller: Caller, now: float, unix_s: float, *, choices: int = 1, requests: int = 1, charged: bool = True
    ) -> None:
        """What is not `charged` counts in no rate. Raises LimitExceeded, and InvalidRequest for more than are ever let
        in at once."""
        asked = requests if charged else 0
        for account in self._checked(caller, choices, now, unix_s, asked=asked):
            account.running += choices
            account.asked += asked
            account.touched = True
            account.requests.take(asked)

    def release(self, caller: Caller, *, choices: int = 1) -> None:
        for account in self.accounts(caller):
            account.running -= choices
            account.touched = True

    def _checked(
        self, caller: Caller, choices: int, now: float, unix_s: float, *, asked: int
    ) -> tuple[Account, Account]:
        """The settled accounts of a caller who may start so many choices more; the rate counts `asked` requests."""
        if len(self._own) > MAX_ACCOUNTS:
            self._make_room(now, unix_s)
        own, all_ = self.accounts(caller)
        own.limits, all_.limits = caller.limits, caller.tenant_limits
        waits: list[tuple[float, str]] = []
        for account in (own, all_):
            account.settle(now, unix_s)
            limits, whose, most = account.limits, account.whose, account.limits.max_concurrent
            if most and choices > most:
                raise InvalidRequest(f"at most {most} choices run at once with {whose}, got {choices}", field="n")
            if limits.requests_per_minute and asked > limits.request_burst:
                most_asked = int(limits.request_burst)
                raise InvalidRequest(f"at most {most_asked} prompts at once with {whose}, got {asked}", field="prompt")
            if most and account.running + account.running_elsewhere + account.reading + choices > most:
                waits.append((BUSY_RETRY_S, f"at most {most} requests at once with {whose}, each choice counts"))
            if asked and (wait := account.requests.wait_s(asked + account.asking)):
                waits.append((wait, f"at most {limits.requests_per_minute:g} requests per minute with {whose}"))
        _refuse_to_wait(waits)
        return own, all_

    def charge(self, usage: RunUsage, prompt_tokens: int, now: float, unix_s: float) -> None:
        """Take a run's prompt, once. Raises LimitExceeded, and PayloadTooLarge for one that would never pass."""
        usage.own, usage.tenants = both = self.accounts(usage.caller)  # dropped, perhaps, while it was parked
        if usage.prompt_tokens:
            return
        waits: list[tuple[float, str]] = []
        for account in both:
            account.settle(now, unix_s)
            limits, whose = account.limits, account.whose
            for name in ("tokens_per_minute", "tokens_per_day"):
                if (limit := getattr(limits, name)) and prompt_tokens > limit:
                    raise PayloadTooLarge(
                        f"{prompt_tokens} tokens, and {name} of {whose} is {limit:g}: no waiting helps", field="prompt"
                    )
            if wait := account.tokens.wait_s(prompt_tokens):
                wait = max(wait, account.requests.wait_s(1.0 + account.asking))  # another must be free by then
                waits.append((wait, f"at most {limits.tokens_per_minute:g} tokens per minute with {whose}"))
            if limits.tokens_per_day and account.day_tokens + prompt_tokens > limits.tokens_per_day:
                waits.append((DAY_S - unix_s % DAY_S, f"at most {limits.tokens_per_day} tokens a day with {whose}"))
        _refuse_to_wait(waits)
        usage.prompt_tokens = prompt_tokens
        for account in both:
            account.day_tokens += prompt_tokens
            account.own_day_tokens += prompt_tokens
            account.spent += prompt_tokens
            account.touched = True
            account.tokens.take(prompt_tokens)

    def every(self) -> Iterator[Account]:
        return chain(self._own.values(), self._tenants.values())

    @property
    def running(self) -> int:
        return sum(account.running for account in self._own.values())

    def check_integrity(self) -> None:
        for account in self.every():
            assert account.running >= 0
            assert account.generated >= 0
            assert 0 <= account.asking <= account.reading
            assert account.running_elsewhere >= 0
            assert account.own_day_tokens <= account.day_tokens
            assert self.find(account.key) is account
        for (tenant, _), account in self._tenants.items():
            assert account.running == sum(own.running for (of, _), own in self._own.items() if of == tenant)
        assert self.running == sum(account.running for account in self._tenants.values())

    def _make_room(self, now: float, unix_s: float) -> None:
        if now < self._dropped_at + BURST_S:
            return
        self._dropped_at = now
        for account in self.every():
            account.settle(now, unix_s)
        self._own = {key: account for key, account in self._own.items() if not account.is_idle()}
        self._tenants = {key: account for key, account in self._tenants.items() if not account.is_idle()}


def _refuse_to_wait(waits: list[tuple[float, str]]) -> None:
    """Raises LimitExceeded with the longest of these waits."""
    if waits:
        wait, why = max(waits)
        raise LimitExceeded(why, retry_after_s=wait)
