"""A client whose connection broke goes on where it was, at the same ingress or another, and nothing ran meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from cut_streams import Event, read, steps, texts
from ingress_rig import Serve, Served, serve, start_placement, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.settings import RunLimits
from kvproto.subjects import Subjects
from tests.support import sse
from tests.support.fake_fleet import FakeFleet

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 24, "ignore_eos": True}
MESSAGE = [{"role": "user", "content": "Speak, I charge thee."}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (GENERATE, {"prompt": "O Romeo", **SAMPLED, "logprobs": 2}),
    "chat": (CHAT, {"model": "demo", "messages": MESSAGE, "stream": True, **SAMPLED}),
    "completions": (
        COMPLETION,
        {"model": "demo", "prompt": "Alas", "stream": True, **SAMPLED, "n": 3, "logprobs": 2, "stop": ["zzz", "qu"],
         "presence_penalty": 0.5, "stream_options": {"include_usage": True}},
    ),
    "echo": (
        COMPLETION,
        {"model": "demo", "prompt": "Alas, poor Yorick! I knew him", "stream": True, **SAMPLED, "n": 2, "logprobs": 2,
         "echo": True, "return_token_ids": True},
    ),
    "chat of ids": (
        CHAT, {"model": "demo", "messages": MESSAGE, "stream": True, **SAMPLED, "return_token_ids": True}
    ),
}  # fmt: skip


@pytest.fixture
async def pair(nats_url: str, fleet_buckets: Subjects, fleet: FakeFleet) -> AsyncIterator[list[Served]]:
    """Two ingresses before a real placement, and two real worker loops and engines."""
    for name in ("w1", "w2"):
        await fleet.start(name, fake_tokens_per_s=400)
    placement, connection = await start_placement(nats_url, fleet_buckets, "p0")
    served = [await serve(nats_url, fleet_buckets) for _ in range(2)]
    yield served
    for one in served:
        one.ingress.runs.check_integrity()
    await asyncio.gather(*(one.stop() for one in served))
    await placement.stop()
    await connection.close()


@pytest.mark.parametrize("kind", list(ASKED))
async def test_a_cut_stream_goes_on_where_it_was(pair: list[Served], kind: str) -> None:
    """Every event is cut behind, at some ingress: what was read before and after is the unbroken run."""
    here, there = pair
    path, body = ASKED[kind]
    if kind == "generate":  # the same history for each
        whole = await read(here, path, {**body, "seq_id": "whole"})
    else:
        whole = await read(here, path, body)
    assert len({event.id for event in whole}) == len(whole), "an event's id is its own"
    chunks = [event for event in whole if "choices" in event.data]
    assert [event.data["kvfleet"]["event_id"] for event in chunks] == [event.id for event in chunks]
    for number, cut in enumerate((1, 2, 9, len(whole) - 2, len(whole) - 1)):
        again, sent = (here, there)[number % 2], {**body, "seq_id": f"s{number}"} if kind == "generate" else body
        before = await read(here, path, sent, events=cut)
        after = await read(again, path, sent, last_event_id=before[-1].id)
        assert steps(before + after) == steps(whole), (cut, before[-1].id)
        assert texts(before + after) == texts(whole)
        assert {event.id for event in before}.isdisjoint(event.id for event in after)
        if kind == "generate":
            assert (await there.http.get(f"/sessions/s{number}")).json()["turns"] == 1, "committed once"
    one, other = here.ingress.runs, there.ingress.runs
    assert one.resumed_total >= 1, "else all had finished when they were cut"
    assert (one.resumed_total + one.replayed_total, other.resumed_total + other.replayed_total) == (3, 0)


async def test_it_may_break_again_and_again_anywhere(pair: list[Served]) -> None:
    path, body = ASKED["completions"]
    whole = await read(pair[0], path, body)
    events: list[Event] = []
    hops = 0
    while not events or events[-1].data != "[DONE]":
        headers = {"last_event_id": events[-1].id} if events else {}
        events += await read(pair[hops % 2], path, body, events=16, **headers)
        hops += 1
    assert hops > 3
    assert steps(events) == steps(whole)


async def test_a_seed_that_nobody_said_is_the_same_anywhere(pair: list[Served]) -> None:
    body = {"prompt": "O Romeo", "temperature": 0.9, "max_tokens": 16, "ignore_eos": True}
    one, other = [await read(served, GENERATE, body, idempotency_key="k") for served in pair]
    assert steps(one) == steps(other)
    assert steps(one) != steps(await read(pair[0], GENERATE, body))


async def test_the_end_was_there_already(pair: list[Served]) -> None:
    path, body = ASKED["completions"]
    whole = await read(pair[0], path, body)
    assert [event.id.partition(":")[2] for event in whole[-3:]] == ["end", "end.1", "end.2"]
    for served in pair:
        answer = await served.http.post(path, json=body, headers={"last-event-id": whole[-1].id})
        assert (answer.status_code, answer.content) == (204, b""), "browsers do not come back after a 204"
        assert [one.data for one in await read(served, path, body, last_event_id=whole[-2].id)] == ["[DONE]"]


async def test_a_turn_that_another_followed_is_not_resumed(pair: list[Served]) -> None:
    _, body = ASKED["generate"]
    for served, seq_id in zip(pair, ("here", "there"), strict=True):
        await read(pair[0], GENERATE, {**body, "seq_id": seq_id})
        sent = {**body, "prompt": " and then", "seq_id": seq_id, "max_tokens": 400}
        before = await read(pair[0], GENERATE, sent, events=5)
        while (await pair[1].http.get(f"/sessions/{seq_id}")).json()["busy"]:
            await asyncio.sleep(0.02)
        await read(pair[1], GENERATE, {**body, "prompt": " but", "seq_id": seq_id})
        refused = await served.http.post(GENERATE, json=sent, headers={"last-event-id": before[-1].id})
        if refused.status_code == 200:  # what it had brought before the cut was noticed comes first
            error = json.loads(refused.text.rpartition("data: ")[2])
        else:
            assert refused.status_code == 409
            error = refused.json()["error"]
        assert error["code"] == "session_busy"
        assert (await served.http.get(f"/sessions/{seq_id}")).json()["turns"] == 2


# ---------------------------------------------------------------------------------------------- what runs meanwhile

LONG = [(50 + n, f" word{n}") for n in range(60)]


async def test_nothing_runs_for_a_client_that_is_away(served: Served, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    body = {"prompt": "x", "seq_id": "s", "max_tokens": 60}
    before = await read(served, GENERATE, body, events=10)
    assert len(worker.cancels) == 1
    assert not worker.running
    assert not served.client.streams
    generated = worker.generated
    await asyncio.sleep(0.1)
    assert worker.generated == generated < 60
    assert not (await served.http.get("/sessions/s")).is_success, "the turn has let go of its session"
    after = await read(served, GENERATE, body, last_event_id=before[-1].id)
    assert texts(before + after) == {0: "".join(text for _, text in LONG)}
    first, second = (request for _, request in worker.requests)
    assert (first.request, first.prompt_ids) == (second.request, second.prompt_ids)
    assert 9 <= len(second.output_ids) <= generated, "it goes on after the tokens that are there"
    assert second.text_sent == sum(len(text) for _, text in LONG[: len(second.output_ids)])
    assert worker.generated - generated == 60 - len(second.output_ids)
    metrics = (await served.http.get("/metrics")).text
    assert "kvfleet_ingress_resumed_requests_total 1.0" in metrics
    assert "kvfleet_ingress_kept_runs 1.0" in metrics


async def test_after_the_grace_it_is_computed_again(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(runs=RunLimits(grace_s=0.05, replay_s=0.05))
    worker.reply, worker.token_s = LONG, 0.002
    body = {"prompt": "x", "max_tokens": 60}
    before = await read(served, GENERATE, body, events=10)
    await until(lambda: not served.ingress.runs._runs)
    after = await read(served, GENERATE, body, last_event_id=before[-1].id)
    assert texts(before + after) == {0: "".join(text for _, text in LONG)}
    assert worker.requests[1][1].output_ids == ()
    assert worker.requests[1][1].request == worker.requests[0][1].request
    assert served.ingress.runs.resumed_total == 0


async def test_what_is_kept_is_bounded(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(runs=RunLimits(bytes=20_000))
    for n in range(30):
        assert (await served.http.post(GENERATE, json={"prompt": f"x{n}"})).status_code == 200
    assert 0 < served.ingress.runs.kept < 10
    assert served.ingress.runs.kept_bytes <= 20_000
    served.ingress.runs.check_integrity()


async def test_a_client_that_is_back_before_its_loss_was_noticed(serving: Serve, worker: ScriptedWorker) -> None:
    """Both connections get all of it, the key's limit of 1 notwithstanding, and the run outlives the older one."""
    served = await serving(keys=f'[[keys]]\nsha256 = "{hash_key("k")}"\nmax_concurrent = 1\n')
    served.http.headers["x-api-key"] = "k"
    worker.reply, worker.token_s = LONG, 0.02
    body = {"prompt": "x", "seq_id": "s", "max_tokens": 60}
    got: list[str] = []
    async with served.http.stream("POST", GENERATE, json=body) as older:
        lines = sse.alines(older)
        while sum(line.startswith("id: ") for line in got) < 8:
            got.append(await anext(lines))
        last = next(line for line in reversed(got) if line.startswith("id: ")).removeprefix("id: ")
        newer = asyncio.create_task(read(served, GENERATE, body, last_event_id=last))
        await until(lambda: served.ingress.runs.attached_total)
    rest = await newer
    assert [event.data["token_id"] for event in rest if event.data["type"] == "token"] == [
        token for token, _ in LONG[int(last.partition(":")[2]) :]
    ]
    assert rest[-1].data["type"] == "done"
    assert len(worker.requests) == 1
    assert not worker.cancels
    assert (await served.http.get("/sessions/s")).json()["turns"] == 1


async def test_coming_back_is_not_for_free(serving: Serve, worker: ScriptedWorker) -> None:
    """What goes on counts in the key's limit, whoever of its readers began it."""
    served = await serving(keys=f'[[keys]]\nsha256 = "{hash_key("k")}"\nmax_concurrent = 1\n')
    served.http.headers["x-api-key"] = "k"
    worker.reply, worker.token_s = LONG, 0.02
    body = {"prompt": "x", "max_tokens": 60}

    async def refused(**headers: str) -> bool:
        answer = await served.http.post(GENERATE, json=body, headers={n.replace("_", "-"): headers[n] for n in headers})
        return answer.status_code == 429

    parked = await read(served, GENERATE, body, events=5)
    first = asyncio.create_task(read(served, GENERATE, body, idempotency_key="k"))
    await until(lambda: served.ingress.admission.running)
    assert await refused(last_event_id=parked[-1].id), "another one runs"
    second = asyncio.create_task(read(served, GENERATE, body, idempotency_key="k"))
    await until(lambda: served.ingress.runs.attached_total)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until(lambda: served.ingress.admission.running == 1)
    assert await refused(last_event_id=parked[-1].id), "its first reader has gone, it runs on"
    served.ingress.admission.check_integrity()
    await second
    await read(served, GENERATE, body, last_event_id=parked[-1].id)
    served.ingress.admission.check_integrity()
    assert not served.ingress.admission.running


async def test_an_older_connection_that_does_not_read_holds_nobody_up(served: Served, worker: ScriptedWorker) -> None:
    worker.reply = [(50, "x" * 2000)] * 400
    body = {"prompt": "x", "max_tokens": 400}
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]), limit=4096)
    payload = b'{"prompt": "x", "max_tokens": 400}'
    writer.write(
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(payload), payload)
    )
    head = await reader.readuntil(b'"request_id":"')
    request = (await reader.readuntil(b'"'))[:-1].decode()
    assert b"200 OK" in head
    worker.token_s = 0.001
    rest = await asyncio.wait_for(read(served, GENERATE, body, last_event_id=f"{request}:0"), 8)
    assert len(rest) == 401
    writer.close()


# ---------------------------------------------------------------------------------------------- what is refused


NO_IDS = ["x", "x:1", *("a" * 26 + rest for rest in ("", ":", ":-1", ":1e2", ":end.x", ":1.2", ":1e", ":" + "9" * 9))]


async def test_what_is_no_id_of_ours_is_named(served: Served, worker: ScriptedWorker) -> None:
    for said in [*NO_IDS, "A" * 26 + ":1", "\u00e9"]:
        answer = await served.http.post(GENERATE, json={"prompt": "x"}, headers={"last-event-id": said.encode()})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID"), said
    assert not worker.requests


async def test_a_position_past_the_end_is_named(served: Served, worker: ScriptedWorker) -> None:
    whole = await read(served, GENERATE, {"prompt": "x"})
    request = whole[0].id.partition(":")[0]
    for headers in ({"last-event-id": f"{request}:5"}, {"last-event-id": f"{request}:end.1"}):
        answer = await served.http.post(GENERATE, json={"prompt": "x"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
    unknown = {"last-event-id": "a" * 26 + ":9"}
    answer = await served.http.post(GENERATE, json={"prompt": "x"}, headers=unknown)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_only_streams_are_resumed(served: Served) -> None:
    body = {"model": "demo", "prompt": "x"}
    answer = await served.http.post(COMPLETION, json=body, headers={"last-event-id": "a" * 26 + ":1"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_the_openai_package_comes_back(served: Served, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.005
    body: dict[str, Any] = {"model": "demo", "messages": MESSAGE, "stream": True, "max_tokens": 60}
    before = await read(served, CHAT, body, events=12)
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(**body, extra_headers={"Last-Event-ID": before[-1].id})
        after = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert texts(before)[0] + after == "".join(text for _, text in LONG)


# ---------------------------------------------------------------------------------------------- another prompt


async def test_an_ingress_that_reads_a_chat_otherwise_does_not_go_on_with_it(
    serving: Serve, worker: ScriptedWorker
) -> None:
    """Only one of them has seen the first turn, whose tokens are not those that its text would be given again."""
    one, two = await serving(), await serving()
    first = await one.http.post(CHAT, json={"model": "demo", "messages": MESSAGE})
    assert first.json()["choices"][0]["message"]["content"] == "Hello!"
    worker.reply, worker.token_s = LONG, 0.005
    more = [*MESSAGE, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And then?"}]
    body: dict[str, Any] = {"model": "demo", "messages": more, "stream": True, "max_tokens": 60}
    before = await read(one, CHAT, body, events=9)
    for _ in range(2):
        answer = await two.http.post(CHAT, json=body, headers={"last-event-id": before[-1].id})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (409, "prompt_changed", "Last-Event-ID")
    assert len(worker.requests) == 2, "nothing was begun there"
    after = await read(one, CHAT, body, last_event_id=before[-1].id)
    assert texts(before + after) == {0: "".join(text for _, text in LONG)}
    anew = await read(two, CHAT, body)
    assert texts(anew) == texts(before + after)
    assert worker.requests[-1][1].prompt_ids != worker.requests[-2][1].prompt_ids
    assert before[0].id.partition(":")[0].partition(".")[2] != anew[0].id.partition(":")[0].partition(".")[2]


@pytest.mark.parametrize("header", ["Last-Event-ID", "Idempotency-Key"])
async def test_a_worker_that_knows_another_request_of_the_id(
    served: Served, worker: ScriptedWorker, header: str
) -> None:
    worker.failure = ("invalid_request", "request: another request of this id runs here, or did a moment ago", False)
    worker.failed_field = "request"
    named = {header: "a" * 26 + ":3" if header == "Last-Event-ID" else "k"}
    answer = await served.http.post(GENERATE, json={"prompt": "x"}, headers=named)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (409, "prompt_changed", header)
    assert (await served.http.post(GENERATE, json={"prompt": "x"})).status_code == 400, "of no header"
