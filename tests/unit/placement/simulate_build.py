"""Short ways to make what the simulator's tests talk about."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvfleet.placement.simulate.figures import SimulationRun
from kvfleet.placement.simulate.fleet_shape import FleetShape
from kvfleet.placement.simulate.sim_cache import SimulatedJob
from kvfleet.placement.simulate.simulation import Simulation
from kvfleet.placement.simulate.trace import Arrival, Trace, make_trace
from kvservice.trace_rows import Row

BLOCK = 16


def a_row(at_s: float, path: Sequence[object], *, tokens: int | None = None, output: int = 20) -> Row:
    """A block for each item of the path, each standing for all before it too."""
    blocks = ["/".join(map(str, path[: depth + 1])) for depth in range(len(path))]
    return Row(at_s, len(path) * BLOCK if tokens is None else tokens, output, blocks)


def a_trace(*rows: Row) -> Trace:
    return make_trace(rows, BLOCK)


def conversations(count: int = 150, seed: int = 1, every_s: float = 0.05) -> Trace:
    """Turns of some conversations, each longer than the one before; all begin with one block in common."""
    chance = Random(seed)
    paths: dict[int, list[object]] = {}
    rows = []
    for number in range(count):
        session = chance.randrange(max(count // 6, 1))
        path = paths.setdefault(session, ["system"])
        path += [f"{session}.{number}.{block}" for block in range(chance.randint(2, 20))]
        tokens = len(path) * BLOCK - chance.randrange(BLOCK)
        rows.append(a_row(number * every_s, list(path), tokens=tokens, output=chance.randint(1, 60)))
    return a_trace(*rows)


def a_job(arrival: Arrival, now: float = 0.0) -> SimulatedJob:
    return SimulatedJob(arrival, 0, now)


def run(trace: Trace, shape: FleetShape, policy: str = "cost") -> SimulationRun:
    """Ends as every simulation should: with cores that are in order."""
    simulation = Simulation(trace, shape, policy)
    found = simulation.run()
    for core in simulation.cores:
        core.check_integrity()
    return found
