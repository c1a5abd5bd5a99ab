"""Limits, times and defaults of a placement replica. Pure; `settings` fills them in."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.index.kv_indexer import MAX_BLOCKS, MAX_WORKERS
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.workers.bookings import PhantomLimits


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """`PlacementSettings` says what its flags mean. `rules`, `models` and `by_ordinal` are the autoscaler's."""

    policy: str = DEFAULT_POLICY
    index_blocks: int = MAX_BLOCKS
    max_workers: int = MAX_WORKERS
    region: str = ""  # "": there are no others
    spill_wait_s: float = 2.0
    max_wait_s: float | None = 60.0  # of a bare producer's request without a deadline; None: for ever
    max_producer_priority: int = 0
    max_forwarded: int = 65_536  # bare producers' requests at a time
    phantoms: PhantomLimits = field(default_factory=PhantomLimits)  # what counts of a tenant before workers accept it
    rules: Rules = field(default_factory=Rules)
    models: tuple[str, ...] = ()
    by_ordinal: bool = False
    shares: bool = True  # tells other replicas of bookings
    keeps_hashes: bool = False  # ended decisions become RecordDecisions
