"""A tool's call of a real fleet, whose worker is killed while the model writes the arguments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import jsonschema
import pytest

from kvproto.chats import FIELDS, chat_of
from kvproto.client import Client, Generation
from kvproto.messages import Finished, Sampling, Tokens
from tests.e2e.test_http import two_ready
from tests.support import sse
from tests.support.up import Up
from tests.support.waiting import LIMIT_S

PARAMETERS = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 40,
            "maxItems": 40,
            "items": {"type": "string", "pattern": "^[a-z]{5,9}$"},
        }
    },
    "required": ["items"],
    "additionalProperties": False,
}
ASKED: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Take a note."}], "seed": 7, "temperature": 0.9,
    "max_tokens": 900, "stream": True, "tool_choice": "required", "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}],
}  # fmt: skip
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": PARAMETERS}}}
KILLED_AT = 150  # characters


def asked_of(up: Up, body: dict[str, Any], *, kills: bool) -> tuple[str, str]:
    """What was said, arguments or text, and why it ended."""
    said, reason, killed = "", "", False
    with httpx.stream("POST", f"{up.base}/v1/chat/completions", json=body, timeout=LIMIT_S, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        worker = answer.headers["x-kvfleet-worker"]
        for line in sse.lines(answer):
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            delta = choice["delta"]
            said += delta.get("content") or ""
            said += "".join(call["function"].get("arguments", "") for call in delta.get("tool_calls", ()))
            reason = choice["finish_reason"] or reason
            if kills and not killed and len(said) > KILLED_AT:
                killed = True
                workers = httpx.get(f"{up.base}/workers", trust_env=False).json()
                os.kill(workers[worker]["pid"], signal.SIGKILL)
    assert killed == kills
    return said, reason


async def asked_over_nats(up: Up, *, kills: bool) -> str:
    """The arguments, of a Client that has no tokenizer and no template."""
    chat = chat_of(**{name: ASKED[name] for name in FIELDS if name in ASKED})
    sampling = Sampling(ASKED["max_tokens"], ASKED["temperature"], seed=ASKED["seed"])
    said, killed = "", ""
    async with await Client.open(up.nats_url) as client:
        stream = client.generate(Generation("demo", sampling, chat=chat))
        async for event in stream:
            if isinstance(event, Tokens):
                said += "".join(part.arguments for delta in event.deltas for part in delta.tool_calls)
                if kills and not killed and len(said) > KILLED_AT:
                    killed = str(stream.worker)
                    os.kill(client.members.view.workers[killed].record.pid, signal.SIGKILL)
    assert isinstance(event, Finished)
    assert bool(killed) == kills
    assert event.worker != killed
    assert event.message is not None
    assert event.message.finish_reason == "tool_calls"
    assert [call.arguments for call in event.message.tool_calls] == [said]
    return said


async def test_the_same_bytes_come_over_nats_alone(up: Up) -> None:
    whole, _ = await asyncio.to_thread(asked_of, up, {**ASKED, "top_p": 1, "top_k": 0}, kills=False)
    assert await asked_over_nats(up, kills=False) == whole
    with httpx.Client(base_url=up.base, trust_env=False) as http:
        await asyncio.to_thread(two_ready, http)
        assert await asked_over_nats(up, kills=True) == whole
        await asyncio.to_thread(two_ready, http)  # for the next


@pytest.mark.parametrize("kind", ["tool", "schema"])
def test_the_same_bytes_come_whoever_writes_them(up: Up, kind: str) -> None:
    body = ASKED
    if kind == "schema":
        body = {key: value for key, value in ASKED.items() if "tool" not in key} | SCHEMA
    whole = asked_of(up, body, kills=False)
    jsonschema.validate(json.loads(whole[0]), PARAMETERS)
    assert whole[1] == ("tool_calls" if kind == "tool" else "stop")
    with httpx.Client(base_url=up.base, trust_env=False) as http:
        two_ready(http)
        assert asked_of(up, body, kills=True) == whole
        two_ready(http)  # for the next
