"""How many workers a load needs: the arithmetic behind `kvfleet plan`. Pure.

Prefill is taken as a queue with c servers (M/G/c): requests come at random, whichever worker is free takes the next. A
request is served for S, the prompt tokens that no cache has over what a worker feeds beside its decoding sequences:

    feeds    C / (C / r + d(n))     a step carries a chunk C at r tokens/s and one token of each of n sequences, which
                                    takes d(n) = base + each n; n is the rate times output tokens times a mean step
    waits    P(W > t) = P(W > 0) exp(-t 2 (c - a) / ((1 + v) E[S]))      a = rate E[S],  v = (sd[S] / E[S])^2
    P(W > 0) Erlang's C formula

The wait's mean is Allen and Cunneen's approximation (Allen, Probability, Statistics and Queueing Theory, 1990), exact
for c = 1 or S exponential; its tail is taken as exponential, as it is under heavy load. S is lognormal. A first token
comes after W + S. Slots and KV blocks are those of the n sequences, and three standard deviations of a Poisson number
more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

MOST_WORKERS = 100_000
POINTS = 400  # of the distribution of S
DEVIATIONS = 3.0
MOST_USED = 0.9  # of the KV memory, by running sequences


@dataclass(frozen=True, slots=True)
class Demand:
    """`input_cv`: standard deviation of prompt tokens over their mean. `hit_rate`: share of prompt tokens found in a
    cache. `ttft_share` of the first tokens must come within `ttft_s`."""

    requests_per_s: float
    ttft_s: float
    ttft_share: float = 0.95
    input_tokens: float = 1000.0
    input_cv: float = 1.0
    output_tokens: float = 200.0
    hit_rate: float = 0.0

    @property
    def fed_tokens(self) -> float:
        """Of a prompt, those not in a cache."""
        return max(self.input_tokens * (1 - self.hit_rate), 1.0)


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """`kv_tokens`: its capacity; None: not known, and so no limit."""

    prefill_tokens_per_s: float
    decode_s: float  # of a step with hardly any sequence
    decode_each_s: float = 0.0  # more for each
    chunk_tokens: int = 2048
    slots: int = 256
    kv_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """Infinite where the queue never ends."""

    workers: int
    utilisation: float  # of the time that is left beside decoding, spent on prompts
    ttft_share: float  # of first tokens within the target
    ttft_s: float  # that the share asked for stays below
    sequences: float  # that run on a worker, in the mean
    most_sequences: float  # and three standard deviations more
    kv_tokens: float  # that those hold
    itl_s: float  # between two tokens of a stream

    def fits(self, demand: Demand, worker: PlannedWorker, itl_s: float | None) -> str:
        """What it lacks; "": nothing."""
        if self.ttft_share < demand.ttft_share:
            return "time to first token"
        if self.most_sequences > worker.slots:
            return "slots"
        if worker.kv_tokens is not None and self.kv_tokens > MOST_USED * worker.kv_tokens:
            return "KV memory"
        if itl_s is not None and self.itl_s > itl_s:
            return "inter-token latency"
        return ""


def fleet_of(count: int, demand: Demand, worker: PlannedWorker) -> PlannedFleet:
    """Of `count` equal workers that share the load evenly."""
    rate = demand.requests_per_s / count
    running, busy, step_s = _running(rate, demand, worker)
    if busy >= 1:
        return PlannedFleet(count, busy, 0.0, math.inf, running, math.inf, math.inf, step_s)
    service_s = demand.fed_tokens / _feeds(running, worker)
    sizes = lognormal(service_s, demand.input_cv)
    share = ttft_share(demand.ttft_s, demand.requests_per_s, count, service_s, demand.input_cv, sizes)
    most = running + DEVIATIONS * math.sqrt(running)
    held = most * (demand.input_tokens + demand.output_tokens / 2)
    longest = quantile(demand.ttft_share, demand.requests_per_s, count, service_s, demand.input_cv, sizes)
    return PlannedFleet(count, busy, share, longest, running, most, held, step_s)


def _feeds(running: float, worker: PlannedWorker) -> float:
    """Prompt tokens/s beside so many decoding sequences."""
    chunk = worker.chunk_tokens
    decode_s = worker.decode_s + worker.decode_each_s * running if running else 0.0
    return chunk / (chunk / worker.prefill_tokens_per_s + decode_s)


def _running(rate: float, demand: Demand, worker: PlannedWorker) -> tuple[float, float, float]:
    """Of one worker: sequences that decode, share of time that prompts take, seconds of a mean step; by iteration, as
    each follows from the others."""
    running, busy, step_s = 0.0, 0.0, worker.decode_s
    for _ in range(200):
        busy = rate * demand.fed_tokens / _feeds(running, worker)
        chunk_s = worker.chunk_tokens / worker.prefill_tokens_per_s
        decode_s, fed = worker.decode_s + worker.decode_each_s * running, min(busy, 1.0)
        step_s = 1 / (fed / (chunk_s + decode_s) + (1 - fed) / decode_s)
        following = rate * demand.output_tokens * step_s
        if following > 1e6 or abs(following - running) < 1e-9:
            running = following
            break
        running = (running + following) / 2
    return running, busy, step_s


def lognormal(mean: float, cv: float) -> list[float]:
    """Equally probable values of a lognormal distribution, smallest first."""
    if cv <= 0:
        return [mean]
    sigma = math.sqrt(math.log(1 + cv * cv))
    normal = NormalDist(math.log(mean) - sigma * sigma / 2, sigma)
    return [math.exp(normal.inv_cdf((number + 0.5) / POINTS)) for number in range(POINTS)]


def erlang_c(servers: int, offered: float) -> float:
    """The share that has to wait, of what comes to so many servers with an offered load below that."""
    blocked = 1.0
    for number in range(1, servers + 1):  # Erlang's B by recursion
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def ttft_share(limit_s: float, rate: float, servers: int, service_s: float, cv: float, sizes: list[float]) -> float:
    """`sizes`: equally probable values of S."""
    offered = rate * service_s
    if offered >= servers:
        return 0.0
    waits = erlang_c(servers, offered)
    decay = 2 * (servers - offered) / ((1 + cv * cv) * service_s)
    good = 0.0
    for size in sizes:
        if size <= limit_s:
            good += 1 - waits * math.exp(-decay * (limit_s - size))
    return good / len(sizes)


def quantile(share: float, rate: float, servers: int, service_s: float, cv: float, sizes: list[float]) -> float:
    """The wait for a first token that this share stays below; by bisection."""
    low, high = 0.0, service_s
    while ttft_share(high, rate, servers, service_s, cv, sizes) < share:
        high *= 2
        if high > 1e9:
            return math.inf
    for _ in range(40):
        middle = (low + high) / 2
        enough = ttft_share(middle, rate, servers, service_s, cv, sizes) >= share
        low, high = (low, middle) if enough else (middle, high)
    return high


def plan(demand: Demand, worker: PlannedWorker, itl_s: float | None = None) -> tuple[PlannedFleet, str]:
    """The smallest fleet that is enough, and what one worker fewer would lack. Raises ValueError if no number is, as
    more workers make no single prompt quicker."""
    alone = demand.fed_tokens / _feeds(0.0, worker)
    sizes = lognormal(alone, demand.input_cv)
    within = sum(size <= demand.ttft_s for size in sizes) / len(sizes)
    if within < demand.ttft_share:
        least_s = sizes[math.ceil(demand.ttft_share * len(sizes)) - 1]
        raise ValueError(
            f"on an idle worker {within:.1%} of prompts have a first token within {demand.ttft_s:g} s, "
            f"{demand.ttft_share:.0%} are asked for: no number of workers makes one prompt quicker; that takes "
            f"{least_s:,.3g} s"
        )
    if itl_s is not None and itl_s < worker.decode_s:
        raise ValueError(f"a step takes {worker.decode_s * 1e3:.1f} ms with one sequence alone")
    low, high = 0, 1
    while fleet_of(high, demand, worker).fits(demand, worker, itl_s):
        low, high = high, 2 * high
        if high > MOST_WORKERS:
            lacking = fleet_of(low, demand, worker).fits(demand, worker, itl_s)
            raise ValueError(f"{MOST_WORKERS:,} workers are not enough: they lack {lacking}")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fleet_of(middle, demand, worker).fits(demand, worker, itl_s) else (low, middle)
    return fleet_of(high, demand, worker), fleet_of(low, demand, worker).fits(demand, worker, itl_s) if low else ""
