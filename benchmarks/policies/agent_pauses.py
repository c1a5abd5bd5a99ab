"""Agents that wait a minute or two for their tools, beside people who chat: what pauses are worth to both.

6 workers with 600 blocks of 512 tokens on the device (38 GB at 128 KiB a token) and 1000 below it (64 GB, restored at
40,000 tokens/s); 200 agents, 60 people (`_agents`). Each trace is run without and with pauses: how long tools take is
measured in the run itself, as an ingress does. `value` is the median TTFT of agents' returning turns with pauses over
without; hits of all other requests must not be fewer. Simulated: the real placement and the workers' rules of pauses.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from benchmarks.harness.report import finish, parse_quick, progress
from benchmarks.policies._agents import is_agent, make_agents
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.simulate.figures import SimulationRun
from kvfleet.placement.simulate.fleet_shape import Below, FleetShape
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import Trace
from kvfleet.placement.workers.warm_up import warm_up

WORKERS, DEVICE_BLOCKS, HOST_BLOCKS = 6, 600, 1000
SECONDS, SEEDS = 600.0, (0, 1, 2)
FLOOR = 0.7


def main() -> None:
    quick = parse_quick(__doc__)
    warm_up()
    ratios, elsewhere, runs = [], [], {}
    for seed in SEEDS[:1] if quick else SEEDS:
        trace = make_agents(SECONDS, seed)
        without, with_ = (_figures(_run(trace, pauses=pauses)) for pauses in (False, True))
        ratios.append(with_["return_ttft_p50_s"] / without["return_ttft_p50_s"])
        elsewhere.append(with_["hit_tokens_elsewhere"] / without["hit_tokens_elsewhere"])
        runs[f"seed {seed}"] = {"without": without, "with": with_}
        progress(f"seed {seed}: TTFT p50 of returns {ratios[-1]:.3f} times, hits elsewhere {elsewhere[-1]:.3f} times")
    value, least = median(ratios), min(elsewhere)
    finish(
        "agent_pauses",
        round(value, 3),
        "TTFT p50 of returning turns, with pauses over without",
        floor=FLOOR,
        ok=value <= FLOOR and least >= 1.0,
        hits_elsewhere=round(least, 4),
        runs=runs,
    )


def _run(trace: Trace, *, pauses: bool) -> SimulationRun:
    shape = FleetShape(workers=WORKERS, cache_blocks=DEVICE_BLOCKS, below=Below(HOST_BLOCKS, pauses=pauses))
    return Simulation(trace, shape, DEFAULT_POLICY).run()


def _figures(run: SimulationRun) -> dict[str, float]:
    returns, others, begun, hits, hits_elsewhere = [], [], set(), 0, 0
    for one in run.outcomes:
        session, ttft_s = one.arrival.session, one.ttft_s
        assert ttft_s is not None
        if is_agent(session) and session in begun:
            returns.append(ttft_s)
            hits += one.cached_tokens
        else:
            others.append(ttft_s)
            hits_elsewhere += one.cached_tokens
        begun.add(session)
    return {
        "returns": len(returns),
        "return_ttft_p50_s": round(float(np.median(returns)), 4),
        "return_ttft_p90_s": round(float(np.quantile(returns, 0.9)), 4),
        "other_ttft_p50_s": round(float(np.median(others)), 4),
        "hit_tokens": hits,
        "hit_tokens_elsewhere": hits_elsewhere,
        "brought_blocks": sum(one.brought_blocks for one in run.tiered),
        "given_back_blocks": sum(one.given_back_blocks for one in run.tiered),
        "saved_s": round(sum(one.saved_s for one in run.tiered), 1),
    }


if __name__ == "__main__":
    main()
