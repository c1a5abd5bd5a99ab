"""What a worker's tiers show to Prometheus: every series from the start, and what the heartbeat says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvproto.messages import Heartbeat, Load, Rates, State, TierLoad
from kvservice.metrics import LiveCollector
from services.worker.durations import Durations
from services.worker.worker_metrics import readings

HOST = TierLoad(3, 300, 1000, 48, 2, 600, 0.25, 7, 1, {"late": 2, "odd": 1})


class Shown:
    """A worker as far as metrics look at it."""

    def __init__(self) -> None:
        self.tiers: dict[str, TierLoad] = {}
        nothing = SimpleNamespace(dropped_total=0)
        counts = SimpleNamespace(requests_total=0, refused_total=0, malformed_total=0)
        worker: Any = SimpleNamespace(
            heartbeat=self.heartbeat,
            outbox=nothing,
            milestones=nothing,
            requests=counts,
            frames=SimpleNamespace(recomputed_total=0),
            hand_over=SimpleNamespace(moved_total=0),
        )
        connection: Any = SimpleNamespace(reconnects_total=0)
        self.registry = CollectorRegistry()
        self.cancel_to_free = Durations()
        engine: Any = SimpleNamespace(
            cancel_to_free=self.cancel_to_free, steps_aborted_total=0, protected_blocks_total=0, step_age_s=0.0
        )
        self.registry.register(LiveCollector(readings(worker, connection, engine)))

    def heartbeat(self) -> Heartbeat:
        return Heartbeat("w", "e", State.READY, Load(tiers=self.tiers), Rates())

    def lines(self) -> list[str]:
        return generate_latest(self.registry).decode().splitlines()


@pytest.mark.parametrize("tier", ["host", "vault", "peer"])
def test_every_series_is_there_from_the_start(tier: str) -> None:
    lines = Shown().lines()
    for name in (
        "bytes", "capacity_bytes", "blocks", "hit_tokens_total", "restores_total", "restored_bytes_total",
        "restore_seconds_total", "offloaded_blocks_total", "evictions_total",
    ):  # fmt: skip
        assert f'kvfleet_worker_tier_{name}{{tier="{tier}"}} 0.0' in lines
    for reason in ("late", "unwanted", "timeout", "gone", "checksum", "format", "missing"):
        assert f'kvfleet_worker_tier_failures_total{{reason="{reason}",tier="{tier}"}} 0.0' in lines


def test_they_are_what_the_heartbeat_says() -> None:
    shown = Shown()
    shown.lines()
    shown.tiers = {"host": HOST}
    lines = shown.lines()
    for name, value in (
        ("bytes", 300), ("capacity_bytes", 1000), ("blocks", 3), ("hit_tokens_total", 48), ("restores_total", 2),
        ("restored_bytes_total", 600), ("restore_seconds_total", 0.25), ("offloaded_blocks_total", 7),
        ("evictions_total", 1),
    ):  # fmt: skip
        assert f'kvfleet_worker_tier_{name}{{tier="host"}} {float(value)}' in lines
        assert f'kvfleet_worker_tier_{name}{{tier="vault"}} 0.0' in lines
    for reason, count in (("late", 2.0), ("odd", 1.0), ("timeout", 0.0)):
        assert f'kvfleet_worker_tier_failures_total{{reason="{reason}",tier="host"}} {count}' in lines
    assert "# TYPE kvfleet_worker_tier_bytes gauge" in lines
    assert "# TYPE kvfleet_worker_tier_failures_total counter" in lines


def test_cancels_are_a_histogram_from_the_start() -> None:
    shown = Shown()
    name = "kvfleet_worker_cancel_to_free_seconds"
    lines = shown.lines()
    assert f"# TYPE {name} histogram" in lines
    assert f"{name}_count 0.0" in lines
    assert f'{name}_bucket{{le="0.001"}} 0.0' in lines
    assert "kvfleet_worker_cancel_to_free_max_seconds 0.0" in lines
    assert "kvfleet_worker_steps_aborted_total 0.0" in lines
    assert "kvfleet_worker_protected_blocks_total 0.0" in lines
    for seconds in (0.0005, 0.001, 0.02, 7.0):
        shown.cancel_to_free.observe(seconds)
    lines = shown.lines()
    for bound, count in (("0.001", 2.0), ("0.01", 2.0), ("0.025", 3.0), ("2.5", 3.0), ("+Inf", 4.0)):
        assert f'{name}_bucket{{le="{bound}"}} {count}' in lines
    assert f"{name}_count 4.0" in lines
    assert f"{name}_sum 7.0215" in lines
    assert "kvfleet_worker_cancel_to_free_max_seconds 7.0" in lines
