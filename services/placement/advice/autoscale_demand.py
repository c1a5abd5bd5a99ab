"""What there is to do for one model, measured: what its workers say of themselves, and what was refused. Pure.

Every replica hears the same heartbeats and is told of the others' refusals, so all of them measure the same.

A worker counts as busy while it has any prompt token to feed: the share of its heartbeats that say so is how busy it
is, whatever its rate is said to be. Tokens over rates say by how much more than busy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvproto.messages import Heartbeat, Load, Rates

OUTSIDE_S = 60.0  # what was refused counts for so long
STALE_S = 4.0  # since a heartbeat: more, and nothing is known of that worker
REFUSED_S = 10.0  # who was refused so lately is taken to stand outside


@dataclass(frozen=True, slots=True)
class _Totals:
    at: float
    beats: int
    busy: int
    prefilled: int
    queued: int


@dataclass(slots=True)
class HeardDemand:
    """One life of one worker, by its heartbeats."""

    epoch: str
    at: float
    load: Load
    rates: Rates
    beats: int = 0
    busy: int = 0
    totals: deque[_Totals] = field(default_factory=deque)  # one per sample, the first about a window ago

    def hear(self, beat: Heartbeat, now: float) -> None:
        self.at, self.load, self.rates = now, beat.load, beat.rates
        self.beats += 1
        self.busy += beat.load.queued_prefill_tokens > 0

    def sample(self, now: float, window_s: float) -> None:
        """Work is that of so long."""
        load = self.load
        prefilled = max(load.fed_tokens_total - load.generated_tokens_total, 0)
        self.totals.append(_Totals(now, self.beats, self.busy, prefilled, load.queued_prefill_tokens))
        while len(self.totals) > 2 and self.totals[1].at <= now - window_s:
            self.totals.popleft()

    @property
    def wait_s(self) -> float:
        """Until it has fed what it has; 0 where that is not known."""
        rate = self.rates.prefill_tokens_per_s
        return self.load.queued_prefill_tokens / rate if rate > 0 else 0.0

    @property
    def busy_share(self) -> float:
        first, last = self.totals[0], self.totals[-1]
        beats = last.beats - first.beats
        return (last.busy - first.busy) / beats if beats else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Fed, and come to wait."""
        first, last = self.totals[0], self.totals[-1]
        if last.at <= first.at:
            return 0.0
        return max(last.prefilled - first.prefilled + last.queued - first.queued, 0) / (last.at - first.at)


@dataclass(slots=True)
class _Refused:
    at: float
    requests: int
    tokens: int


class Outside:
    """Requests that were refused, as all replicas tell."""

    def __init__(self) -> None:
        self._refused: deque[_Refused] = deque()
        self.asked_at = float("-inf")
        self.first_at = float("-inf")  # since when somebody asks again and again in vain

    def refuse(self, requests: int, tokens: int, now: float) -> None:
        if now - self.asked_at > OUTSIDE_S:
            self.first_at = now
        self.asked_at = now
        if self._refused and now - self._refused[-1].at < 1.0:
            self._refused[-1].requests += requests
            self._refused[-1].tokens += tokens
        else:
            self._refused.append(_Refused(now, requests, tokens))
        while self._refused[0].at <= now - OUTSIDE_S:
            self._refused.popleft()

    def requests(self, now: float) -> int:
        """That stand outside."""
        return sum(one.requests for one in self._refused if now - one.at <= REFUSED_S)

    def tokens_per_s(self, now: float) -> float:
        return sum(one.tokens for one in self._refused if now - one.at <= OUTSIDE_S) / OUTSIDE_S

    def is_asked(self, now: float) -> bool:
        return now - self.asked_at <= OUTSIDE_S

    def since_s(self, now: float) -> float:
        return now - self.first_at if now - self.asked_at <= REFUSED_S else 0.0


def mean_rate(workers: list[HeardDemand]) -> float:
    """Prefill tokens/s of a worker, of those who measured; 0: nobody has."""
    rates = [one.rates.prefill_tokens_per_s for one in workers if one.rates.prefill_tokens_per_s > 0]
    return len(rates) / sum(1 / rate for rate in rates) if rates else 0.0


def usual_wait_s(workers: list[HeardDemand]) -> float:
    """Half of the workers have a queue of that or less: a new request goes to one of them."""
    waits = sorted(one.wait_s for one in workers)
    return waits[(len(waits) - 1) // 2] if waits else 0.0
