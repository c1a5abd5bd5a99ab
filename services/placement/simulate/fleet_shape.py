"""A simulated fleet: how many workers of which speeds, how they come and go, how long messages take. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvfleet.placement.advice.autoscale import Rules
from kvproto.messages import State, WorkerRecord, WorkerRole

MODEL = "simulated"


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a simulated worker; the defaults are about those of an 8B model on one datacentre GPU."""

    prefill_tokens_per_s: float = 8000.0
    chunk_tokens: int = 2048
    decode_base_s: float = 0.015
    decode_each_s: float = 0.0003
    slots: int = 256
    token_bytes: int = 131_072  # of K and V

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


HAND_OVER_S = 0.02  # a moved request's way to its next worker, beside what is left to fetch
LAST_TOKENS = 2048  # of a prompt: their blocks go over when it has been prefilled


@dataclass(frozen=True, slots=True)
class Below:
    """A tier below each worker's device."""

    blocks: int
    tokens_per_s: float = 40_000.0  # restored; 128 KiB a token over 5.2 GB/s
    pauses: bool = False  # workers are told when conversations are likely to come back


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
    prefill_workers: int = 0  # of the workers: for prompts alone, and the others for what comes after; 0: all for both
    link_bytes_per_s: float = 0.0  # from one worker's blocks to another's; 0: they give none
    below: Below | None = None

    def fetch_s(self, tokens: float) -> float:
        return tokens * self.speed.token_bytes / self.link_bytes_per_s

    def hand_over_s(self, tokens: int, prefill_s: float) -> float:
        """From the first token at one worker until the request is on its way to the next. Blocks go over beside the
        prefill, all but the last ones."""
        last = self.fetch_s(min(tokens, self.speed.chunk_tokens, LAST_TOKENS))
        return HAND_OVER_S + max(last, self.fetch_s(tokens) - prefill_s)

    def record(self, number: int, epoch: str, block_tokens: int) -> WorkerRecord:
        role = WorkerRole.PREFILL if number < self.prefill_workers else WorkerRole.DECODE
        linked = bool(self.link_bytes_per_s)
        return WorkerRecord(
            id=f"w{number}", epoch=epoch, lease="", state=State.READY, model=MODEL, address="", host="", pid=0,
            versions=(1, 1), block_size=block_tokens, block_bytes=self.speed.token_bytes * block_tokens,
            kv_format=b"simulated" if linked else b"", data_plane=("simulated",) if linked else (),
            role=None if not linked else role if self.prefill_workers else WorkerRole.BOTH,
        )  # fmt: skip
