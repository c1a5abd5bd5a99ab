"""What came of a run, and figures of it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvfleet.placement.simulate.trace import Arrival, Trace
from kvfleet.placement.workers.workloads import Floats

SLO_TTFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    ready: int
    starting: int
    desired: int


@dataclass(slots=True)
class Scaled:
    """What happened. `lost_tokens` were computed again because a scale-down took the only copy."""

    timeline: list[Moment] = field(default_factory=list)
    ups: int = 0
    downs: list[float] = field(default_factory=list)  # when each worker went
    lost_blocks: int = 0  # that nobody else had
    lost_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """One request. `worker`: the first one it was placed at."""

    arrival: Arrival
    worker: str = ""
    cached_tokens: int = 0
    ttft_s: float | None = None
    ended: bool = False
    attempts: int = 0


@dataclass(slots=True)
class SimulationRun:
    """All of it. `prefilled` is tokens per worker and minute; `changes` are the times of churn. `fed_tokens` are those
    of all attempts, lost ones too."""

    outcomes: list[Outcome]
    prefilled: dict[str, dict[int, float]]
    lives: dict[str, tuple[float, float]]  # of each worker: when it came and when it went
    changes: list[float]
    fed_tokens: int = 0
    scaled: Scaled = field(default_factory=Scaled)
    ended_s: float = 0.0  # when the last request was done


@dataclass(frozen=True, slots=True)
class Figures:
    """`load_cov`: mean over whole minutes of the coefficient of variation of prefilled tokens over workers. Times are
    infinite if nobody ever got a token."""

    policy: str
    requests: int
    failed: int
    hit_rate: float  # prompt tokens found in a cache, of all
    hit_of_attainable: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    load_cov: float
    load_max_over_mean: float  # of tokens prefilled per second of a worker's life
    requests_max_over_mean: float  # the same of requests
    goodput_per_s: float  # requests with a first token within the objective, per second of the trace
    moved: float  # turns that went to another worker than the turn before, of all turns that had one before
    moved_per_change: float | None  # see `moved_per_change`


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
    )


def ttfts(run: SimulationRun) -> Floats:
    """Seconds, of those who got a first token, in order of arrival."""
    return np.array([outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None], dtype=np.float64)


def minutes_of(run: SimulationRun, duration_s: float) -> list[Floats]:
    """Of each whole minute of the trace, or the one that it is shorter than: tokens prefilled by each worker that
    lived all through it; workers that had nothing to do count as well."""
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
    at: dict[str, str] = {}
    moved = turns = 0
    for outcome in run.outcomes:
        before = at.get(outcome.arrival.session)
        if before is not None:
            turns += 1
            moved += before != outcome.worker
        at[outcome.arrival.session] = outcome.worker
    return moved, turns


def moved_per_change(run: SimulationRun) -> float | None:
    """The share of sessions that one change of the fleet, a worker that leaves and another one that joins, moves: the h
    at which, of turns with c > 0 changes since the turn before, 1 - (1 - h)^c are expected to move, as many as did.
    None without changes. What moves for its load's sake counts as well, so it is rather too much than too little."""
    if not run.changes:
        return None
    changes = np.array(run.changes)
    at: dict[str, tuple[str, float]] = {}
    counts, moved = [], 0
    for outcome in run.outcomes:
        before = at.get(outcome.arrival.session)
        now = outcome.arrival.at_s
        if before is not None:
            count = int(np.searchsorted(changes, now) - np.searchsorted(changes, before[1]))
            counts.append(count)
            moved += bool(count) and before[0] != outcome.worker
        at[outcome.arrival.session] = (outcome.worker, now)
    low, high = 0.0, 1.0
    exponents = np.array(counts)
    for _ in range(40):
        middle = (low + high) / 2
        if (1 - (1 - middle) ** exponents).sum() < moved:
            low = middle
        else:
            high = middle
    return high


def worker_hours(run: SimulationRun, start_s: float) -> float:
    """That are paid for: a worker that came later costs from when it was asked for."""
    lives = [(came, went) for came, went in run.lives.values() if came < run.ended_s]
    return sum(min(went, run.ended_s) - max(came - start_s, 0.0) for came, went in lives) / 3600


def held(run: SimulationRun, target_s: float) -> float:
    """Share of all requests with a first token within so long."""
    good = sum(outcome.ttft_s is not None and outcome.ttft_s <= target_s for outcome in run.outcomes)
    return good / max(len(run.outcomes), 1)
