"""A simulated fleet: how many workers of which speeds, how long messages take, and what came of a run. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvfleet.placement.index.prefix_index import Hashes
from kvfleet.placement.simulate.scaling import Autoscale, Scaled
from kvfleet.placement.simulate.sim_worker import Speed
from kvfleet.placement.simulate.trace import Arrival, Trace
from kvfleet.placement.workers.prompts import AddressSpace
from kvproto.messages import PlaceRequest


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds from one process to another."""

    place_s: float = 0.001  # asking placement, and publishing to the worker
    event_s: float = 0.05
    milestone_s: float = 0.02
    heartbeat_s: float = 0.001
    booking_s: float | None = 0.002  # None: replicas do not share bookings


@dataclass(frozen=True, slots=True)
class FleetShape:
    """What is simulated. With `autoscale` there are as many workers as placement desires. `churn_s`: every so often one
    worker leaves and another one joins; 0: never. `drain_s`: for so long one that leaves takes nothing new and goes on
    with what it has; what is left then goes on elsewhere."""

    workers: int = 8
    cache_blocks: int = 2048
    replicas: int = 2
    speed: Speed = field(default_factory=Speed)
    delays: Delays = field(default_factory=Delays)
    churn_s: float = 0.0
    drain_s: float = 0.0
    seed: int = 0
    autoscale: Autoscale | None = None


@dataclass(slots=True)
class Outcome:
    """One request. `worker`: the first one it was placed at."""

    arrival: Arrival
    worker: str = ""
    cached_tokens: int = 0
    expected_tokens: int = 0
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


class TracePrompts:
    """A trace has hashes instead of tokens; requests are told apart by their number."""

    def __init__(self, trace: Trace) -> None:
        self._arrivals = trace.arrivals

    def tokens(self, ask: PlaceRequest) -> int:
        return self._arrivals[int(ask.request)].prompt_tokens

    def hashes(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> Hashes:
        return self._arrivals[int(ask.request)].hashes

    def root(self, space: AddressSpace, tenant: str, ask: PlaceRequest) -> bytes:
        return b""  # a trace's hashes are made up


def hashes_by_id(trace: Trace) -> Hashes:
    """`[ids, 2]`: the hash of each block number."""
    found = np.zeros((trace.distinct_blocks, 2), dtype=np.uint64)
    for arrival in trace.arrivals:
        found[list(arrival.ids)] = arrival.hashes
    return found
