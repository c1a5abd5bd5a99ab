"""The timeline and the drain of a worker over HTTP: a real placement, real worker loops, two ingresses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from ingress_rig import FLEET_KEY, Served, serve, start_placement, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.telemetry.audit import Audit
from kvproto.messages import State
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

KEYS = "".join(
    f'[[keys]]\nname = "{name}"\nsha256 = "{hash_key(name)}"\ntenant = "{tenant}"\n{more}\n'
    for name, tenant, more in (("alice", "acme", ""), ("bob", "other", ""), ("root", "ops", "admin = true"))
)
ALICE, BOB, ROOT = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob", "root"))
LONG = {
    "model": "demo",
    "prompt": "Who goes there?",
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


@dataclass
class Fleet:
    workers: FakeFleet
    served: Served  # with keys
    beside: Served  # without
    audited: list[dict[str, Any]] = field(default_factory=list)

    async def timeline(self, headers: dict[str, str], **asked: Any) -> dict[str, Any]:
        answer = await self.served.http.get("/v1/timeline", headers=headers, params=asked)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def until_stays(self, expected: list[tuple[str, str | None]]) -> dict[str, Any]:
        """Of the newest stream, and the last one's first token."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                told = await self.timeline(ROOT)
                stays = told["streams"][0]["stays"] if told["streams"] else []
                if [(one["worker_id"], one["end"]) for one in stays] == expected and stays[-1]["first_token_unix_ms"]:
                    return told
                await asyncio.sleep(0.05)

    async def begin(self) -> tuple[asyncio.Task[int], str]:
        """A long stream, some of which has come; its task gives how many tokens there were, and the worker that has
        it."""
        begun = asyncio.Event()

        async def read() -> int:
            tokens = 0
            async with self.served.http.stream("POST", "/v1/completions", json=LONG, headers=ALICE) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        assert "error" not in event, event
                        tokens += sum(len(one.get("token_ids", ())) for one in event["choices"])
                        begun.set()
                    if line == "data: [DONE]":
                        return tokens
            raise AssertionError("the stream was cut")

        reading = asyncio.create_task(read())
        async with asyncio.timeout(LIMIT_S):
            await begun.wait()
        (holder,) = [name for name, one in self.workers.workers.items() if one.thread.engine.scheduler.running]
        return reading, holder


@pytest.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr("kvproto.streams.placing.PLACE_TIMEOUT_S", 5.0)  # placement places, not the ring
    monkeypatch.setattr("kvproto.client.EXPLAIN_TIMEOUT_S", 20.0)
    monkeypatch.setattr("kvfleet.ingress.fleet.listings.KEPT_S", 0.0)
    workers = FakeFleet(nats_url, fleet_buckets)
    placement, connection = await start_placement(nats_url, fleet_buckets, "p0")
    lines: list[dict[str, Any]] = []
    audit = Audit(lambda line: lines.append(json.loads(line)), lambda: 600.0)
    served = await serve(nats_url, fleet_buckets, keys=KEYS, audit=audit)
    beside = await serve(nats_url, fleet_buckets)
    for name in ("w0", "w1"):
        await workers.start(name, fleet_key=FLEET_KEY, fake_tokens_per_s=200.0)
    for one in (served, beside):
        await until(lambda one=one: len(list(one.client.members.view.ready())) == 2)
    await until(lambda: len(list(placement.core.fleet.ready("demo").workers)) == 2)
    yield Fleet(workers, served, beside, lines)
    for one in (served, beside):
        await one.stop()
    await workers.stop()
    await placement.stop(grace_s=0)
    await connection.close()


async def test_a_stream_survives_a_drain_and_the_timeline_shows_both_workers(fleet: Fleet) -> None:
    reading, holder = await fleet.begin()
    other = {"w0": "w1", "w1": "w0"}[holder]
    await fleet.until_stays([(holder, None)])
    answer = await fleet.served.http.post(f"/workers/{holder}/drain", headers=ROOT)
    assert (answer.status_code, answer.json()) == (200, {"worker_id": holder, "draining": True})
    assert fleet.workers.workers[holder].loop.state is State.DRAINING
    await fleet.workers.workers[holder].stop()  # as its process does
    told = await fleet.until_stays([(holder, "moved"), (other, None)])
    moved, went_on = told["streams"][0]["stays"]
    assert moved["placed_unix_ms"] <= moved["started_unix_ms"] <= moved["first_token_unix_ms"] < moved["ended_unix_ms"]
    assert moved["ended_unix_ms"] <= went_on["first_token_unix_ms"] <= told["now_unix_ms"] + 1000
    assert await reading == 400
    told = await fleet.until_stays([(holder, "moved"), (other, "done")])
    assert [(one["worker_id"], one["what"]) for one in told["workers"]] == [
        ("w0", "joined"), ("w1", "joined"), (holder, "draining"), (holder, "drained"),
    ]  # fmt: skip
    (line,) = [one for one in fleet.audited if one.get("route") == "worker_drain"]
    assert (line["event"], line["key"], line["worker"], line["status"]) == ("access", "root", holder, 200)
    (beside,) = (await fleet.beside.http.get("/v1/timeline")).json()["streams"]  # another ingress has it of placement
    known = [
        [(one["worker_id"], one["end"], one["output_tokens"]) for one in stays]
        for stays in (beside["stays"], told["streams"][0]["stays"])
    ]
    assert known[0] == known[1] == [(holder, "moved", known[0][0][2]), (other, "done", 400)]
    assert abs(beside["stays"][1]["placed_unix_ms"] - told["streams"][0]["stays"][1]["placed_unix_ms"]) < 1000


async def test_a_stream_whose_worker_died(fleet: Fleet) -> None:
    reading, holder = await fleet.begin()
    other = {"w0": "w1", "w1": "w0"}[holder]
    await fleet.until_stays([(holder, None)])
    await fleet.workers.workers[holder].kill()
    assert await reading == 400
    told = await fleet.until_stays([(holder, "lost"), (other, "done")])
    lost, went_on = told["streams"][0]["stays"]
    assert lost["first_token_unix_ms"] < lost["ended_unix_ms"] <= went_on["placed_unix_ms"]
    await until(lambda: not fleet.served.client.members.view.is_alive(holder))
    told = await fleet.timeline(ROOT)
    assert (told["workers"][-1]["worker_id"], told["workers"][-1]["what"]) == (holder, "died")


async def test_a_key_sees_its_own_streams_and_their_workers(fleet: Fleet) -> None:
    one = {"model": "demo", "prompt": "hello", "max_tokens": 2}
    for headers, where in ((ROOT, {"worker": "w0"}), (ROOT, {"worker": "w1"}), (ALICE, {})):
        answer = await fleet.served.http.post("/v1/completions", json=one | where, headers=headers)
        assert answer.status_code == 200, answer.text
    own = await fleet.timeline(ALICE)
    assert [stream["tenant"] for stream in own["streams"]] == ["acme"]
    (stay,) = own["streams"][0]["stays"]
    assert {moment["worker_id"] for moment in own["workers"]} == {stay["worker_id"]}
    assert (await fleet.timeline(BOB)) | {"now_unix_ms": 0} == {"now_unix_ms": 0, "streams": [], "workers": []}
    everything = await fleet.timeline(ROOT)
    assert [stream["tenant"] for stream in everything["streams"]] == ["acme", "ops", "ops"]
    assert {moment["worker_id"] for moment in everything["workers"]} == {"w0", "w1"}
    assert len((await fleet.timeline(ROOT, limit=1))["streams"]) == 1
    assert (await fleet.timeline(ROOT, model="none"))["streams"] == []
    for query, headers, status in (
        ("?limit=0", ROOT, 400),
        ("?limit=201", ROOT, 400),
        ("?limit=x", ROOT, 400),
        ("?model=" + 257 * "m", ROOT, 400),
        ("", {}, 401),
    ):
        assert (await fleet.served.http.get(f"/v1/timeline{query}", headers=headers)).status_code == status, query


async def test_who_may_drain_what(fleet: Fleet) -> None:
    site = {"origin": "http://evil.example", "content-type": "application/json"}
    for served, worker, headers, status in (
        (fleet.served, "w0", {}, 401),
        (fleet.served, "w0", ALICE, 403),
        (fleet.served, "w9", ROOT, 404),
        (fleet.served, "w0.generate.acme", ROOT, 404),
        (fleet.served, "%2A", ROOT, 404),
        (fleet.beside, "w0", site, 403),
        (fleet.beside, "w0", site | {"origin": fleet.beside.url, "content-type": "text/plain"}, 403),
    ):
        answer = await served.http.post(f"/workers/{worker}/drain", headers=headers)
        assert answer.status_code == status, (worker, answer.text)
    assert (await fleet.beside.http.get("/workers/w0/drain")).status_code == 405
    assert {one.loop.state for one in fleet.workers.workers.values()} == {State.READY}
    lines = [one for one in fleet.audited if one.get("route") == "worker_drain"]
    assert [one["status"] for one in lines] == [401, 403, 404, 404, 404]
    assert not any("worker" in one for one in lines), "a caller's words are in no line"
    own = {"origin": fleet.beside.url, "content-type": "application/json"}  # the page's, of an ingress without keys
    assert (await fleet.beside.http.post("/workers/w0/drain", headers=own)).status_code == 200
    assert fleet.workers.workers["w0"].loop.state is State.DRAINING


async def test_a_worker_that_is_gone_or_does_not_answer_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    await fleet.workers.workers["w1"].kill()
    answer = await fleet.served.http.post("/workers/w1/drain", headers=ROOT)  # its record has not expired yet
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "worker_id")
    monkeypatch.setattr("kvfleet.ingress.fleet.routes.DRAIN_TIMEOUT_S", 0.0)
    answer = await fleet.served.http.post("/workers/w0/drain", headers=ROOT)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "worker w0 does not answer")
    assert (fleet.audited[-1]["worker"], fleet.audited[-1]["error"]) == ("w0", "unavailable")


async def test_without_placement_an_ingress_tells_of_its_own_streams(served: Served, worker: ScriptedWorker) -> None:
    answer = await served.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 200
    assert (await served.http.get("/v1/placements")).status_code == 503
    told = (await served.http.get("/v1/timeline")).json()
    ((stay,),) = [one["stays"] for one in told["streams"]]
    assert (stay["worker_id"], stay["end"]) == (worker.id, "done")
    assert stay["placed_unix_ms"] <= stay["first_token_unix_ms"] <= stay["ended_unix_ms"] <= told["now_unix_ms"]
