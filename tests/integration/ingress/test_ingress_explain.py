"""Why a request went where it went, over HTTP: real placement replicas, real worker loops, and an ingress."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from ingress_rig import FLEET_KEY, Served, serve, start_placement, until
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.placement.io import question_desk
from kvfleet.placement.loop import PlacementLoop
from kvfleet.placement.placement_metrics import readings
from kvproto import client
from kvproto.messages import Actual, Role
from kvproto.subjects import Subjects
from kvservice.metrics import LiveCollector
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

TIMEOUT_S = 20.0  # of a question; a busy machine answers within it

KEYS = "".join(
    f'[[keys]]\nname = "{name}"\nsha256 = "{hash_key(name)}"\ntenant = "{tenant}"\n{more}\n'
    for name, tenant, more in (
        ("alice", "acme", 'policies = ["ring", "direct", "cost", "best"]'),
        ("bob", "other", ""),
        ("root", "ops", "admin = true"),
    )
)
LONG = "Now is the winter of our discontent made glorious summer by this sun of York. " * 6


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


ALICE, BOB, ROOT = bearer("alice"), bearer("bob"), bearer("root")


@dataclass
class Fleet:
    """Two placement replicas, two workers, an ingress with keys."""

    loops: list[PlacementLoop]
    registries: list[CollectorRegistry]
    served: Served

    async def explained(self, request: str, headers: dict[str, str] = ALICE) -> list[dict[str, Any]]:
        """All attempts, once the last one's end was heard of."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                answer = await self.served.http.get(f"/v1/placements/{request}", headers=headers)
                assert answer.status_code == 200, answer.text
                attempts: list[dict[str, Any]] = answer.json()["attempts"]
                if attempts[-1]["actual"]["ended"]:
                    return attempts
                await asyncio.sleep(0.02)

    async def knows_blocks(self, blocks: int) -> None:
        """Every replica's index holds what the workers stored."""
        await until(lambda: all(len(loop.core.indexer.index) >= blocks for loop in self.loops))

    def metrics(self) -> list[str]:
        return [generate_latest(registry).decode() for registry in self.registries]


@pytest.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("kvproto.client.EXPLAIN_TIMEOUT_S", TIMEOUT_S)
    workers = FakeFleet(nats_url, fleet_buckets)
    placements = [await start_placement(nats_url, fleet_buckets, name) for name in ("p0", "p1")]
    registries = []
    for loop, connection in placements:
        registry = CollectorRegistry()
        registry.register(LiveCollector(readings(loop, connection)))
        registries.append(registry)
    for worker in ("w0", "w1"):
        await workers.start(worker, fleet_key=FLEET_KEY)
    served = await serve(nats_url, fleet_buckets, keys=KEYS)
    view = served.client.members.view
    loops = [loop for loop, _ in placements]
    await until(lambda: sum(role is Role.PLACEMENT for role, _ in view.members) == 2 and len(list(view.ready())) == 2)
    await until(lambda: all(len(list(loop.core.fleet.ready("demo").workers)) == 2 for loop in loops))
    yield Fleet(loops, registries, served)
    await served.stop()
    await workers.stop()
    for loop, connection in placements:
        await loop.stop(grace_s=0)
        await connection.close()
        assert loop.internal_errors_total == 0
        loop.core.check_integrity()


async def events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.http.post("/generate", json={"temperature": 0, "max_tokens": 8, **body}, headers=ALICE)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


async def test_expected_and_actual_agree(fleet: Fleet) -> None:
    first = (await events(fleet.served, {"prompt": LONG}))[0]
    (cold,) = await fleet.explained(first["request_id"])
    assert (cold["tenant"], cold["model"], cold["policy"], cold["attempt"]) == ("acme", "demo", "cost", 0)
    assert (cold["expected_hit_tokens"], cold["actual"]["cached_tokens"]) == ({}, {})
    blocks = cold["prompt_tokens"] // 16
    assert blocks >= 5
    await fleet.knows_blocks(blocks)
    await until(lambda: all(not len(loop.core.inflight) for loop in fleet.loops))  # events alone tell of them now

    begin, *_, done = await events(fleet.served, {"prompt": LONG})
    (warm,) = await fleet.explained(begin["request_id"])
    assert warm["worker_id"] == cold["worker_id"] == begin["worker_id"]
    assert warm["expected_hit_tokens"] == {"device": blocks * 16}
    cached = warm["actual"]["cached_tokens"]["device"]
    assert cached == begin["cached_tokens"]
    assert blocks * 16 <= cached < blocks * 16 + 16, "the last block's part is reused too, which no event tells of"
    assert warm["actual"]["output_tokens"] == done["tokens_generated"] == 8
    assert (warm["actual"]["accepted"], warm["actual"]["error_code"]) == (True, None)
    assert warm["actual"]["ttft_ms"] >= warm["actual"]["queue_ms"] >= 0

    best, other = warm["candidates"]
    assert warm["candidates_total"] == 2
    assert (best["worker_id"], best["chosen"], other["chosen"]) == (begin["worker_id"], True, False)
    assert (best["matched_tokens"], other["matched_tokens"]) == ({"device": blocks * 16}, {})
    assert best["cost_ms"] == pytest.approx(sum(best["terms_ms"].values()), abs=0.01)
    assert {"queue", "prefill"} <= best["terms_ms"].keys()
    assert warm["placement_id"] in ("p0", "p1")

    told = [text for text in fleet.metrics() if "kvfleet_placement_attained_hit_tokens_total 0.0" not in text]
    assert len(told) == 1, "the replica that decided counts it"
    assert f"kvfleet_placement_attained_hit_tokens_total {float(cached)}" in told[0]
    assert f'kvfleet_placement_predicted_hit_tokens_total{{worker="{begin["worker_id"]}"}} {blocks * 16}.0' in told[0]


async def test_all_forms_of_an_id_lead_to_the_decision_whichever_replica_made_it(fleet: Fleet) -> None:
    http = fleet.served.http
    deciders = set()
    for at in range(12):
        chat = await http.post(
            "/v1/chat/completions",
            json={"model": "demo", "messages": [{"role": "user", "content": f"{at}"}], "max_tokens": 2},
            headers=ALICE,
        )
        plain = await http.post(
            "/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": 2}, headers=ALICE
        )
        for answer in (chat, plain):
            seen = {answer.json()["id"], answer.json()["kvfleet"]["request_id"], answer.headers["x-request-id"]}
            assert len(seen) == 2, "with OpenAI's prefix and without"
            for form in seen:
                (attempt,) = await fleet.explained(form)
                assert attempt["worker_id"] == answer.json()["kvfleet"]["worker_id"]
            deciders.add(attempt["placement_id"])
    assert deciders == {"p0", "p1"}


async def test_others_do_not_learn_that_an_id_exists(fleet: Fleet) -> None:
    request = (await events(fleet.served, {"prompt": "x"}))[0]["request_id"]
    get = fleet.served.http.get
    await fleet.explained(request)
    assert (await fleet.explained(request, ROOT))[0]["tenant"] == "acme"
    hidden, unknown = [await get(f"/v1/placements/{one}", headers=BOB) for one in (request, request[:-4] + "aaaa")]
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.json()["error"]["code"] == "not_found"
    assert hidden.json()["error"]["param"] == "id"
    assert hidden.text.replace(request, "") == unknown.text.replace(request[:-4] + "aaaa", "")
    assert (await get(f"/v1/placements/{request}")).status_code == 401
    for bad in ("a.b", "a%20b", "x" * 65, "a/b", "", "%F0"):
        answer = await get(f"/v1/placements/{bad}", headers=ALICE)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "id"), bad
    assert (await fleet.served.http.post(f"/v1/placements/{request}", headers=ALICE)).status_code == 405


async def test_the_newest_are_those_of_the_callers_tenant_whichever_replica_decided(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfleet.ingress.fleet.listings.KEPT_S", 0.0)
    http = fleet.served.http

    async def newest(headers: dict[str, str], query: str = "") -> list[dict[str, Any]]:
        answer = await http.get(f"/v1/placements{query}", headers=headers)
        assert answer.status_code == 200, answer.text
        listed: list[dict[str, Any]] = answer.json()["placements"]
        return listed

    assert await newest(ROOT) == []
    asked = {"alice": [], "bob": []}  # type: dict[str, list[str]]
    deciding, number = set[str](), 0
    while number < 12 or deciding != {"p0", "p1"}:  # whichever NATS gives each to
        assert number < 20, "as many as are listed"
        name, number = ("alice", "alice", "bob")[number % 3], number + 1
        body = {"model": "demo", "prompt": f"{number}", "max_tokens": 1}
        answer = await http.post("/v1/completions", json=body, headers=bearer(name))
        asked[name].append(answer.json()["kvfleet"]["request_id"])
        await asyncio.sleep(0.002)  # another millisecond: that is what they are ordered by
        deciding |= {one["placement_id"] for one in await newest(ROOT)}
    for name, ids in asked.items():
        listed = await newest(bearer(name))
        assert [one["request_id"] for one in listed] == ids[::-1]
        assert {one["tenant"] for one in listed} == {{"alice": "acme", "bob": "other"}[name]}
    everybodys = await newest(ROOT)
    assert sorted(one["request_id"] for one in everybodys) == sorted(asked["alice"] + asked["bob"])
    assert [one["decided_unix_ms"] for one in everybodys] == sorted(
        (one["decided_unix_ms"] for one in everybodys), reverse=True
    )
    assert {one["placement_id"] for one in everybodys} == {"p0", "p1"}
    assert [one["request_id"] for one in await newest(ALICE, "?limit=3")] == asked["alice"][:-4:-1]
    assert len(await newest(ROOT, "?limit=200&model=demo")) == number
    assert await newest(ROOT, "?model=another") == []

    (attempt,) = await fleet.explained(asked["bob"][-1], BOB)
    assert (await newest(BOB, "?limit=1"))[0] == {"request_id": asked["bob"][-1], **attempt}
    for query in ("?limit=0", "?limit=201", "?limit=x", "?limit=-1", f"?model={'m' * 257}"):
        answer = await http.get(f"/v1/placements{query}", headers=ALICE)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, query[1:6]), query
    assert (await http.get("/v1/placements")).status_code == 401
    assert (await http.post("/v1/placements", headers=ALICE)).status_code == 405


async def test_one_key_that_asks_for_lists_as_fast_as_it_can_shuts_nobody_else_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client, question_desk):
        monkeypatch.setattr(module, "EXPLAIN_TIMEOUT_S", TIMEOUT_S)
    request = (await events(fleet.served, {"prompt": "x"}))[0]["request_id"]
    await fleet.explained(request)
    entries = [entry for loop in fleet.loops for entry in loop.core.ledger.entries.values()]
    for loop in fleet.loops:
        for number in range(300):
            placement = replace(entries[0].placement, request=f"r{number}")
            loop.core.ledger.note(replace(entries[0], placement=placement, tenant="other", actual=Actual()))
    http = fleet.served.http
    asking = True
    flooded: Counter[int] = Counter()

    async def flood(lane: int) -> None:
        limit = lane
        while asking:
            limit = limit % 200 + 1
            answer = await http.get(f"/v1/placements?limit={limit}", headers=BOB)
            flooded[answer.status_code] += 1
            assert (answer.status_code == 429) == ("retry-after" in answer.headers)

    flooding = [asyncio.create_task(flood(lane * 12)) for lane in range(16)]
    waited = []
    try:
        for _ in range(5):
            await asyncio.sleep(0.1)
            began = asyncio.get_running_loop().time()
            one = await http.get(f"/v1/placements/{request}", headers=ALICE)
            waited.append(asyncio.get_running_loop().time() - began)
            listed = await http.get("/v1/placements", headers=ALICE)
            assert (one.status_code, listed.status_code) == (200, 200), flooded
            assert [each["request_id"] for each in listed.json()["placements"]] == [request]
    finally:
        asking = False
        await asyncio.gather(*flooding)
    assert set(flooded) == {200, 429}
    assert sorted(waited)[2] < TIMEOUT_S, "as long as a question waits for those who do not answer"


async def test_a_key_may_name_the_policies_that_it_has(fleet: Fleet) -> None:
    http = fleet.served.http

    async def post(headers: dict[str, str], **fields: Any) -> Any:
        return await http.post("/v1/completions", json={"model": "demo", "prompt": "x", **fields}, headers=headers)

    for worker in ("w0", "w1", "w1", "w0"):
        for fields in ({"policy": "direct", "worker": worker}, {"worker": worker}):
            answer = await post(ALICE, max_tokens=2, **fields)
            assert answer.json()["kvfleet"]["worker_id"] == worker
            (attempt,) = await fleet.explained(answer.json()["id"])
            assert (attempt["policy"], attempt["worker_id"], attempt["why"]) == (
                "direct",
                worker,
                "named by the request",
            )
    for headers, policy in ((ALICE, "ring"), (ROOT, "kv_load"), (ROOT, "random")):
        answer = await post(headers, max_tokens=2, policy=policy)
        (attempt,) = await fleet.explained(answer.json()["id"], headers)
        assert attempt["policy"] == policy
    for headers, fields, status, param in (
        (BOB, {"policy": "cost"}, 403, "policy"),
        (BOB, {"worker": "w0"}, 403, "policy"),
        (ALICE, {"policy": "kv_load"}, 403, "policy"),
        (ALICE, {"policy": "best"}, 400, "policy"),
        (ROOT, {"policy": "best"}, 400, "policy"),
        (ALICE, {"policy": "direct"}, 400, "worker"),
        (ALICE, {"policy": "ring", "worker": "w0"}, 400, "worker"),
        (ALICE, {"worker": "w9"}, 404, "worker"),
    ):
        refused = await post(headers, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), fields
    assert "cost, kv_load, ring" in (await post(ROOT, policy="best")).json()["error"]["message"]


async def test_the_command_line_shows_it(fleet: Fleet) -> None:
    first = (await events(fleet.served, {"prompt": LONG}))[0]
    request = first["request_id"]
    (attempt,) = await fleet.explained(request)

    async def explain(*flags: str) -> Any:
        command = ["explain", *flags, f"--url={fleet.served.url}"]
        return await asyncio.to_thread(CliRunner().invoke, app, command)

    shown = await explain(f"cmpl-{request}", "--api-key=alice")
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines[0].startswith(
        f"{request}: {first['worker_id']} by cost, {attempt['prompt_tokens']} prompt tokens of acme"
    )
    assert " ".join(("worker", *attempt["candidates"][0]["terms_ms"], "cost ms")) in lines
    (chosen,) = [line for line in lines if line.startswith("* ")]
    assert chosen.split()[1] == first["worker_id"]
    assert "expected actual" in lines
    assert "cached tokens, device 0 0" in lines
    assert "output tokens 8" in lines
    assert "ended yes" in lines

    as_json = await explain(request, "--api-key=root", "--json")
    assert json.loads(as_json.stdout) == {"request_id": request, "attempts": [attempt]}
    for flags, text in (
        ((request, "--api-key=bob"), "id: no decision about"),
        ((request,), "no API key"),
        (("a b", "--api-key=alice"), "id: must be 1 to 64 of"),
    ):
        refused = await explain(*flags)
        assert refused.exit_code == 1
        assert text in refused.stderr
        assert refused.stdout == ""


async def test_metrics_are_there_from_the_start(fleet: Fleet) -> None:
    for text in fleet.metrics():
        for name in (
            "kvfleet_placement_prompt_tokens_total 0.0",
            "kvfleet_placement_attained_hit_tokens_total 0.0",
            "kvfleet_placement_attainable_hit_tokens_total 0.0",
            "kvfleet_placement_lost_hit_tokens_total 0.0",
            "kvfleet_placement_index_blocks 0.0",
            "kvfleet_placement_index_given_up_blocks_total 0.0",
            "kvfleet_placement_index_capacity_blocks 1e+06",
            "kvfleet_placement_pulled_snapshots_total",
            "kvfleet_placement_malformed_events_total 0.0",
            "kvfleet_placement_unknown_events_total",
            "kvfleet_placement_followed_vaults 0.0",
            "kvfleet_placement_vault_blocks 0.0",
            "kvfleet_placement_sourced_decisions_total 0.0",
            "kvfleet_placement_preload_answers_total 0.0",
            "kvfleet_placement_promised_requests 0.0",
            "kvfleet_placement_running_requests 0.0",
            "kvfleet_placement_ledger_decisions 0.0",
            'kvfleet_placement_followed_workers{state="behind"}',
            'kvfleet_placement_predicted_hit_tokens_total{worker="w0"} 0.0',
            'kvfleet_placement_missing_hit_tokens_total{worker="w1"} 0.0',
            'kvfleet_placement_belief{belief="exact",worker="w0"} 1.0',
            'kvfleet_placement_belief{belief="load_only",worker="w0"} 0.0',
            'kvfleet_request_active_slots{worker="w0"} 0.0',
            'kvfleet_kv_active_blocks{worker="w1"} 0.0',
            'kvfleet_waiting_requests{worker="w1"} 0.0',
            'kvfleet_gpu_cache_usage_ratio{worker="w0"} 0.0',
            'kvfleet_gpu_prefix_cache_hit_ratio{worker="w0"} 0.0',
        ):
            assert name in text
    await until(lambda: all('kvfleet_kv_total_blocks{worker="w0"} 1024.0' in text for text in fleet.metrics()))
    await until(lambda: all('kvfleet_placement_followed_workers{state="exact"} 2.0' in t for t in fleet.metrics()))
    for text in fleet.metrics():
        assert 'kvfleet_request_total_slots{worker="w0"} 0.0' not in text
