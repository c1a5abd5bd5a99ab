"""All runs for one trace and fleet: some policies, at one speed, at several loads, on a fleet that grows and shrinks.
Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from kvfleet.placement.policies import DIRECT, POLICY_NAMES
from kvfleet.placement.simulate.figures import (
    SLO_TTFT_S,
    Figures,
    SimulationRun,
    attainable_tokens,
    capacity_speed,
    figures,
    held,
    worker_hours,
)
from kvfleet.placement.simulate.fleet_shape import Autoscale, FleetShape
from kvfleet.placement.simulate.scaling import Moment, Scaling
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import Trace

# `direct` needs a worker that the request names, and no trace names one.
POLICIES = tuple(name for name in POLICY_NAMES if name != DIRECT)


@dataclass(frozen=True, slots=True)
class Result:
    figures: Figures
    run: SimulationRun


@dataclass(frozen=True, slots=True)
class Autoscaled:
    """A run on a fleet that grows and shrinks, beside one that always has its most workers."""

    victim: str
    figures: Figures
    scaling: Scaling
    worker_hours: float
    fixed_worker_hours: float  # of the most workers, all the time
    ttft_held: float  # share of requests with their first token within the target
    ended_s: float

    def by_minute(self) -> list[Moment]:
        """At the beginning of each minute."""
        timeline = self.scaling.timeline
        minutes = range(int(self.ended_s // 60) + 1)
        return [timeline[max(bisect_right(timeline, 60 * minute, key=attrgetter("at_s")) - 1, 0)] for minute in minutes]


@dataclass(slots=True)
class Study:
    trace: Trace  # at the speed that is simulated
    shape: FleetShape
    attainable: int  # prompt tokens
    full_speed: float | None  # how many times as fast it would be at capacity; None: all requests come at once
    slo_s: float = SLO_TTFT_S
    results: list[Result] = field(default_factory=list)
    at_loads: list[tuple[float, Figures]] = field(default_factory=list)  # one policy at one share of capacity
    autoscaled: list[Autoscaled] = field(default_factory=list)

    @property
    def target_ttft_s(self) -> float:
        return self.shape.autoscale.rules.target_ttft_s if self.shape.autoscale is not None else self.slo_s

    @property
    def load(self) -> float | None:
        return None if self.full_speed is None else 1 / self.full_speed

    @property
    def attainable_rate(self) -> float:
        return self.attainable / max(self.trace.prompt_tokens, 1)

    def run(self, policies: Sequence[str]) -> Iterator[Result]:
        for policy in policies:
            self.results.append(self._run(self.trace, policy))
            yield self.results[-1]

    def run_loads(self, policies: Sequence[str], loads: Sequence[float]) -> Iterator[tuple[float, Figures]]:
        """At each share of capacity; `full_speed` must not be None."""
        assert self.full_speed is not None
        for load in loads:
            trace = self.trace.at_speed(self.full_speed * load)
            for policy in policies:
                self.at_loads.append((load, self._run(trace, policy).figures))
                yield self.at_loads[-1]

    def _run(self, trace: Trace, policy: str) -> Result:
        run = Simulation(trace, replace(self.shape, autoscale=None), policy).run()
        return Result(figures(policy, trace, run, self.attainable, self.slo_s), run)

    def run_autoscaled(self, scales: Sequence[Autoscale], policy: str) -> Iterator[Autoscaled]:
        for scale in scales:
            shape = replace(self.shape, autoscale=scale)
            self.autoscaled.append(run_autoscaled(self.trace, shape, policy, self.attainable, self.slo_s))
            yield self.autoscaled[-1]


def run_autoscaled(trace: Trace, shape: FleetShape, policy: str, attainable: int, slo_s: float) -> Autoscaled:
    """`shape.autoscale` says how; `shape.workers` is the fixed fleet that it is compared with."""
    run = Simulation(trace, shape, policy).run()
    assert run.scaling is not None
    scale = run.scaling.scale
    return Autoscaled(
        scale.victim.value,
        figures(policy, trace, run, attainable, slo_s),
        run.scaling,
        worker_hours(run, scale.start_s),
        shape.workers * run.ended_s / 3600,
        held(run, scale.rules.target_ttft_s),
        run.ended_s,
    )


def make_study(
    trace: Trace, shape: FleetShape, *, speed: float | None = None, load: float | None = None, slo_s: float = SLO_TTFT_S
) -> Study:
    """At `speed` times the trace's own, or at a share `load` of capacity; else as recorded. Raises ValueError for a
    load if all requests come at once."""
    attainable = attainable_tokens(trace, shape.workers * shape.cache_blocks)
    full = capacity_speed(trace, shape.workers, shape.speed, attainable) if trace.duration_s > 0 else None
    if load is not None:
        if full is None:
            raise ValueError("all requests of the trace come at once: there is no rate to change")
        speed = full * load
    if speed is not None:
        trace = trace.at_speed(speed)
        full = None if full is None else full / speed
    return Study(trace, shape, attainable, full, slo_s)
