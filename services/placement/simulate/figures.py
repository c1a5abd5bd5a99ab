"""What came of a run, its figures, and what the fleet could do at most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvfleet.placement.simulate.fleet_shape import Speed
from kvfleet.placement.simulate.scaling import Scaling
from kvfleet.placement.simulate.sim_cache import LruCache
from kvfleet.placement.simulate.tiered_worker import TieredWorker
from kvfleet.placement.simulate.trace import Arrival, Trace
from kvfleet.placement.workers.workloads import Floats

SLO_TTFT_S = 5.0
FASTEST = 1e9  # times: all work takes no time


@dataclass(slots=True)
class Outcome:
    arrival: Arrival
    worker: str = ""  # the first one
    cached_tokens: int = 0
    ttft_s: float | None = None
    ended: bool = False
    attempts: int = 0


@dataclass(slots=True)
class SimulationRun:
    outcomes: list[Outcome]
    prefilled: dict[str, dict[int, float]]  # worker -> minute -> tokens
    lives: dict[str, tuple[float, float]]  # of each worker: when it came and when it went
    changes: list[float]  # times of churn
    fed_tokens: int = 0  # of all attempts, lost ones too
    gaps: dict[float, float] = field(default_factory=dict)  # seconds between two tokens of a sequence -> how many
    scaling: Scaling | None = None  # of a fleet that grows and shrinks
    ended_s: float = 0.0  # when the last request was done
    tiered: list[TieredWorker] = field(default_factory=list)  # all workers that had a tier below


@dataclass(frozen=True, slots=True)
class Figures:
    """Times are infinite if no request got a token."""

    policy: str
    requests: int
    failed: int
    hit_rate: float  # prompt tokens found in a cache, of all
    hit_of_attainable: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    load_cov: float  # coefficient of variation of prefilled tokens over workers, mean over whole minutes
    load_max_over_mean: float  # of tokens prefilled per second of a worker's life
    requests_max_over_mean: float  # the same of requests
    goodput_per_s: float  # requests with a first token within the objective, per second of the trace
    moved: float  # turns that went to another worker than the turn before, of all turns that had one before
    moved_per_change: float | None  # see `moved_per_change`
    itl_p50_s: float  # of the time between two tokens of a sequence
    itl_p99_s: float
    return_ttft_p50_s: float | None = None  # of turns after one that called a tool
    pauses_saved_s: float | None = None  # of restoring, where workers have a tier below


def figures(policy: str, trace: Trace, run: SimulationRun, attainable: int, slo_s: float = SLO_TTFT_S) -> Figures:
    found = sum(outcome.cached_tokens for outcome in run.outcomes)
    waits = ttfts(run)
    served = {name: sum(minutes.values()) for name, minutes in run.prefilled.items()}
    placed = dict.fromkeys(run.prefilled, 0.0)
    for outcome in run.outcomes:
        placed[outcome.worker] = placed.get(outcome.worker, 0.0) + 1
    moved, turns = moves(run)
    return Figures(
        policy,
        len(run.outcomes),
        sum(not outcome.ended for outcome in run.outcomes),
        found / max(trace.prompt_tokens, 1),
        found / attainable if attainable else 1.0,
        float(np.mean(waits)) if len(waits) else math.inf,
        float(np.quantile(waits, 0.5)) if len(waits) else math.inf,
        float(np.quantile(waits, 0.99)) if len(waits) else math.inf,
        load_cov(run, trace.duration_s),
        _max_over_mean(run, served),
        _max_over_mean(run, placed),
        float((waits <= slo_s).sum()) / max(trace.duration_s, 1.0),
        moved / max(turns, 1),
        moved_per_change(run),
        _quantile(run.gaps, 0.5),
        _quantile(run.gaps, 0.99),
        _return_ttft_s(run),
        sum(one.saved_s for one in run.tiered) if run.tiered else None,
    )


def _quantile(gaps: dict[float, float], share: float) -> float:
    """0 where no sequence had a second token."""
    left = share * sum(gaps.values())
    for gap_s in sorted(gaps):
        left -= gaps[gap_s]
        if left <= 0:
            return gap_s
    return 0.0


def _return_ttft_s(run: SimulationRun) -> float | None:
    waits = [turn.ttft_s for before, turn in _turns(run) if before.arrival.tool and turn.ttft_s is not None]
    return float(np.median(waits)) if waits else None


def ttfts(run: SimulationRun) -> Floats:
    """Seconds, of requests that got a first token, in order of arrival."""
    return np.array([outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None], dtype=np.float64)


def minutes_of(run: SimulationRun, duration_s: float) -> list[Floats]:
    """Tokens prefilled by each worker that lived, busy or idle, through a whole minute of the trace, for each of them;
    a shorter trace counts as one."""
    found = []
    for minute in range(max(int(duration_s // 60), 1)):
        began, ends = 60.0 * minute, min(60.0 * (minute + 1), max(duration_s, 60.0 * minute))
        lived = [name for name, (came, went) in run.lives.items() if came <= began and went >= ends]
        found.append(np.array([run.prefilled[name].get(minute, 0.0) for name in lived]))
    return found


def load_cov(run: SimulationRun, duration_s: float) -> float:
    """Over the minutes in which anything was prefilled."""
    covs = [float(tokens.std() / tokens.mean()) for tokens in minutes_of(run, duration_s) if tokens.any()]
    return float(np.mean(covs)) if covs else 0.0


def _max_over_mean(run: SimulationRun, amounts: dict[str, float]) -> float:
    rates = np.array(
        [
            amounts[name] / max(min(went, run.ended_s) - came, 1e-9)
            for name, (came, went) in run.lives.items()
            if came < run.ended_s
        ]
    )
    return float(rates.max() / rates.mean()) if rates.any() else 1.0


def moves(run: SimulationRun) -> tuple[int, int]:
    """(turns that went elsewhere than the one before, turns that had one before)."""
    moved = [before.worker != turn.worker for before, turn in _turns(run)]
    return sum(moved), len(moved)


def _turns(run: SimulationRun) -> Iterator[tuple[Outcome, Outcome]]:
    """Each turn of a conversation, after the turn before."""
    last: dict[str, Outcome] = {}
    for outcome in run.outcomes:
        if (before := last.get(outcome.arrival.session)) is not None:
            yield before, outcome
        last[outcome.arrival.session] = outcome


def moved_per_change(run: SimulationRun) -> float | None:
    """The share of sessions that one change of the fleet, a worker that leaves and another one that joins, moves: the h
    at which, of turns with c > 0 changes since the turn before, 1 - (1 - h)^c are expected to move, as many as did.
    None without changes. Moves because of load count as well, so it is rather too much than too little."""
    if not run.changes:
        return None
    changes = np.array(run.changes)
    counts, moved = [], 0
    for before, turn in _turns(run):
        count = int(np.searchsorted(changes, turn.arrival.at_s) - np.searchsorted(changes, before.arrival.at_s))
        counts.append(count)
        moved += bool(count) and before.worker != turn.worker
    low, high = 0.0, 1.0
    exponents = np.array(counts)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - middle) ** exponents).sum() < moved else (low, middle)
    return high


def worker_hours(run: SimulationRun, start_s: float) -> float:
    """A worker that came later costs from when its start was decided."""
    lives = [(came, went) for came, went in run.lives.values() if came < run.ended_s]
    return sum(min(went, run.ended_s) - max(came - start_s, 0.0) for came, went in lives) / 3600


def held(run: SimulationRun, target_s: float) -> float:
    """Share of all requests with a first token within the target."""
    good = sum(outcome.ttft_s is not None and outcome.ttft_s <= target_s for outcome in run.outcomes)
    return good / max(len(run.outcomes), 1)


def attainable_tokens(trace: Trace, cache_blocks: int) -> int:
    """Prompt tokens found in one LRU cache with the blocks of all workers, requests one after the other."""
    return sum(attainable_by_request(trace, cache_blocks))


def attainable_by_request(trace: Trace, cache_blocks: int) -> Iterator[int]:
    cache = LruCache(cache_blocks)
    for arrival in trace.arrivals:
        depth = cache.match(arrival.ids)
        yield min(depth * trace.block_tokens, arrival.prompt_tokens - 1)
        cache.hold(arrival.ids)
        cache.let_go(arrival.ids)


def capacity_speed(trace: Trace, workers: int, speed: Speed, attainable: int) -> float:
    """How many times as fast as recorded the trace may come at most, if all attainable tokens are hit.

    At capacity every step of a worker carries a chunk of some prompt beside the tokens of those that decode, so with n
    sequences decoding a step takes C/r + d(n) seconds, n is the arrival rate times output tokens times that, and
    prefill does C tokens a step. Solved by bisection.
    """
    duration = max(trace.duration_s, 1e-9)
    tokens = (sum(arrival.prompt_tokens for arrival in trace.arrivals) - attainable) / workers / duration
    outputs = sum(arrival.output_tokens for arrival in trace.arrivals) / workers / duration
    chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s

    def busy(times: float) -> float:
        if outputs * times * speed.decode_each_s >= 1:
            return float("inf")
        # n = o (c + b + e n), so n = o (c + b) / (1 - o e)
        rate = outputs * times
        decoding = rate * (chunk_s + speed.decode_base_s) / (1 - rate * speed.decode_each_s)
        if decoding > speed.slots:
            return float("inf")
        step_s = chunk_s + speed.decode_s(round(decoding))
        return tokens * times * step_s / speed.chunk_tokens

    low, high = 0.0, 1.0
    while busy(high) < 1 and high < FASTEST:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(middle) < 1 else (low, middle)
    return low
