"""How busy each worker is and what its cache is worth, under the names that readers of NVIDIA Dynamo know. Pure.

From heartbeats, and from bookings that no heartbeat counts yet. Shares are within [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.workers.fleet import Worker


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """One worker now."""

    request_active_slots: int = 0
    request_total_slots: int = 0
    kv_active_blocks: int = 0  # held by running sequences
    kv_total_blocks: int = 0
    num_requests_waiting: int = 0
    gpu_cache_usage_perc: float = 0.0  # active of total blocks
    gpu_prefix_cache_hit_rate: float = 0.0  # of the last minute's prompt tokens; 0 if there were none


def metrics_of(worker: Worker, booked: int) -> WorkerMetrics:
    """All 0 for one that was not heard of. `booked`: requests that its heartbeats cannot count yet."""
    if not worker.demand.hits:
        return WorkerMetrics()
    load, (_, prompt, hit) = worker.load, worker.demand.hits[0]
    seated = min(booked, max(load.slots - load.running - load.waiting, 0))  # the others will have to wait
    return WorkerMetrics(
        request_active_slots=load.running + seated,
        request_total_slots=load.slots,
        kv_active_blocks=load.blocks_used,
        kv_total_blocks=load.blocks_total,
        num_requests_waiting=load.waiting + booked - seated,
        gpu_cache_usage_perc=_share(load.blocks_used, load.blocks_total),
        gpu_prefix_cache_hit_rate=_share(load.hit_tokens_total - hit, load.prompt_tokens_total - prompt),
    )


def _share(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
