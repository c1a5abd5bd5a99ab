"""What a placement replica may be told: limits, times and defaults. Pure; `settings` reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.index.kv_indexer import MAX_BLOCKS, MAX_WORKERS
from kvfleet.placement.policies import DEFAULT_POLICY
from kvfleet.placement.workers.bookings import PhantomLimits


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """One replica. `PlacementSettings` says what its flags mean; times are in seconds.

    `region` "" is a fleet without other regions; `spill_wait_s`: what would wait longer may go to one. Of bare
    producers' requests there are `max_forwarded` at a time; one that states no deadline may have to wait for
    `max_wait_s`, and none has a priority above `max_producer_priority`. `phantoms`: how much of a tenant counts that no
    worker has accepted. `rules`, `models` and `by_ordinal` are the autoscaler's. `shares`: other replicas are told of
    bookings. `keeps_hashes`: ended decisions come back as records.
    """

    policy: str = DEFAULT_POLICY
    index_blocks: int = MAX_BLOCKS
    max_workers: int = MAX_WORKERS
    region: str = ""
    spill_wait_s: float = 2.0
    max_wait_s: float | None = 60.0  # None: for ever
    max_producer_priority: int = 0
    max_forwarded: int = 65_536
    phantoms: PhantomLimits = field(default_factory=PhantomLimits)
    rules: Rules = field(default_factory=Rules)
    models: tuple[str, ...] = ()
    by_ordinal: bool = False
    shares: bool = True
    keeps_hashes: bool = False
