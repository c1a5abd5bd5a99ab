"""Files and batches by the `openai` package as it is, before a scripted worker and a real placement."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ingress_process import IngressProcess
from ingress_rig import Serve, Served, start_placement
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.connection import Connection
from kvproto.messages import QueuedRequest, QueuedResult
from kvproto.subjects import Subjects
from kvproto.testing.nats_process import free_port
from tests.support.waiting import LIMIT_S, until


@pytest.fixture
async def placement(nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker) -> AsyncIterator[PlacementLoop]:
    loop, connection = await start_placement(nats_url, fleet_buckets, "p1")
    await until(lambda: bool(loop.core.fleet.workers))
    yield loop
    await loop.stop()
    await connection.close()


ClientOf = Callable[..., openai.AsyncOpenAI]


@pytest.fixture
async def client_of() -> AsyncIterator[ClientOf]:
    opened: list[openai.AsyncOpenAI] = []

    def client(served: Served, key: str = "none") -> openai.AsyncOpenAI:
        opened.append(openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0))
        return opened[-1]

    yield client
    for one in opened:
        await one.close()


def line(number: int, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    said = {"model": "demo", "messages": [{"role": "user", "content": f"line {number}"}], "max_tokens": 8, **body}
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": said}


async def uploaded(client: openai.AsyncOpenAI, lines: list[dict[str, Any]]) -> str:
    data = "\n".join(map(json.dumps, lines)).encode()
    return (await client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch")).id


async def begun(client: openai.AsyncOpenAI, lines: list[dict[str, Any]], **more: Any) -> str:
    said = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return (await client.batches.create(input_file_id=await uploaded(client, lines), **said)).id


async def ended(client: openai.AsyncOpenAI, batch: str) -> Any:
    async with asyncio.timeout(20.0):
        while (told := await client.batches.retrieve(batch)).status in ("validating", "in_progress", "cancelling"):
            await asyncio.sleep(0.05)
    return told


async def rows(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    return [json.loads(one) for one in (await client.files.content(file)).text.splitlines()]


@pytest.mark.usefixtures("placement")
async def test_a_batch_from_upload_to_answers(served: Served, worker: ScriptedWorker, client_of: ClientOf) -> None:
    client = client_of(served)
    lines = [line(n) for n in range(20)] + [line(20, n=0), line(21, stream=True)]
    batch = await begun(client, lines, metadata={"for": "test"})
    told = await ended(client, batch)
    assert (told.status, told.request_counts.total, told.request_counts.completed) == ("completed", 22, 20), told
    assert (told.request_counts.failed, told.metadata) == (2, {"for": "test"})
    answers = await rows(client, told.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"c{n}" for n in range(20)]
    for one in answers:
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    failed = await rows(client, told.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in failed] == [("c20", 400), ("c21", 400)]
    assert [one.id async for one in client.batches.list()] == [batch]
    assert {asked.priority for _, asked in worker.requests} == {-100}
    assert len(worker.requests) == 20
    served.ingress.runs.check_integrity()
    served.ingress.admission.check_integrity()
    assert (served.ingress.runs.kept, served.ingress.admission.running) == (0, 0)


@pytest.mark.usefixtures("placement")
async def test_completions_and_responses(served: Served, worker: ScriptedWorker, client_of: ClientOf) -> None:
    client = client_of(served)
    said = {"model": "demo", "prompt": "O Romeo", "max_tokens": 8}
    one = {"custom_id": "c0", "url": "/v1/completions", "body": said}
    told = await ended(client, await begun(client, [one], endpoint="/v1/completions"))
    (answer,) = await rows(client, told.output_file_id)
    assert answer["response"]["body"]["choices"][0]["text"] == "Hello!"
    one = {"custom_id": "c0", "url": "/v1/responses", "body": {"model": "demo", "input": "O Romeo"}}
    told = await ended(client, await begun(client, [one], endpoint="/v1/responses"))
    (answer,) = await rows(client, told.output_file_id)
    assert answer["response"]["body"]["output"][0]["content"][0]["text"] == "Hello!"


@pytest.mark.usefixtures("placement")
async def test_what_is_done_is_read_while_the_rest_runs_and_a_cancelled_batch_keeps_it(
    served: Served, worker: ScriptedWorker, client_of: ClientOf
) -> None:
    client = client_of(served)
    file = await uploaded(client, [line(n) for n in range(12)])
    worker.token_s = 0.05
    batch = (
        await client.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
    ).id
    async with asyncio.timeout(LIMIT_S):
        while (told := await client.batches.retrieve(batch)).output_file_id is None or not await rows(
            client, told.output_file_id
        ):
            await asyncio.sleep(0.02)
    worker.held.clear()
    assert told.status == "in_progress"
    with pytest.raises(openai.ConflictError):
        await client.files.delete(file)
    assert (await client.batches.cancel(batch)).status == "cancelling"
    told = await ended(client, batch)
    assert told.status == "cancelled"
    assert told.cancelled_at is not None
    done = await rows(client, told.output_file_id)
    undone = await rows(client, told.error_file_id)
    assert 1 <= len(done) == told.request_counts.completed < 12
    assert {one["error"]["code"] for one in undone} == {"batch_cancelled"}
    assert sorted(one["custom_id"] for one in done + undone) == sorted(f"c{n}" for n in range(12))
    await until(lambda: not worker.running and not served.ingress.batches.runner.running)
    worker.held.set()
    assert (await client.files.delete(told.output_file_id)).deleted
    assert (await client.batches.retrieve(batch)).output_file_id is None
    assert (await client.files.delete(file)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(file)


@pytest.mark.usefixtures("placement")
async def test_a_batch_expires(served: Served, worker: ScriptedWorker, client_of: ClientOf) -> None:
    client = client_of(served)
    worker.held.clear()
    told = await ended(client, await begun(client, [line(n) for n in range(3)], completion_window="2s"))
    assert (told.status, told.output_file_id is not None) == ("expired", True)
    assert await rows(client, told.output_file_id) == []
    assert {one["error"]["code"] for one in await rows(client, told.error_file_id)} == {"batch_expired"}
    worker.held.set()


@pytest.mark.usefixtures("placement")
async def test_a_file_that_is_no_batch(served: Served, client_of: ClientOf) -> None:
    client = client_of(served)
    lines = [line(0), line(0), line(1, url="/v1/embeddings"), {"custom_id": "x"}]
    told = await ended(client, await begun(client, lines))
    assert told.status == "failed"
    assert [(one.line, one.param) for one in told.errors.data] == [(2, "custom_id"), (3, "url"), (4, "url")]
    assert told.output_file_id is None
    with pytest.raises(openai.BadRequestError):
        await client.batches.create(input_file_id="file-none", endpoint="/v1/chat/completions", completion_window="24h")
    with pytest.raises(openai.BadRequestError):
        await client.files.create(file=("a", b"x"), purpose="fine-tune")


@pytest.mark.usefixtures("placement")
async def test_tenants_have_their_own_and_a_quota(serving: Serve, client_of: ClientOf) -> None:
    keys = "".join(
        f'[[keys]]\nname = "{name}"\ntenant = "{name}"\nsha256 = "{hash_key(name)}"\n' for name in ("acme", "other")
    )
    limits = replace((await serving()).ingress.flow.parts.config.batches, tenant_bytes=1000, tenant_batches=1)
    served = await serving(keys=keys, batches=limits)
    acme, other = client_of(served, "acme"), client_of(served, "other")
    file = await uploaded(acme, [line(n) for n in range(3)])
    for client in (other, acme):
        assert [one.id async for one in client.files.list()] == ([file] if client is acme else [])
    with pytest.raises(openai.NotFoundError):
        await other.files.retrieve(file)
    with pytest.raises(openai.RateLimitError):
        await uploaded(acme, [line(n) for n in range(6)])
    assert [one.id async for one in acme.files.list()] == [file]
    assert (await ended(acme, await begun_of(acme, file))).status == "completed"
    with pytest.raises(openai.NotFoundError):
        await other.batches.retrieve((await acme.batches.list()).data[0].id)


async def begun_of(client: openai.AsyncOpenAI, file: str) -> str:
    said = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return (await client.batches.create(input_file_id=file, **said)).id  # type: ignore[arg-type]


@pytest.mark.usefixtures("placement")
async def test_each_line_is_done_once_though_its_ingress_dies(
    nats_url: str, fleet_buckets: Subjects, worker: ScriptedWorker, serving: Serve, client_of: ClientOf, tmp_path: Path
) -> None:
    """The process leads the batch and runs its lines: another ingress takes both over."""
    port = free_port()
    process = IngressProcess(nats_url, fleet_buckets, tmp_path, port=port)
    worker.token_s = 0.02
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S, trust_env=False) as http:
            await process.ready(f"http://127.0.0.1:{port}")
            data = "\n".join(json.dumps(line(n)) for n in range(40)).encode()
            file = (await http.post("/v1/files", files={"file": ("a", data)}, data={"purpose": "batch"})).json()["id"]
            said = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=said)).json()["id"]
            await until(lambda: worker.generated >= 20)
    finally:
        process.kill()
        await process.stop()
    served = await serving()
    told = await ended(client_of(served), batch)
    assert (told.status, told.request_counts.completed) == ("completed", 40)
    answers = await rows(client_of(served), told.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"c{n}" for n in range(40)]
    assert served.ingress.batches.leaders.taken_over_total == 1


@pytest.mark.usefixtures("placement")
async def test_lines_that_the_queue_has_lost_are_queued_again(
    nats_url: str, fleet_buckets: Subjects, served: Served, worker: ScriptedWorker, client_of: ClientOf
) -> None:
    client = client_of(served)
    worker.held.clear()
    batch = await begun(client, [line(n) for n in range(6)])
    await until(lambda: served.ingress.batches.runner.running > 0)
    connection = await Connection.open(nats_url, name="purge", inbox_prefix="_adm.purge")
    await connection.raw.jetstream().purge_stream(fleet_buckets.batch_stream)
    await connection.close()
    worker.held.set()
    assert (await ended(client, batch)).request_counts.completed == 6


@pytest.mark.usefixtures("placement")
async def test_a_producers_requests_wait_in_the_queue(
    nats_url: str, fleet_buckets: Subjects, served: Served, worker: ScriptedWorker
) -> None:
    """In JSON, sent twice; one that is unreadable, expired, refused, cancelled, or said to be of a batch."""
    connection = await Connection.open(nats_url, name="producer", inbox_prefix="_prd.public.x")
    js = connection.raw.jetstream()
    results = await js.key_value(fleet_buckets.batches_bucket)
    subject = fleet_buckets.batch("public", "demo")
    body = line(0)["body"]
    asked = {"request": "job-1", "body": body}
    as_json = {"Content-Type": "application/json"}
    await js.publish(subject, b"{", headers=as_json)
    for _ in range(2):
        await js.publish(subject, json.dumps(asked).encode(), headers=as_json)
    await js.publish(subject, codec.encode(QueuedRequest("job-2", body, expires_unix=int(time.time()) - 5)))
    await js.publish(subject, codec.encode(QueuedRequest("job-3", {**body, "max_tokens": -1})))
    await js.publish(subject, codec.encode(QueuedRequest("job-4", body, cancel=True)))
    await js.publish(
        subject, codec.encode(QueuedRequest("job-5", body, batch="another", caller="another", cancel=True))
    )
    found: dict[str, QueuedResult] = {}
    async with asyncio.timeout(20.0):
        while len(found) < 5:
            for name in ("job-1", "job-2", "job-3", "job-4", "job-5"):
                try:
                    entry = await results.get(f"result.public.{name}")
                    found[name] = codec.decode(QueuedResult, entry.value or b"")
                except Exception:  # noqa: BLE001  not there yet
                    await asyncio.sleep(0.05)
    assert json.loads(found["job-1"].body)["choices"][0]["message"]["content"] == "Hello!"
    assert (found["job-2"].code, found["job-3"].status, found["job-4"].code) == ("expired", 400, "cancelled")
    await until(lambda: not served.ingress.batches.runner.running)
    assert len(worker.requests) == 1
    await connection.close()


@pytest.mark.usefixtures("placement")
async def test_a_producer_cancels_what_runs(
    nats_url: str, fleet_buckets: Subjects, served: Served, worker: ScriptedWorker
) -> None:
    worker.held.clear()
    connection = await Connection.open(nats_url, name="producer", inbox_prefix="_prd.public.x")
    js, runner = connection.raw.jetstream(), served.ingress.batches.runner
    asked = QueuedRequest("job-1", line(0)["body"])
    await js.publish(fleet_buckets.batch("public", "demo"), codec.encode(asked))
    await until(lambda: worker.running)
    await js.publish(fleet_buckets.batch("public", "demo"), codec.encode(replace(asked, cancel=True)))
    await until(lambda: not worker.running and not runner.running)
    worker.held.set()
    entry = await (await js.key_value(fleet_buckets.batches_bucket)).get("result.public.job-1")
    assert codec.decode(QueuedResult, entry.value or b"").code == "cancelled"
    assert len(worker.requests) == 1
    await connection.close()
