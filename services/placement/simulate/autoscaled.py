"""A trace on a fleet that grows and shrinks, beside one that always has its most workers: figures and lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfleet.placement.simulate.figures import Figures, figures
from kvfleet.placement.simulate.fleet_shape import FleetShape, SimulationRun
from kvfleet.placement.simulate.scaling import Moment, Scaled, worker_hours
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import Trace

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Autoscaled:
    """One run. `ttft_held` is the share of requests that had their first token within the target."""

    victim: str
    figures: Figures
    scaled: Scaled
    worker_hours: float
    fixed_worker_hours: float  # of the most workers, all the time
    ttft_held: float
    ended_s: float

    @property
    def most(self) -> int:
        return max(moment.ready for moment in self.scaled.timeline)


def run_autoscaled(trace: Trace, shape: FleetShape, policy: str, attainable: int, slo_s: float) -> Autoscaled:
    """`shape.autoscale` says how; `shape.workers` is the fixed fleet that it is compared with."""
    scale = shape.autoscale
    assert scale is not None
    run = Simulation(trace, shape, policy).run()
    return Autoscaled(
        scale.victim.value,
        figures(policy, trace, run, attainable, slo_s),
        run.scaled,
        worker_hours(run.lives.values(), run.ended_s, scale.start_s),
        shape.workers * run.ended_s / 3600,
        held(run, scale.rules.target_ttft_s),
        run.ended_s,
    )


def held(run: SimulationRun, target_s: float) -> float:
    """Share of all requests with a first token within so long."""
    good = sum(outcome.ttft_s is not None and outcome.ttft_s <= target_s for outcome in run.outcomes)
    return good / max(len(run.outcomes), 1)


def by_minute(one: Autoscaled) -> list[Moment]:
    """As it was at the beginning of each minute."""
    found, at = [], 0
    timeline = one.scaled.timeline
    for minute in range(int(one.ended_s // MINUTE_S) + 1):
        while at + 1 < len(timeline) and timeline[at + 1].at_s <= minute * MINUTE_S:
            at += 1
        found.append(timeline[at])
    return found


def rows(found: Sequence[Autoscaled], fixed: Figures, fixed_held: float) -> list[tuple[str, ...]]:
    """A table: the fixed fleet first."""
    head = ("fleet", "worker-hours", "TTFT p50", "p99", "in target", "hits", "up", "down", "lost to scale-down")
    lines: list[tuple[str, ...]] = [head]
    if found:
        always = found[0].fixed_worker_hours
        lines.append(
            ("fixed", f"{always:.2f}", *_waits(fixed), f"{fixed_held:.1%}", f"{fixed.hit_rate:.1%}", "", "", "")
        )
    for one in found:
        scaled = one.scaled
        lines.append(
            (
                f"autoscaled, {one.victim} goes",
                f"{one.worker_hours:.2f}",
                *_waits(one.figures),
                f"{one.ttft_held:.1%}",
                f"{one.figures.hit_rate:.1%}",
                f"{scaled.ups}",
                f"{len(scaled.downs)}",
                f"{scaled.lost_tokens:,} tokens",
            )
        )
    return lines


def changes(one: Autoscaled) -> str:
    """Ready workers over time: the number, and from when on."""
    said, last = [], None
    for moment in one.scaled.timeline:
        if moment.ready != last:
            said.append(f"{moment.ready} at {_clock(moment.at_s)}")
            last = moment.ready
    return ", ".join(said)


def as_values(one: Autoscaled) -> dict[str, Any]:
    figures_ = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(one.figures).items()
    }
    return {
        **figures_,
        "scale_down": one.victim,
        "worker_hours": one.worker_hours,
        "fixed_worker_hours": one.fixed_worker_hours,
        "ttft_held": one.ttft_held,
        "scale_ups": one.scaled.ups,
        "scale_downs": len(one.scaled.downs),
        "lost_blocks": one.scaled.lost_blocks,
        "lost_tokens": one.scaled.lost_tokens,
        "most_workers": one.most,
        "replicas_by_minute": [moment.ready for moment in by_minute(one)],
        "desired_by_minute": [moment.desired for moment in by_minute(one)],
    }


def _waits(one: Figures) -> tuple[str, str]:
    return _wait(one.ttft_p50_s), _wait(one.ttft_p99_s)


def _wait(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"


def _clock(at_s: float) -> str:
    return f"{int(at_s // 60)}:{int(at_s % 60):02d}"
