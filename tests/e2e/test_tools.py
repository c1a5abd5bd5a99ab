"""A tool's call of a real fleet, whose worker is killed while the model writes the arguments."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import jsonschema
import pytest

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
