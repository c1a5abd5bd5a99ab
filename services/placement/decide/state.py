"""What a replica knows: its fleet with what there is to do, who holds what, and what was decided. Pure data.

The core owns each part. Those who decide and those who account for it are given all of them, together.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.decide.region_summaries import RegionSummaries
from kvfleet.placement.decide.repeats import Repeats
from kvfleet.placement.index.kv_indexer import KvIndexer
from kvfleet.placement.record.ledger import Ledger
from kvfleet.placement.workers.bookings import Bookings
from kvfleet.placement.workers.feedback import Feedback
from kvfleet.placement.workers.fleet import Fleet
from kvfleet.placement.workers.inflight_blocks import InflightBlocks


@dataclass(frozen=True, slots=True)
class PlacementState:
    """Of the replica `placement`."""

    placement: str
    fleet: Fleet
    bookings: Bookings
    indexer: KvIndexer
    inflight: InflightBlocks
    feedback: Feedback
    ledger: Ledger
    repeats: Repeats
    region_summaries: RegionSummaries
