"""How busy each worker is and what its cache is worth, under the names that readers of NVIDIA Dynamo know. Pure.

From heartbeats, and from bookings that no heartbeat counts yet. Shares are within [0, 1].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto.messages import Heartbeat, Load

RECENT_S = 60.0  # the hit rate is that of about so long
SAMPLE_S = 5.0  # between the totals that are kept for it


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


@dataclass(slots=True)
class _Heard:
    load: Load
    totals: deque[tuple[float, int, int]] = field(default_factory=deque)  # when, prompt and hit tokens; of a minute


class MetricsAggregator:
    """Owned by the core. `booked(worker)` counts what heartbeats cannot count yet; `now` never goes back."""

    def __init__(self, booked: Callable[[str], int]) -> None:
        self._booked = booked
        self._heard: dict[str, _Heard] = {}

    def on_heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Of the worker's present life: a new one begins with `leave`."""
        heard = self._heard.setdefault(beat.worker, _Heard(beat.load))
        heard.load = beat.load
        totals = heard.totals
        if not totals or now - totals[-1][0] >= SAMPLE_S:
            totals.append((now, beat.load.prompt_tokens_total, beat.load.hit_tokens_total))
        while len(totals) > 1 and now - totals[1][0] >= RECENT_S:
            totals.popleft()

    def leave(self, worker: str) -> None:
        self._heard.pop(worker, None)

    def of(self, worker: str) -> WorkerMetrics:
        """All 0 for one that was not heard of."""
        heard = self._heard.get(worker)
        if heard is None:
            return WorkerMetrics()
        load, booked, (_, prompt, hit) = heard.load, self._booked(worker), heard.totals[0]
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

    def __len__(self) -> int:
        return len(self._heard)


def _share(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
