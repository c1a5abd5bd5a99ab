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
    """What may be used at once; below zero: a debt. None: no limit, or not used yet, so it is full. Rate and capacity
    are those of the limits at the last `fill`."""

    level: float | None = None
    per_minute: float = 0.0
    capacity: float = 0.0
    filled_at: float = 0.0

    def level_at(self, now: float, used: float) -> float:
        """What is in it once `used` is taken, and the time since the last `fill` has brought what it brings."""
        if self.level is None:
            return self.capacity - used
        return min(self.capacity, self.level - used + (now - self.filled_at) * self.per_minute / MINUTE_S)

    def fill(self, now: float, per_minute: float, capacity: float, used: float) -> None:
        self.per_minute, self.capacity = per_minute, capacity
        self.level = self.level_at(now, used) if per_minute else None
        self.filled_at = now

    def lacking(self, now: float, used: float) -> float:
        """Until it is full; nothing is filled."""
        return self.capacity - self.level_at(now, used) if self.per_minute else 0.0

    def wait_s(self, count: float) -> float:
        """Until so much may be taken; filled just now."""
        if self.level is None or self.level >= count - ROUNDING:
            return 0.0
        return (count - self.level) * MINUTE_S / self.per_minute

    def take(self, count: float, least: float = -math.inf) -> None:
        """Down to the debt `least` at most, if there is no more already."""
        if self.level is not None and count:
            self.level = max(self.level - count, min(self.level, least))

    @property
    def is_full(self) -> bool:
        return self.level is None or self.level >= self.capacity - ROUNDING


@dataclass(slots=True)
class Account:
    """What one caller, or all callers of one tenant, use: here, and elsewhere as far as that is known."""

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

    # for those elsewhere, and `shared_usage` reports it: what was counted here, since it was new
    asked: int = 0
    spent: int = 0  # as of the last settling
    own_day_tokens: int = 0  # those of `day`
    touched: bool = False  # used otherwise than by `generated`, and not reported yet
    life: int = 0  # what was reported of it since it last was as a new one; 0: nothing was
    born_at: float = 0.0  # when that began
    reported_at: float = -math.inf  # the last time

    @property
    def whose(self) -> str:
        """As messages call it."""
        tenant, caller = self.key
        return "this API key" if caller else f"tenant {tenant}"

    def settle(self, now: float, unix_s: float) -> None:
        """Bring all up to now. A limit that is new begins with a full bucket."""
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
        """Other ingresses have counted so much more, a moment ago. `late`: perhaps long ago, when this one could not
        know. Then it leaves a debt of one bucket at most: what ingresses admitted while they could not reach one
        another must not shut a caller out for as long again."""
        self.settle(now, unix_s)
        for bucket, count in ((self.requests, requests), (self.tokens, tokens)):
            bucket.take(count, -bucket.capacity if late else -math.inf)

    def known_elsewhere(
        self, lacking_requests: float, lacking_tokens: float, day_tokens: int, now: float, unix_s: float
    ) -> None:
        """As much is gone already, by the count of one who was here before; of each bucket twice its worth at most."""
        self.settle(now, unix_s)
        for bucket, lacking in ((self.requests, lacking_requests), (self.tokens, lacking_tokens)):
            if bucket.level is not None:
                bucket.level = min(bucket.level, max(bucket.capacity - lacking, -bucket.capacity))
        self.day_tokens = max(self.day_tokens, day_tokens)

    def is_idle(self) -> bool:
        """Whether a new account would say the same; settled just now."""
        is_used = self.running or self.reading or self.running_elsewhere
        is_used = is_used or (self.limits.tokens_per_day and self.day_tokens)
        return not is_used and self.requests.is_full and self.tokens.is_full


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

    _own: dict[Key, Account] = field(default_factory=dict)
    _tenants: dict[Key, Account] = field(default_factory=dict)
    _dropped_at: float = -BURST_S

    def accounts(self, caller: Caller) -> tuple[Account, Account]:
        """The caller's, and its tenant's. One that is not here is opened with the caller's limits."""
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
        """One that no request here has used: with these limits until one does. None: there are too many."""
        if max(len(self._own), len(self._tenants)) > MAX_ACCOUNTS:
            self._make_room(now, unix_s)
            if max(len(self._own), len(self._tenants)) >= MAX_OPENED_ACCOUNTS:
                return None
        opened = (self._own if key[1] else self._tenants)[key] = Account(key, limits)
        return opened

    def usage_of(self, caller: Caller) -> RunUsage:
        return RunUsage(caller, *self.accounts(caller))

    def reserve(self, caller: Caller, now: float, unix_s: float, *, charged: bool = True) -> None:
        """A place for a request that is yet to be read; nothing of a rate is taken before `admit`. From now on the
        caller's limits are in force. Raises LimitExceeded."""
        for account in self._checked(caller, 1, now, unix_s, charged=charged):
            account.reading += 1
            account.asking += charged

    def unreserve(self, caller: Caller, *, charged: bool = True) -> None:
        for account in self.accounts(caller):
            account.reading -= 1
            account.asking -= charged

    def admit(self, caller: Caller, now: float, unix_s: float, *, choices: int = 1, charged: bool = True) -> None:
        """Count one more request in; one that is not `charged` is not of the rate. Raises LimitExceeded, and
        InvalidRequest for more choices than may ever run at once."""
        for account in self._checked(caller, choices, now, unix_s, charged=charged):
            account.running += choices
            account.asked += charged
            account.touched = True
            if charged:
                account.requests.take(1.0)

    def release(self, caller: Caller, *, choices: int = 1) -> None:
        for account in self.accounts(caller):
            account.running -= choices
            account.touched = True

    def _checked(
        self, caller: Caller, choices: int, now: float, unix_s: float, *, charged: bool
    ) -> tuple[Account, Account]:
        """The accounts, settled, of a caller who may start so much more, beside what is being read."""
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
            if most and account.running + account.running_elsewhere + account.reading + choices > most:
                waits.append((BUSY_RETRY_S, f"at most {most} requests at once with {whose}, each choice counts"))
            if charged and (wait := account.requests.wait_s(1.0 + account.asking)):
                waits.append((wait, f"at most {limits.requests_per_minute:g} requests per minute with {whose}"))
        _refuse_to_wait(waits)
        return own, all_

    def charge(self, usage: RunUsage, prompt_tokens: int, now: float, unix_s: float) -> None:
        """Take a run's prompt, once. Raises PayloadTooLarge for one that would never pass, LimitExceeded."""
        both = self.accounts(usage.caller)
        usage.own, usage.tenants = both  # while it was parked its accounts may have been dropped
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
                per_minute = f"at most {limits.tokens_per_minute:g} tokens per minute with {whose}"
                waits.append((wait, per_minute))
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
        """Those of callers, then those of tenants."""
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
        """Drop the accounts that are idle."""
        if now < self._dropped_at + BURST_S:
            return
        self._dropped_at = now
        for account in self.every():
            account.settle(now, unix_s)
        self._own = {key: account for key, account in self._own.items() if not account.is_idle()}
        self._tenants = {key: account for key, account in self._tenants.items() if not account.is_idle()}


def _refuse_to_wait(waits: list[tuple[float, str]]) -> None:
    """Raises LimitExceeded if there are any. All must have passed, so the longest is the one to tell."""
    if waits:
        wait, why = max(waits)
        raise LimitExceeded(why, retry_after_s=wait)
