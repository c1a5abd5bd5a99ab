"""From a run to figures. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.placement.simulate.simulation import Run
from services.placement.simulate.trace import Trace

SLO_TTFT_S = 5.0


@dataclass(frozen=True, slots=True)
class Figures:
    """`load_cov`: mean over whole minutes of the coefficient of variation of prefilled tokens over workers."""

    policy: str
    requests: int
    failed: int
    hit_rate: float
    hit_of_attainable: float
    ttft_p50_s: float
    ttft_p99_s: float
    load_cov: float
    load_max_over_mean: float  # of prefilled tokens in the whole run
    requests_max_over_mean: float
    goodput_per_s: float  # requests with a first token within the objective, per second of the trace
    moved: float  # turns that went to another worker than the turn before, of all turns that had one before
    moved_per_change: float | None  # see `moved_per_change`


def figures(policy: str, trace: Trace, run: Run, attainable: int, slo_s: float = SLO_TTFT_S) -> Figures:
    prompt = sum(arrival.prompt_tokens for arrival in trace.arrivals)
    found = sum(outcome.cached_tokens for outcome in run.outcomes)
    waits = np.array([outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None])
    duration = max(trace.duration_s, 1.0)
    served = np.array([sum(minutes.values()) for minutes in run.prefilled.values()])
    placed: dict[str, int] = dict.fromkeys(run.prefilled, 0)
    for outcome in run.outcomes:
        placed[outcome.worker] = placed.get(outcome.worker, 0) + 1
    counts = np.array(list(placed.values()), dtype=float)
    moved, turns = moves(run)
    return Figures(
        policy,
        len(run.outcomes),
        sum(not outcome.ended for outcome in run.outcomes),
        found / max(prompt, 1),
        found / max(attainable, 1),
        float(np.quantile(waits, 0.5)) if len(waits) else float("nan"),
        float(np.quantile(waits, 0.99)) if len(waits) else float("nan"),
        load_cov(run, trace.duration_s),
        float(served.max() / served.mean()) if served.sum() else 1.0,
        float(counts.max() / counts.mean()),
        sum(wait <= slo_s for wait in waits.tolist()) / duration,
        moved / max(turns, 1),
        moved_per_change(run),
    )


def load_cov(run: Run, duration_s: float) -> float:
    """Over the whole minutes in which anything was prefilled; workers that never worked count as well."""
    covs = []
    for minute in range(int(duration_s // 60)):
        tokens = np.array([minutes.get(minute, 0.0) for minutes in run.prefilled.values()])
        if tokens.any():
            covs.append(tokens.std() / tokens.mean())
    return float(np.mean(covs)) if covs else 0.0


def moves(run: Run) -> tuple[int, int]:
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


def moved_per_change(run: Run) -> float | None:
    """The share of sessions that one change of the fleet moves: the h at which, of turns with c changes since the turn
    before, 1 - (1 - h)^c are expected to move, as many as did. None without changes."""
    if not run.changes:
        return None
    changes = np.array(run.changes)
    at: dict[str, tuple[str, float]] = {}
    counts, moved = [], 0
    for outcome in run.outcomes:
        before = at.get(outcome.arrival.session)
        now = outcome.arrival.at_s
        if before is not None:
            counts.append(int(np.searchsorted(changes, now) - np.searchsorted(changes, before[1])))
            moved += before[0] != outcome.worker
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
