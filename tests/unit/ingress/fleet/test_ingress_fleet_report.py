"""Sums of what workers say of their tiers."""

from __future__ import annotations

from ingress_build import sent

from kvfleet.ingress.fleet.report import IngressCounts, stats_report, workers_report
from kvproto import codec
from kvproto.fleet_view import FleetView
from kvproto.messages import Heartbeat, Load, State, TierLoad, WorkerRecord

HOST = TierLoad(3, 300, 1000, 48, 2, 600, 0.25, 7, 1, {"late": 2})
COUNTS = IngressCounts("i0", *[0] * 9)
VAULT = TierLoad(hit_tokens_total=16, failures_total={"timeout": 1})


def fleet(*tiers: dict[str, TierLoad] | None) -> FleetView:
    """A worker for each; None: one that has sent no heartbeat."""
    view = FleetView()
    for n, its in enumerate(tiers):
        record = WorkerRecord(f"w{n}", "e", "l", State.READY, "m", "a", "h", 1, codec.supported_versions())
        view.on_worker_record(record, n + 1, 0.0)
        if its is not None:
            view.on_heartbeat(Heartbeat(f"w{n}", "e", State.READY, Load(slots=4, tiers=its)), 0.0)
    return view


def test_tiers_are_summed_one_by_one() -> None:
    report = sent(stats_report(fleet({"host": HOST, "vault": VAULT}, {"host": HOST}, {}, None), COUNTS))
    tiers = report["load"]["tiers"]
    assert list(tiers) == ["host", "vault"]
    assert tiers["host"] == {
        "blocks": 6, "bytes_used": 600, "bytes_total": 2000, "hit_tokens_total": 96, "restores_total": 4,
        "restored_bytes_total": 1200, "restore_seconds_total": 0.5, "offloaded_blocks_total": 14,
        "evictions_total": 2, "failures_total": {"late": 4},
    }  # fmt: skip
    assert (tiers["vault"]["hit_tokens_total"], tiers["vault"]["failures_total"]) == (16, {"timeout": 1})
    assert report["load"]["slots"] == 12


def test_without_tiers_and_without_workers() -> None:
    assert stats_report(fleet({}, None), COUNTS).load["tiers"] == {}
    assert stats_report(fleet(), COUNTS).load["tiers"] == {}


def test_each_worker_shows_its_own() -> None:
    report = sent(workers_report(fleet({"host": HOST}, None), str))
    assert report["w0"]["load"]["tiers"]["host"]["bytes_total"] == 1000
    assert report["w0"]["load"]["tiers"]["host"]["failures_total"] == {"late": 2}
    assert report["w1"]["load"]["tiers"] == {}
