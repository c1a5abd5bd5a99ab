"""Overload at the edge: who is refused is told when to come back, and who may go first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from ingress_rig import Serve, Served
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.messages import Failed, PlaceRequest
from kvproto.subjects import Subjects

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"model": "demo", "prompt": "x"},
    "/generate": {"prompt": "x"},
}


class RefusingPlacement:
    """Speaks placement's side of the wire and refuses everything as told."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.refusal = ("limit_exceeded", "the fleet is too busy", 6.2)
        self.asked: list[PlaceRequest] = []

    async def on_ask(self, message: Message) -> None:
        asked = codec.decode(PlaceRequest, message.data)
        self.asked.append(asked)
        code, text, retry_after_s = self.refusal
        failed = Failed(asked.request, asked.attempt, code, text, retryable=False, retry_after_s=retry_after_s)
        await self.connection.publish(message.reply, codec.encode_frames([failed]))


@pytest.fixture
async def refusing(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[RefusingPlacement]:
    connection = await Connection.open(nats_url, name="placement", inbox_prefix="_plc.test")
    placement = RefusingPlacement(connection)
    await connection.subscribe(f"{fleet_buckets.namespace}.place.>", placement.on_ask)
    await connection.synced()
    yield placement
    await connection.close()


async def test_a_refusal_says_when_to_come_back(
    serving: Serve, worker: ScriptedWorker, refusing: RefusingPlacement
) -> None:
    served = await serving(max_wait_s=2.5)
    for code, status in (("limit_exceeded", 429), ("overloaded", 503), ("unavailable", 503)):
        refusing.refusal = (code, "the fleet is too busy", 6.2)
        for path, body in ROUTES.items():
            answer = await served.http.post(path, json={**body, "priority": -3})
            assert answer.status_code == status, answer.text
            assert answer.headers["retry-after"] == "7", "rounded up: it is a promise"
            assert answer.headers["x-should-retry"] == "true"
            assert answer.json()["error"]["code"] == code
    assert {(one.priority, one.max_wait_s) for one in refusing.asked} == {(-3, 2.5)}
    assert not worker.requests
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        refusing.refusal = ("limit_exceeded", "the fleet is too busy", 6.2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="demo", prompt="x")
        assert caught.value.response.headers["retry-after"] == "7"


async def test_what_cannot_help_is_not_repeated(served: Served, worker: ScriptedWorker) -> None:
    """OpenAI's clients repeat everything from 500 up unless they are told."""
    worker.failure = ("unsupported_model", "cannot do that", False)
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=3) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="demo", prompt="x")
    assert caught.value.status_code == 501
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(worker.requests) == 1


KEYS = f"""
[[keys]]
sha256 = "{hash_key("plain")}"
[[keys]]
sha256 = "{hash_key("high")}"
max_priority = 10
[[keys]]
sha256 = "{hash_key("low")}"
max_priority = -5
"""


async def test_priorities_up_to_the_keys(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    cases = [("plain", 0, True), ("plain", -100, True), ("plain", 1, False), ("high", 10, True), ("high", 11, False),
             ("low", -5, True), ("low", 0, False)]  # fmt: skip
    for key, priority, allowed in cases:
        for path, body in ROUTES.items():
            answer = await served.http.post(path, json={**body, "priority": priority}, headers={"x-api-key": key})
            assert answer.status_code == (200 if allowed else 403), (key, priority, answer.text)
            if allowed:
                assert worker.requests[-1][1].priority == priority
            else:
                assert answer.json()["error"]["param"] == "priority"
    for priority in (101, -101, 1.5, "high"):
        answer = await served.http.post(
            "/generate", json={"prompt": "x", "priority": priority}, headers={"x-api-key": "high"}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    for key, its in (("plain", 0), ("high", 0), ("low", -5)):
        unsaid = await served.http.post("/generate", json={"prompt": "x"}, headers={"x-api-key": key})
        assert unsaid.status_code == 200
        assert worker.requests[-1][1].priority == its
