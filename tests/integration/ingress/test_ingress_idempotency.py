"""Idempotency-Key: a request that is sent again is run once, and every time answered as the first time."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from cut_streams import read, steps, texts
from ingress_rig import Serve, Served, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.runs.repeats import request_of_key
from kvfleet.ingress.settings import RunLimits
from tests.support import sse

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
MESSAGE = [{"role": "user", "content": "Speak."}]
KEY = {"idempotency-key": "order-1"}
LONG = [(50 + n, f" word{n}") for n in range(60)]


async def test_a_finished_stream_is_replayed(served: Served, worker: ScriptedWorker) -> None:
    body = {"prompt": "x", "seq_id": "s"}
    answers = [await served.http.post(GENERATE, json=body, headers=KEY) for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1, "byte for byte"
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert len(worker.requests) == 1
    assert worker.requests[0][1].request == request_of_key("public", "order-1")
    assert (await served.http.get("/sessions/s")).json()["turns"] == 1
    assert (await served.http.post(GENERATE, json=body)).status_code == 200
    assert (await served.http.get("/sessions/s")).json()["turns"] == 2, "without the key it is another turn"


async def test_a_whole_answer_is_replayed(served: Served, worker: ScriptedWorker) -> None:
    body = {"model": "demo", "messages": MESSAGE, "logprobs": True}
    one, two = [await served.http.post(CHAT, json=body, headers=KEY) for _ in range(2)]
    reordered = dict(reversed(body.items()))
    three = await served.http.post(CHAT, json=reordered, headers={"idempotency-key": '"order-1"'})
    assert one.status_code == 200
    assert one.content == two.content == three.content
    assert one.json()["usage"]["completion_tokens"] == 4
    assert len(worker.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_running_request_is_joined(served: Served, worker: ScriptedWorker, stream: bool) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    body = {"model": "demo", "messages": MESSAGE, "stream": stream, "max_tokens": 60}
    first = asyncio.create_task(served.http.post(CHAT, json=body, headers=KEY))
    await until(lambda: worker.generated > 5)
    others = [await asyncio.gather(first, *(served.http.post(CHAT, json=body, headers=KEY) for _ in range(3)))]
    assert len({answer.content for answer in others[0]}) == 1
    assert "word59" in others[0][0].text
    assert len(worker.requests) == 1
    assert served.ingress.runs.attached_total == 3


async def test_one_sent_twice_at_once_is_one(served: Served, worker: ScriptedWorker) -> None:
    body = {"prompt": "x", "seq_id": "s"}
    answers = await asyncio.gather(*(served.http.post(GENERATE, json=body, headers=KEY) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert len(worker.requests) == 1
    assert (await served.http.get("/sessions/s")).json()["turns"] == 1


async def test_the_running_turn_outlives_the_client_that_began_it(served: Served, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    body = {"prompt": "x", "seq_id": "s", "max_tokens": 60}
    async with served.http.stream("POST", GENERATE, json=body, headers=KEY) as first:
        async for line in sse.alines(first):
            if "token_id" in line:
                break
        second = asyncio.create_task(read(served, GENERATE, body, idempotency_key="order-1"))
        await until(lambda: served.ingress.runs.attached_total)
    whole = await second
    assert texts(whole) == {0: "".join(text for _, text in LONG)}
    assert not worker.cancels
    assert len(worker.requests) == 1
    assert (await served.http.get("/sessions/s")).json()["turns"] == 1


async def test_a_cut_whole_answer_goes_on(served: Served, worker: ScriptedWorker) -> None:
    worker.reply, worker.token_s = LONG, 0.01
    body = {"model": "demo", "prompt": "x", "max_tokens": 60}
    asking = asyncio.create_task(served.http.post(COMPLETION, json=body, headers=KEY))
    await until(lambda: worker.generated > 5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: not served.ingress.admission.running)
    await until(lambda: worker.cancels)
    answer = (await served.http.post(COMPLETION, json=body, headers=KEY)).json()
    assert answer["choices"][0]["text"] == "".join(text for _, text in LONG)
    assert len(worker.requests[1][1].output_ids) > 4
    assert served.ingress.runs.resumed_total == 1


async def test_another_request_with_the_same_key_is_refused(served: Served, worker: ScriptedWorker) -> None:
    body = {"model": "demo", "prompt": "x"}
    assert (await served.http.post(COMPLETION, json=body, headers=KEY)).status_code == 200
    for path, other in ((COMPLETION, {**body, "max_tokens": 3}), (GENERATE, {"prompt": "x"})):
        answer = await served.http.post(path, json=other, headers=KEY)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (422, "request_mismatch", "Idempotency-Key")
    whole = await read(served, COMPLETION, {**body, "stream": True})
    answer = await served.http.post(
        COMPLETION, json={**body, "stream": True, "seed": 5}, headers={"last-event-id": whole[0].id}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "Last-Event-ID")
    assert len(worker.requests) == 2


async def test_what_is_no_key_is_named(served: Served, worker: ScriptedWorker) -> None:
    for key in (b"", b"x" * 256, b"\xe4", b'""'):
        answer = await served.http.post(GENERATE, json={"prompt": "x"}, headers={"idempotency-key": key})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert not worker.requests


KEYS = f"""
[[keys]]
sha256 = "{hash_key("a")}"
tenant = "alice"
[[keys]]
sha256 = "{hash_key("b")}"
tenant = "bob"
"""


async def test_another_tenants_requests_are_not_known(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    worker.reply, worker.token_s = LONG, 0.005
    body = {"prompt": "x", "max_tokens": 60}
    before = await read(served, GENERATE, body, events=9, x_api_key="a", idempotency_key="order-1")
    worker.token_s = 0.0
    theirs = await read(served, GENERATE, body, x_api_key="b", idempotency_key="order-1")
    assert theirs[0].id != before[0].id
    for state in ("parked", "finished"):
        # who knows another's event id gets nothing of it, and no other stream's middle either
        for prompt, said in (("x", before[-1].id), ("y", f"{before[-1].id[:26]}:99")):
            other = await served.http.post(
                GENERATE, json={**body, "prompt": prompt}, headers={"x-api-key": "b", "last-event-id": said}
            )
            assert (other.status_code, other.json()["error"]["param"]) == (400, "Last-Event-ID"), "not of the body"
        started = f"{before[-1].id[:26]}:start"
        guessed = await read(served, GENERATE, body, x_api_key="b", last_event_id=started)
        assert guessed[0].id[:26] not in (before[0].id[:26], theirs[0].id[:26]), state
        if state == "parked":
            after = await read(served, GENERATE, body, x_api_key="a", last_event_id=before[-1].id)
    assert texts(before + after) == texts(theirs)
    tenants = [tenant for tenant, _ in worker.requests]
    assert tenants == ["alice", "bob", "bob", "alice", "bob"]


async def test_at_another_ingress_it_is_the_same_request_and_one_turn(serving: Serve, worker: ScriptedWorker) -> None:
    one, two = await serving(), await serving()
    body = {"prompt": "x", "seq_id": "s"}
    first = await read(one, GENERATE, body, idempotency_key="order-1")
    second = await read(two, GENERATE, body, idempotency_key="order-1")
    assert steps(first) == steps(second)
    assert [event.id for event in first] == [event.id for event in second]
    (_, here), (_, there) = worker.requests
    assert (here.request, here.prompt_ids) == (there.request, there.prompt_ids), "its history is as it was then"
    assert (await two.http.get("/sessions/s")).json()["turns"] == 1
    unnamed = {"prompt": "y"}
    starts = [(await read(served, GENERATE, unnamed, idempotency_key="k"))[0].data for served in (one, two)]
    assert starts[0]["seq_id"] == starts[1]["seq_id"]
    assert (await two.http.get(f"/sessions/{starts[0]['seq_id']}")).json()["turns"] == 1


async def test_a_running_turn_is_joined_at_another_ingress(serving: Serve, worker: ScriptedWorker) -> None:
    one, two = await serving(), await serving()
    worker.reply, worker.token_s = LONG, 0.01
    body = {"prompt": "x", "seq_id": "s", "max_tokens": 60}
    first = asyncio.create_task(read(one, GENERATE, body, idempotency_key="order-1"))
    await until(lambda: worker.generated > 5)
    second = await read(two, GENERATE, body, idempotency_key="order-1")
    assert steps(await first) == steps(second)
    assert (await two.http.get("/sessions/s")).json()["turns"] == 1
    assert one.ingress.sessions.running == two.ingress.sessions.running == 0


async def test_what_failed_may_be_tried_again(served: Served, worker: ScriptedWorker) -> None:
    """A key keeps results, not refusals; what can help another time goes on where it stopped."""
    bad = {"model": "nobody", "prompt": "x"}
    assert (await served.http.post(COMPLETION, json=bad, headers=KEY)).status_code == 404
    body: dict[str, Any] = {"model": "demo", "prompt": "x"}
    assert (await served.http.post(COMPLETION, json=body, headers=KEY)).status_code == 200
    worker.failure, worker.fails_after = ("invalid_request", "no", False), 2
    other = {"idempotency-key": "other"}
    assert (await served.http.post(COMPLETION, json=body, headers=other)).status_code == 400
    worker.failure = None
    assert (await served.http.post(COMPLETION, json=body, headers=other)).json()["choices"][0]["text"] == "Hello!"
    served.ingress.runs.check_integrity()


async def test_results_with_a_key_are_kept_longer(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(runs=RunLimits(grace_s=0.01, replay_s=60))
    body = {"model": "demo", "prompt": "x"}
    await served.http.post(COMPLETION, json=body, headers=KEY)
    await served.http.post(COMPLETION, json=body)
    await asyncio.sleep(0.05)
    await served.http.post(COMPLETION, json=body, headers=KEY)
    assert len(worker.requests) == 2
    assert served.ingress.runs.kept == 1


async def test_the_openai_package_sends_a_key(served: Served, worker: ScriptedWorker) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "x"}], extra_headers={"Idempotency-Key": "k"}
            )
            assert answer.choices[0].message.content == "Hello!"
        with pytest.raises(openai.UnprocessableEntityError):
            await client.completions.create(model="demo", prompt="x", extra_headers={"Idempotency-Key": "k"})
    assert len(worker.requests) == 1


async def test_a_keys_request_is_named_with_the_fleets_secret(serving: Serve, worker: ScriptedWorker) -> None:
    """At every ingress alike; without a fleet key tenants are kept apart all the same."""
    body = {"prompt": "x"}
    for fleet_key in (b"secret", b""):
        for served in (await serving(keys=KEYS, fleet_key=fleet_key), await serving(keys=KEYS, fleet_key=fleet_key)):
            await read(served, GENERATE, body, x_api_key="a", idempotency_key="order-1")
    one, two, three, four = (request.request for _, request in worker.requests)
    assert one == two
    assert len({request_of_key("alice", "order-1"), two, three, four}) == 4
