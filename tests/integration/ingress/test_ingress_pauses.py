"""Pauses over HTTP: what a client says, what is measured of tools, and what the worker is told when a turn ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ingress_rig import Served
from scripted_worker import ScriptedWorker

from kvservice.return_times import FEWEST, SLACK_S
from tests.support.waiting import until

TOOL = {"type": "function", "function": {"name": "build"}}
CALL = '<tool_call>\n{"name": "build", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "Go."}
SAID = {"kvfleet": {"expect_return_s": 30}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "demo", "messages": [USER]},
    "/v1/completions": {"model": "demo", "prompt": "Go."},
    "/v1/responses": {"model": "demo", "input": "Go."},
    "/v1/messages": {"model": "demo", "messages": [USER], "max_tokens": 16},
    "/generate": {"prompt": "Go."},
}


@pytest.mark.parametrize("route", BODIES)
async def test_a_client_says_when_it_comes_back(served: Served, worker: ScriptedWorker, route: str) -> None:
    answer = await served.http.post(route, json={**BODIES[route], **SAID})
    assert answer.status_code == 200, answer.text
    await until(lambda: worker.returns)
    (told,) = worker.returns
    assert told.request == worker.requests[0][1].request
    assert told.soonest_s < 30 < told.latest_s


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("said", [{"expect_return_s": -1}, {"expect_return_s": "x"}, {"expect": 1}, 5])
async def test_what_is_no_time_is_refused(served: Served, worker: ScriptedWorker, route: str, said: Any) -> None:
    answer = await served.http.post(route, json={**BODIES[route], "kvfleet": said})
    assert answer.status_code == 400
    assert "kvfleet" in answer.text
    assert not worker.requests


async def turn(served: Served, messages: list[dict[str, Any]], **headers: str) -> dict[str, Any]:
    body = {"model": "demo", "messages": messages, "tools": [TOOL], "max_tokens": 100}
    answer = await served.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()["choices"][0]["message"]
    return said


async def test_how_long_a_tool_takes_is_measured(served: Served, worker: ScriptedWorker) -> None:
    worker.reply = [(10 + at % 7, CALL[at : at + 3]) for at in range(0, len(CALL), 3)]
    messages: list[dict[str, Any]] = [USER]
    began = time.monotonic()
    for _ in range(FEWEST + 1):
        said = await turn(served, messages)
        (call,) = said["tool_calls"]
        messages = [USER, said, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
        await asyncio.sleep(0.05)
    assert (await served.http.get("/v1/pauses")).json()["tools"][0]["pauses"] == FEWEST
    await until(lambda: worker.returns)
    (told,) = worker.returns
    assert 0.05 <= told.soonest_s <= told.latest_s - SLACK_S <= time.monotonic() - began
    assert told.session.startswith("chat-")


async def test_a_turn_without_calls_expects_nobody(served: Served, worker: ScriptedWorker) -> None:
    await turn(served, [USER])
    await turn(served, [USER, {"role": "assistant", "content": "He"}, USER])
    assert (await served.http.get("/v1/pauses")).json() == {"tools": [], "returns": 0, "restoring_saved_s": 0.0}
    assert not worker.returns
