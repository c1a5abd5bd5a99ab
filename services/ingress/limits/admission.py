"""Admission by the process's requests, the limits of caller and tenant, and the memory of what runs. Pure: `now` is in
seconds of any clock that does not go back, `unix_s` reads the wall clock.

    used <= half   all grow, new ones are let in
    used > half    none is let in; a run that holds more than an even share of the half, and would grow, ends

Runs beyond their share do not grow, and those below reach it at most, so no more than the whole is used. A test
measures that costs are what CPython takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.limits.limiter import Limiter, RunUsage
from kvproto.errors import Draining, InvalidRequest, LimitExceeded, PayloadTooLarge, Unavailable
from kvproto.messages import Sampling

DEFAULT_BYTES = 384 * 1024 * 1024
FREE_RETURNS = 8  # of one run, for broken connections; later ones are charged as new requests


@dataclass(slots=True)
class Admission:
    """Owned by the event loop. `reading` ─▶ (body) ─▶ `admit` ─▶ (run) ─▶ `release`; a request gives up its place and
    is admitted in one step of the event loop."""

    max_concurrent: int
    unix_s: Callable[[], float]
    running: int = 0
    choices: int = 0  # of those that run and are no repeats
    repeats: int = 0  # of those that run
    being_read: int = 0
    draining: bool = False
    refused_total: int = 0
    limiter: Limiter = field(default_factory=Limiter)

    @contextmanager
    def reading(self, caller: Caller, now: float, *, repeat: bool = False, returns: int = 0) -> Iterator[None]:
        """A place while a request is read. Raises as `admit` does, as far as its headers tell what it is."""
        charged = _is_charged(returns)
        with self._counting_refusals():
            self._check_process()
            if not repeat:
                self.limiter.reserve(caller, now, self.unix_s(), charged=charged)
        self.being_read += 1
        try:
            yield
        finally:
            self.being_read -= 1
            if not repeat:
                self.limiter.unreserve(caller, charged=charged)

    def admit(
        self,
        caller: Caller,
        now: float,
        *,
        choices: int = 1,
        requests: int = 1,
        repeat: bool = False,
        returns: int = 0,
    ) -> None:
        """So many `requests` with `choices` together. Raises LimitExceeded (429), Unavailable or Draining (503), with a
        time to retry; InvalidRequest (400) for more than the caller may ever have.

        A `repeat` of a request that runs or has finished uses none of the caller's limits: its client may be back
        before its lost connection is noticed. A parked one that goes on counts in `max_concurrent`; of its `returns`
        the first `FREE_RETURNS` count in no rate.
        """
        with self._counting_refusals():
            self._check_process(requests)
            if not repeat:
                charged = _is_charged(returns)
                unix_s = self.unix_s()
                self.limiter.admit(caller, now, unix_s, choices=choices, requests=requests, charged=charged)
        if repeat:
            self.repeats += 1
        else:
            self.choices += choices
        self.running += requests

    def release(self, caller: Caller, *, choices: int = 1, requests: int = 1, repeat: bool = False) -> None:
        self.running -= requests
        if repeat:
            self.repeats -= 1
        else:
            self.choices -= choices
            self.limiter.release(caller, choices=choices)

    def meter(self, caller: Caller, now: float) -> None:
        """Count a question to workers as a request. Raises LimitExceeded."""
        with self._counting_refusals():
            self.limiter.admit(caller, now, self.unix_s(), choices=0)

    def charge(self, usage: RunUsage, prompt_tokens: int, now: float) -> None:
        """Take the prompt of a run that starts for the first time. Raises as `Limiter.charge` does."""
        with self._counting_refusals():
            self.limiter.charge(usage, prompt_tokens, now, self.unix_s())

    def check_integrity(self) -> None:
        self.limiter.check_integrity()
        assert self.choices == self.limiter.running
        assert 0 <= self.repeats <= self.running
        assert sum(account.reading for account in self.limiter.every() if account.key[1]) <= self.being_read

    def _check_process(self, requests: int = 1) -> None:
        if self.draining:
            raise Draining("this ingress is shutting down", retry_after_s=1.0)
        if requests > self.max_concurrent:
            raise InvalidRequest(f"at most {self.max_concurrent} prompts at once, got {requests}", field="prompt")
        if self.running + self.being_read + requests > self.max_concurrent:
            raise Unavailable(f"{self.max_concurrent} requests are running, the most served at once", retry_after_s=1.0)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (LimitExceeded, PayloadTooLarge, Unavailable):
            self.refused_total += 1
            raise


def _is_charged(returns: int) -> bool:
    return not 1 <= returns <= FREE_RETURNS


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Bytes of memory for each token, for its log probability, and for each alternative to it."""

    token: int
    logprobs: int
    alternative: int

    def of(self, tokens: int, alternatives: int | None) -> int:
        """`alternatives` None: no log probabilities."""
        scored = self.logprobs + self.alternative * alternatives if alternatives is not None else 0
        return tokens * (self.token + scored)


STREAMED = TokenCosts(128, 256, 72)
WHOLE = TokenCosts(192, 1024, 448)  # with the answer's JSON and what it is made of


@dataclass(slots=True)
class RunMemory:
    """Owned by the event loop. A holder adds its growth, and gives back all of it."""

    limit: int = DEFAULT_BYTES
    used: int = 0
    holders: int = 0

    @property
    def half(self) -> int:
        return self.limit // 2

    def check_room(self) -> None:
        """Raises Unavailable if a new request would have to wait for others to end."""
        if self.used > self.half:
            raise Unavailable("running answers have used up their memory", retry_after_s=1.0)

    def check_longest(self, sampling: Sampling, costs: TokenCosts, field: str, prompt_tokens: int = 0) -> None:
        """Raises PayloadTooLarge for a request whose longest answer never fits, with what it tells of the prompt."""
        longest = costs.of(sampling.n * sampling.max_tokens, sampling.logprobs)
        told = 0
        if sampling.prompt_logprobs is not None:
            told = WHOLE.of(sampling.n * prompt_tokens, sampling.prompt_logprobs)  # in one piece
        if told > self.half:
            raise PayloadTooLarge(
                f"n times the log probabilities of its {prompt_tokens} tokens may take {megabytes(told)}; one answer "
                f"may take {megabytes(self.half)}",
                field="prompt",
            )
        if longest + told > self.half:
            raise PayloadTooLarge(
                f"n * {field} is {sampling.n * sampling.max_tokens} tokens, which may take {megabytes(longest)} with "
                f"what is asked of each; one answer may take {megabytes(self.half)}",
                field=field,
            )

    def check_share(self, held: int) -> None:
        """Raises PayloadTooLarge for a run that must not grow beyond what it holds."""
        if self.used > self.half and held * self.holders > self.half:
            raise PayloadTooLarge(
                f"running answers have used up their memory, and this one has more than its share: {megabytes(held)}. "
                "Ask for fewer choices, tokens or log probabilities"
            )


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
