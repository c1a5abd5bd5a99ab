"""What a worker's tiers show to Prometheus: every series from the start, and what the heartbeat says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvfleet.worker.eviction.base import EvictionBalance
from kvfleet.worker.model.device_watch import CpuWatch
from kvfleet.worker.own_metrics import own_readings
from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.tiers.transfers import RemoteCounts
from kvfleet.worker.worker_metrics import readings
from kvproto.messages import Heartbeat, Load, Rates, State, Tier, TierLoad
from kvservice.distribution import Distribution
from kvservice.metrics import LiveCollector

HOST = TierLoad(3, 300, 1000, 48, 2, 600, 0.25, 7, 1, {"late": 2, "odd": 1})


class Shown:
    """A worker as far as metrics look at it."""

    def __init__(self) -> None:
        self.tiers: dict[str, TierLoad] = {}
        self.load = Load()
        nothing = SimpleNamespace(dropped_total=0)
        ahead = SimpleNamespace(blocks_total=0)
        counts = SimpleNamespace(requests_total=0, refused_total=0, malformed_total=0, ahead=ahead)
        worker: Any = SimpleNamespace(
            heartbeat=self.heartbeat,
            outbox=nothing,
            milestones=nothing,
            requests=counts,
            record=SimpleNamespace(id="w", model="demo", block_bytes=64),
            frames=SimpleNamespace(recomputed_total=0),
            hand_over=SimpleNamespace(moved_total=0),
        )
        self.registry = CollectorRegistry()
        self.cancel_to_free = Distribution()
        self.counters = EngineCounters()
        connection: Any = SimpleNamespace(is_connected=True, reconnects_total=0, errors_total=0)
        self.counts = RemoteCounts()
        remote: Any = SimpleNamespace(counts=self.counts)
        engine: Any = SimpleNamespace(
            cancel_to_free=self.cancel_to_free,
            copied_bytes=lambda: (0, 0),
            protected_blocks_total=0,
            step_age_s=0.0,
            balance=EvictionBalance(3.0, 1.0, False),
            counters=self.counters,
        )
        worker.parts = SimpleNamespace(engine=engine)
        shown = readings(worker, connection) + own_readings(worker, engine, CpuWatch(), remote)
        self.registry.register(LiveCollector(shown))

    def heartbeat(self) -> Heartbeat:
        return Heartbeat("w", "e", State.READY, replace(self.load, tiers=self.tiers), Rates())

    def lines(self) -> list[str]:
        return generate_latest(self.registry).decode().splitlines()


@pytest.mark.parametrize("tier", ["device", "host", "vault", "peer"])
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
    assert "kvfleet_worker_aborted_steps_total 0.0" in lines
    assert "kvfleet_worker_protected_blocks_total 0.0" in lines
    for seconds in (0.0005, 0.001, 0.02, 7.0):
        shown.cancel_to_free.observe(seconds)
    lines = shown.lines()
    for bound, count in (("0.001", 2.0), ("0.01", 2.0), ("0.025", 3.0), ("2.5", 3.0), ("+Inf", 4.0)):
        assert f'{name}_bucket{{le="{bound}"}} {count}' in lines
    assert f"{name}_count 4.0" in lines
    assert f"{name}_sum 7.0215" in lines
    assert "kvfleet_worker_cancel_to_free_max_seconds 7.0" in lines


def test_the_device_is_a_tier() -> None:
    shown = Shown()
    shown.load = Load(blocks_used=2, blocks_cached=3, blocks_total=10, blocks_addressed=4, evictions_total=6)
    shown.counters.device_hit_tokens_total = 32
    lines = shown.lines()
    for name, value in (
        ("bytes", 320.0), ("capacity_bytes", 640.0), ("blocks", 4.0), ("hit_tokens_total", 32.0),
        ("evictions_total", 6.0), ("restores_total", 0.0),
    ):  # fmt: skip
        assert f'kvfleet_worker_tier_{name}{{tier="device"}} {value}' in lines


def test_quantised_blocks_and_those_kept_raw() -> None:
    shown = Shown()
    name = "kvfleet_worker_quantised_snr_decibels"
    assert f"{name}_count 0.0" in shown.lines()
    shown.counts.quantised(44.5, 4000, 1024)
    shown.counts.quantised(36.0, 4000, 1024)
    shown.counts.stayed_raw()
    lines = shown.lines()
    for bound, count in (("35.0", 0.0), ("38.0", 1.0), ("44.0", 1.0), ("45.0", 2.0), ("+Inf", 2.0)):
        assert f'{name}_bucket{{le="{bound}"}} {count}' in lines
    assert f"{name}_sum 80.5" in lines
    assert "kvfleet_worker_quantised_blocks_total 2.0" in lines
    assert "kvfleet_worker_quantised_raw_bytes_total 8000.0" in lines
    assert "kvfleet_worker_quantised_bytes_total 2048.0" in lines
    assert "kvfleet_worker_kept_raw_blocks_total 1.0" in lines


def test_bytes_both_ways_of_connections_that_stand_and_that_ended() -> None:
    shown = Shown()
    name = "kvfleet_worker_transfer_bytes_total"
    for tier in ("host", "vault", "peer"):
        for direction in ("in", "out"):
            assert f'{name}{{direction="{direction}",tier="{tier}"}} 0.0' in shown.lines()
    first, second = (SimpleNamespace(closed=False, link=SimpleNamespace(bytes_in=0, bytes_out=0)) for _ in range(2))
    shown.counts.connected(Tier.VAULT, first)
    first.link.bytes_in, first.link.bytes_out = 100, 7
    assert f'{name}{{direction="in",tier="vault"}} 100.0' in shown.lines()
    first.closed = True
    shown.counts.connected(Tier.VAULT, second)
    second.link.bytes_in = 11
    for _ in range(2):
        lines = shown.lines()
        assert f'{name}{{direction="in",tier="vault"}} 111.0' in lines
        assert f'{name}{{direction="out",tier="vault"}} 7.0' in lines
        assert f'{name}{{direction="in",tier="peer"}} 0.0' in lines


def test_the_cpu_shows_its_memory_and_no_utilisation() -> None:
    lines = Shown().lines()
    used = next(float(line.split()[1]) for line in lines if line.startswith("kvfleet_worker_device_memory_used_bytes{"))
    total = next(float(line.split()[1]) for line in lines if line.startswith("kvfleet_worker_device_memory_bytes{"))
    assert 0 < used < total
    assert not any(line.startswith("kvfleet_worker_device_utilisation_ratio{") for line in lines)
    assert 'kvfleet_worker_info{device="cpu",model="demo",worker="w"} 1.0' in lines


def test_what_an_eviction_policy_saved() -> None:
    lines = Shown().lines()
    assert "kvfleet_worker_eviction_saved_seconds_total 3.0" in lines
    assert "kvfleet_worker_eviction_lost_seconds_total 1.0" in lines
    assert "kvfleet_worker_eviction_follows_lru 0.0" in lines
