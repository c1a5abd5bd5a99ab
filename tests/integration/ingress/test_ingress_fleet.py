"""What an ingress says of the fleet, and what it does without one."""

from __future__ import annotations

from ingress_rig import Served, until
from scripted_worker import ScriptedWorker

from kvproto.messages import TierLoad


async def test_workers_and_sums(served: Served, worker: ScriptedWorker) -> None:
    await until(lambda: served.client.members.view.workers["w1"].heartbeat is not None)
    workers = (await served.http.get("/workers")).json()
    one = workers["w1"]
    assert list(workers) == ["w1"]
    assert (one["address"], one["state"], one["model"]) == ("tcp://127.0.0.1:1", "ready", "demo")
    assert (one["pid"], one["host"], one["load"]["slots"]) == (4242, "testhost", 8)
    assert one["epoch"]
    stats = (await served.http.get("/stats")).json()
    assert (stats["workers"], stats["ready"], stats["models"]) == (1, 1, ["demo"])
    assert stats["load"]["slots"] == 8
    assert stats["hit_rate"] == 0.25


async def test_tiers_of_workers_and_their_sums(served: Served, worker: ScriptedWorker) -> None:
    worker.tiers = {"host": TierLoad(blocks=3, bytes_total=1000, failures_total={"late": 2})}
    view = served.client.members.view
    await until(lambda: (beat := view.workers["w1"].heartbeat) is not None and beat.load.tiers)
    one = (await served.http.get("/workers")).json()["w1"]
    stats = (await served.http.get("/stats")).json()
    assert one["load"]["tiers"] == stats["load"]["tiers"]
    host = stats["load"]["tiers"]["host"]
    assert (host["blocks"], host["bytes_total"], host["failures_total"]) == (3, 1000, {"late": 2})


async def test_metrics_are_there_from_the_start_and_count(served: Served) -> None:
    before = (await served.http.get("/metrics")).text
    for name in (
        'kvfleet_ingress_requests_total{code="200",route="generate"} 0.0',
        'kvfleet_ingress_ttft_seconds_count{model="demo",route="chat_completions"} 0.0',
        'kvfleet_ingress_inter_token_seconds_count{model="demo",route="generate"} 0.0',
        "kvfleet_ingress_generated_tokens_total 0.0",
        "kvfleet_ingress_active_streams 0.0",
        "kvfleet_ingress_splice_hits_total 0.0",
        "kvfleet_ingress_sessions 0.0",
        'kvfleet_ingress_outcomes_total{outcome="overloaded",route="generate"} 0.0',
        'kvfleet_ingress_judged_requests_total{model="demo",route="generate"} 0.0',
        'kvfleet_ingress_slo_missed_requests_total{model="demo",route="generate",target="itl"} 0.0',
        "kvfleet_ingress_slo_ttft_seconds 2.0",
    ):
        assert name in before
    await served.http.post("/generate", json={"prompt": "x"})
    after = (await served.http.get("/metrics")).text
    assert "kvfleet_ingress_generated_tokens_total 4.0" in after
    assert "kvfleet_ingress_placement_fallbacks_total 1.0" in after  # no placement runs here
    assert 'kvfleet_ingress_requests_total{code="200",route="generate"} 1.0' in after
    for name in (
        'kvfleet_ingress_ttft_seconds_count{model="demo",route="generate"} 1.0',
        'kvfleet_ingress_inter_token_seconds_count{model="demo",route="generate"} 3.0',
        'kvfleet_ingress_judged_requests_total{model="demo",route="generate"} 1.0',
        'kvfleet_ingress_goodput_requests_total{model="demo",route="generate"} 1.0',
        'kvfleet_ingress_goodput_tokens_total{model="demo",route="generate"} 4.0',
    ):
        assert name in after
    assert 'kvfleet_ingress_outcomes_total{outcome="stop",route="generate"} 1.0' in after
    await served.http.post("/generate", json={"prompt": 3})
    assert 'outcomes_total{outcome="invalid_request",route="generate"} 1.0' in (await served.http.get("/metrics")).text


async def test_without_workers_it_says_so(served: Served, worker: ScriptedWorker) -> None:
    assert (await served.http.get("/health")).json()["models"] == ["demo"]
    await worker._lease.release()
    await until(lambda: not served.client.members.view.is_alive("w1"))
    assert (await served.http.get("/livez")).status_code == 200
    ready = await served.http.get("/readyz")
    assert ready.status_code == 503
    assert "no ready worker" in ready.json()["status"]
    answer = await served.http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert (await served.http.get("/workers")).json()["w1"]["state"] == "dead"
    assert (await served.http.get("/kv/route/any")).status_code == 503
