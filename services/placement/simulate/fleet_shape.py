"""A simulated fleet: how many workers of which speeds, how they come and go, how long messages take. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvfleet.placement.advice.autoscale import Rules


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a simulated worker; the defaults are about those of an 8B model on one datacentre GPU."""

    prefill_tokens_per_s: float = 8000.0
    chunk_tokens: int = 2048
    decode_base_s: float = 0.015
    decode_each_s: float = 0.0003
    slots: int = 256

    def decode_s(self, sequences: int) -> float:
        return self.decode_base_s + self.decode_each_s * sequences


class Victim(StrEnum):
    CHEAPEST = "cheapest"  # to lose, as placement says
    ORDINAL = "ordinal"  # the highest number, as a StatefulSet does


@dataclass(frozen=True, slots=True)
class Autoscale:
    rules: Rules
    start_s: float = 60.0
    victim: Victim = Victim.CHEAPEST


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds from one process to another."""

    place_s: float = 0.001  # to placement, and to the worker
    event_s: float = 0.05
    milestone_s: float = 0.02
    heartbeat_s: float = 0.001
    booking_s: float | None = 0.002  # None: replicas do not share bookings


@dataclass(frozen=True, slots=True)
class FleetShape:
    """With `autoscale` there are as many workers as placement desires."""

    workers: int = 8
    cache_blocks: int = 2048
    replicas: int = 2
    speed: Speed = field(default_factory=Speed)
    delays: Delays = field(default_factory=Delays)
    churn_s: float = 0.0  # between changes: one worker leaves and another one joins; 0: none
    drain_s: float = 0.0  # a leaving worker goes on with its requests for so long, then they go on elsewhere
    seed: int = 0
    autoscale: Autoscale | None = None
