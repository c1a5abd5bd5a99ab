"""Responses in the background: whichever ingress took them, whichever is left, whoever asks for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from ingress_process import IngressProcess
from ingress_rig import Serve, Served
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.buckets import RESPONSES_BYTES, Bucket
from kvproto.errors import Unavailable
from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_port
from tests.integration.ingress.test_ingress_responses import ASKED, events_of, says
from tests.support.waiting import LIMIT_S, until

IN_BACKGROUND = {**ASKED, "background": True}
LONG = "To be, or not to be: that is the question."


async def begun(http: httpx.AsyncClient, **more: Any) -> str:
    answer = await http.post("/v1/responses", json={**IN_BACKGROUND, **more})
    told = answer.json()
    assert (answer.status_code, told["status"], told["output"]) == (200, "queued", []), told
    return str(told["id"])


async def ended(http: httpx.AsyncClient, response: str, **headers: str) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            told: dict[str, Any] = (await http.get(f"/v1/responses/{response}", headers=headers)).json()
            if told["status"] not in ("queued", "in_progress"):
                return told
            await asyncio.sleep(0.02)


def text_of(told: dict[str, Any]) -> str:
    return "".join(part["text"] for item in told["output"] for part in item["content"])


async def none_left(served: Served, worker: ScriptedWorker) -> None:
    async with asyncio.timeout(LIMIT_S):
        while served.ingress.background.kept or worker.running or served.ingress.admission.running:
            await asyncio.sleep(0.02)
    served.ingress.runs.check_integrity()
    served.ingress.admission.check_integrity()


async def test_it_ends_though_nobody_waits(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    worker.held.clear()
    response = await begun(first.http)
    for served in (first, second):
        assert (await served.http.get(f"/v1/responses/{response}")).json()["status"] == "in_progress"
    worker.held.set()
    told = await ended(second.http, response)
    assert (told["status"], text_of(told)) == ("completed", LONG)
    assert told == (await first.http.get(f"/v1/responses/{response}")).json()
    assert {(asked.request, asked.attempt) for _, asked in worker.requests} == {(response.removeprefix("resp_"), 0)}
    await none_left(first, worker)


async def test_its_events_are_the_same_at_every_ingress(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    worker.token_s = 0.02
    answer = await first.http.post("/v1/responses", json={**IN_BACKGROUND, "stream": True})
    events = events_of(answer.text)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response = await begun(first.http)
    path = f"/v1/responses/{response}?stream=true"
    live, late = await asyncio.gather(second.http.get(path), first.http.get(f"{path}&starting_after=5"))

    def without_ids(text: str, after: int = -1) -> list[Any]:
        told = json.loads(json.dumps(events_of(text)).replace(response.removeprefix("resp_"), "ID"))
        for event in told:
            for name in ("usage", "kvfleet", "created_at"):
                event.get("response", {}).pop(name, None)
        return [event for event in told if event["sequence_number"] > after]

    own = answer.text.replace(events[0]["response"]["id"].removeprefix("resp_"), response.removeprefix("resp_"))
    assert without_ids(live.text) == without_ids(own)
    assert without_ids(late.text) == without_ids(own, 5)
    assert events_of((await second.http.get(path)).text)[-1]["response"] == await ended(first.http, response)


async def test_the_death_of_its_ingress_ends_nothing(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, serving: Serve, tmp_path: Path
) -> None:
    served, port = await serving(), free_port()
    says(worker, LONG)
    process = IngressProcess(nats_url, fleet_buckets, tmp_path, port=port)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False) as http:
            await process.ready(f"http://127.0.0.1:{port}")
            worker.stalls_at = 5
            response = await begun(http, kvfleet={"expect_return_s": 30})
            await until(lambda: worker.generated >= 5)
    finally:
        process.kill()
        await process.stop()
    worker.stalls_at = None
    await until(lambda: served.ingress.background.kept == 1)
    worker.held.set()
    told = await ended(served.http, response)
    assert (told["status"], text_of(told)) == ("completed", LONG)
    assert served.ingress.background.taken_over_total == 1
    first, second = (request for _, request in worker.requests)
    assert (first.request, first.prompt_ids, first.sampling) == (second.request, second.prompt_ids, second.sampling)
    await none_left(served, worker)


async def test_one_whose_ingress_failed_while_it_began_begins_at_another(
    serving: Serve, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    bucket = first.ingress.responses.records.bucket
    update = Bucket.update

    async def failing(self: Bucket, key: str, value: bytes, revision: int) -> int:
        if self is bucket and not key.startswith("active."):
            raise Unavailable("no head")
        return await update(self, key, value, revision)

    monkeypatch.setattr(Bucket, "update", failing)
    named = {"Idempotency-Key": "once"}
    assert (await first.http.post("/v1/responses", json=IN_BACKGROUND, headers=named)).status_code == 503
    answer = await second.http.post("/v1/responses", json=IN_BACKGROUND, headers=named)
    assert answer.status_code == 200
    assert text_of(await ended(first.http, answer.json()["id"])) == LONG
    await none_left(second, worker)


async def test_an_ingress_that_drains_hands_it_over(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    worker.stalls_at = 5
    response = await begun(first.http)
    await until(lambda: worker.generated >= 5)
    worker.stalls_at = None
    assert await first.ingress.drain(LIMIT_S)
    await until(lambda: second.ingress.background.kept == 1)
    worker.held.set()
    assert text_of(await ended(second.http, response)) == LONG
    assert first.ingress.background.kept == 0


async def test_what_is_cancelled_ends_everywhere(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    worker.token_s = 0.3
    response = await begun(first.http)
    reading = asyncio.create_task(second.http.get(f"/v1/responses/{response}?stream=true"))
    await until(lambda: len(worker.requests) == 2 and worker.generated >= 6)
    told = await second.http.post(f"/v1/responses/{response}/cancel")
    assert (told.status_code, told.json()["status"]) == (200, "cancelled")
    last = events_of((await reading).text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
    again = await first.http.post(f"/v1/responses/{response}/cancel")
    assert again.json()["status"] == (await ended(first.http, response))["status"] == "cancelled"
    for served in (first, second):
        await none_left(served, worker)
    replayed = events_of((await first.http.get(f"/v1/responses/{response}?stream=true")).text)
    assert replayed[-1]["response"]["status"] == "cancelled"
    refused = await first.http.post("/v1/responses", json={**ASKED, "previous_response_id": response})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_what_is_deleted_ends_everywhere(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, LONG)
    worker.stalls_at = 5
    response = await begun(first.http)
    await until(lambda: worker.generated >= 5)
    assert (await second.http.delete(f"/v1/responses/{response}")).json()["deleted"] is True
    await none_left(first, worker)
    for served in (first, second):
        assert (await served.http.get(f"/v1/responses/{response}")).status_code == 404
    bucket = first.ingress.responses.records.bucket
    assert await bucket.listed() == []


async def test_what_may_help_is_tried_again(served: Served, worker: ScriptedWorker) -> None:
    worker.failure = ("out_of_memory", "full", True)
    worker.fails_after = 1
    response = await begun(served.http)
    await until(lambda: len(worker.requests) >= 3)
    worker.failure = None
    assert text_of(await ended(served.http, response)) == "Hello!"


async def test_a_failure_is_told(served: Served, worker: ScriptedWorker) -> None:
    worker.failure = ("internal_error", "a fault", False)
    response = await begun(served.http)
    told = await ended(served.http, response)
    assert (told["status"], told["error"]["code"], told["output"]) == ("failed", "server_error", [])
    last = events_of((await served.http.get(f"/v1/responses/{response}?stream=true")).text)[-1]
    assert (last["type"], last["response"]["error"]) == ("response.failed", told["error"])
    await none_left(served, worker)


async def test_what_cannot_begin_is_refused_at_once(served: Served, worker: ScriptedWorker) -> None:
    for fields, status in (({"model": "nobody"}, 404), ({"max_output_tokens": 10**9}, 400)):
        refused = await served.http.post("/v1/responses", json={**IN_BACKGROUND, **fields})
        assert refused.status_code == status, refused.text
    assert await served.ingress.responses.records.bucket.listed() == []
    await none_left(served, worker)


async def test_a_repeat_is_the_same_response(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    worker.held.clear()
    told = [
        (await served.http.post("/v1/responses", json=IN_BACKGROUND, headers={"Idempotency-Key": "k"})).json()["id"]
        for served in (first, first, second)
    ]
    assert len(set(told)) == 1
    worker.held.set()
    assert text_of(await ended(first.http, told[0])) == "Hello!"
    for served in (first, second):
        await none_left(served, worker)
    again = await first.http.post("/v1/responses", json=IN_BACKGROUND, headers={"Idempotency-Key": "k"})
    assert (again.json()["id"], again.json()["status"]) == (told[0], "completed")


async def test_tenants_and_limits(serving: Serve, worker: ScriptedWorker) -> None:
    keys = json.dumps(
        [
            {"name": "one", "tenant": "acme", "sha256": hash_key("kvf_one"), "max_concurrent": 1},
            {"name": "two", "tenant": "other", "sha256": hash_key("kvf_two"), "admin": True},
        ]
    )
    served = await serving(keys=keys)
    one, two = {"authorization": "Bearer kvf_one"}, {"authorization": "Bearer kvf_two"}
    worker.held.clear()
    answer = await served.http.post("/v1/responses", json=IN_BACKGROUND, headers=one)
    path = f"/v1/responses/{answer.json()['id']}"
    more = await served.http.post("/v1/responses", json=IN_BACKGROUND, headers=one)
    assert more.status_code == 429
    for method, rest in (
        ("GET", ""),
        ("GET", "?stream=true"),
        ("POST", "/cancel"),
        ("DELETE", ""),
        ("GET", "/input_items"),
    ):
        assert (await served.http.request(method, path + rest, headers=two)).status_code == 404
    after = {**ASKED, "previous_response_id": answer.json()["id"]}
    assert (await served.http.post("/v1/responses", json=after, headers=two)).status_code == 400
    worker.held.set()
    assert text_of(await ended(served.http, answer.json()["id"], **one)) == "Hello!"
    await none_left(served, worker)
    assert (await served.http.post("/v1/responses", json=ASKED, headers=one)).status_code == 200


@pytest.mark.parametrize("step", [2, 40_000])
async def test_long_ones_are_in_chunks(served: Served, worker: ScriptedWorker, step: int) -> None:
    says(worker, "so " * 30_000, 3000 if step == 2 else step)
    bucket = served.ingress.responses.records.bucket
    asked = {**ASKED, "input": "Speak. " + "x" * 100, "metadata": {"a": "b" * 500}}
    told = (await served.http.post("/v1/responses", json=asked)).json()
    assert len(text_of(told)) == 90_000
    keys = [entry.key for entry in await bucket.listed()]
    assert len(keys) == 2
    assert (await served.http.get(f"/v1/responses/{told['id']}")).json() == told
    chunk = next(key for key in keys if key.count(".") == 3)
    await bucket.delete(chunk)
    assert (await served.http.get(f"/v1/responses/{told['id']}")).status_code == 404


async def test_the_bucket_has_a_size(served: Served, nats_url: str, fleet_buckets: Subjects) -> None:
    connection = served.client.connection
    bucket = await Bucket.open(connection, fleet_buckets.responses_bucket)
    told = json.loads((await connection.request(f"$JS.API.STREAM.INFO.KV_{bucket.name}", b"", 5.0)).data)["config"]
    assert (told["discard"], told["max_bytes"], told["max_age"]) == ("old", RESPONSES_BYTES, 30 * 86_400 * 10**9)
