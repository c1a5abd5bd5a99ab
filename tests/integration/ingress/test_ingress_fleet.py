"""What an ingress says of the fleet, and what it does without one."""

from __future__ import annotations

import json

from ingress_rig import Serve, Served, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.sessions.session_blocks import SessionBlocks
from kvproto.messages import AdminCommand, TierLoad
from kvproto.subjects import Subjects


async def test_workers_and_sums(served: Served, worker: ScriptedWorker) -> None:
    await until(lambda: served.client.members.view.workers["w1"].heartbeat is not None)
    workers = (await served.http.get("/workers")).json()
    one = workers["w1"]
    assert list(workers) == ["w1"]
    assert one["address"] == f"{worker.subjects.namespace}.worker.w1.generate.public"
    assert (one["state"], one["model"]) == ("ready", "demo")
    assert (one["pid"], one["host"], one["load"]["slots"]) == (4242, "testhost", 8)
    assert (one["engine"], one["engine_pid"]) == ("vllm", 4243)
    assert one["role"] == "prefill"
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
    health = (await served.http.get("/health")).json()
    assert (health["models"], health["models_unavailable"]) == (["demo"], [])
    await worker._lease.release()
    await until(lambda: not served.client.members.view.is_alive("w1"))
    assert (await served.http.get("/livez")).status_code == 200
    ready = await served.http.get("/readyz")
    assert ready.status_code == 503
    assert "no ready worker" in ready.json()["status"]
    health = (await served.http.get("/health")).json()
    assert (health["models"], health["models_unavailable"]) == (["demo"], ["demo"])
    assert (await served.http.get("/v1/models")).json()["data"] == []
    answer = await served.http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert (await served.http.get("/workers")).json()["w1"]["state"] == "dead"
    assert (await served.http.get("/kv/route/any")).status_code == 503


async def test_a_long_history_goes_to_those_that_hold_its_beginning(
    serving: Serve, worker: ScriptedWorker, nats_url: str, fleet_buckets: Subjects
) -> None:
    served, other = await serving(), await ScriptedWorker.start(nats_url, fleet_buckets, "w2")
    try:
        await until(lambda: sum(1 for _ in served.client.members.view.ready()) == 2)
        ids = tuple(i % 900 for i in range(20_000))
        worker.sequences, other.sequences = [ids], [ids[:100]]
        found = await SessionBlocks(served.client, served.ingress.regions.workers).find("public", "demo", ids)
        assert {name: one.cached_tokens for name, one in found.items()} == {"w1": 20_000, "w2": 100}
        asked = {
            one.id: [len(request.ids) for request in one.admin if request.command is AdminCommand.INSPECT]
            for one in (worker, other)
        }
        assert asked == {"w1": [1024, 20_000], "w2": [1024]}
    finally:
        await other.stop()


async def test_reading_a_session_is_one_of_the_requests(serving: Serve, worker: ScriptedWorker) -> None:
    keys = {"keys": [{"sha256": hash_key("a"), "requests_per_minute": 30, "admin": True}]}  # five at once
    served, key = await serving(keys=json.dumps(keys)), {"x-api-key": "a"}
    turn = await served.http.post("/generate", json={"prompt": "x", "seq_id": "s"}, headers=key)
    assert turn.status_code == 200
    for path in ("/sessions/s", "/sessions/s/kv", "/kv/route/s", "/sessions/s"):
        answer = await served.http.get(path, headers=key)
        assert answer.status_code == 200, path
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    asked = len(worker.admin)
    for method, path in (("GET", "/sessions/s"), ("DELETE", "/sessions/s"), ("GET", "/sessions/s/kv")):
        refused = await served.http.request(method, path, headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "limit_exceeded")
    assert len(worker.admin) == asked, "nobody was asked"
    assert (await served.http.get("/v1/models", headers=key)).status_code == 200
    served.ingress.admission.check_integrity()
