"""What an ingress refuses, and that it is as before afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from typing import Any

import httpx
import pytest
from ingress_rig import Serve, Served, until
from scripted_worker import CONTEXT, ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key
from tests.support.waiting import LIMIT_S

MESSAGE = [{"role": "user", "content": "x"}]
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"

DEEP: list[Any] = []
for _ in range(255):  # more than orjson writes
    DEEP = [DEEP]
BAD: list[tuple[str, Any, int, str | None]] = [
    (CHAT, {"messages": MESSAGE}, 400, "model"),
    (CHAT, {"model": "demo"}, 400, "messages"),
    (CHAT, {"model": "demo", "messages": []}, 400, "messages"),
    (CHAT, {"model": "nobody", "messages": MESSAGE}, 404, "model"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "n": 129}, 400, "n"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "min_tokens": 5, "max_tokens": 4}, 400, "min_tokens"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "presence_penalty": 3}, 400, "presence_penalty"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "tools": [{}]}, 400, "tools[0].type"),
    (CHAT, {"model": "demo", "messages": [{"role": "user", "content": "word " * CONTEXT}]}, 400, "messages"),
    (COMPLETION, {"model": "demo", "prompt": ""}, 400, "prompt"),
    (COMPLETION, {"model": "demo", "prompt": "word " * CONTEXT}, 400, "prompt"),
    (COMPLETION, {"model": "demo", "prompt": "x" * 3_000_000}, 400, "prompt"),
    (COMPLETION, {"model": "demo", "prompt": [1, 2, 99_999_999]}, 400, "prompt[2]"),
    (COMPLETION, {"model": "demo", "prompt": ["a", ""]}, 400, "prompt[1]"),
    (COMPLETION, {"model": "demo", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETION, {"model": "demo", "prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETION, {"model": "demo", "prompt": "x", "logprobs": 6}, 400, "logprobs"),
    (COMPLETION, {"model": "demo", "prompt": "x", "best_of": 2}, 400, "best_of"),
    (COMPLETION, {"model": "demo", "prompt": "x", "echo": 1}, 400, "echo"),
    (COMPLETION, {"model": "demo", "prompt": "x", "context_overflow": "cut"}, 400, "context_overflow"),
    (COMPLETION, {"model": "demo", "prompt": [5] * CONTEXT, "context_overflow": "truncate_generation"}, 400, "prompt"),
    (
        COMPLETION,
        {"model": "demo", "prompt": "x", "max_tokens": CONTEXT, "context_overflow": "truncate_left"},
        400,
        "max_tokens",
    ),
    (GENERATE, {}, 400, "prompt"),
    (GENERATE, {"prompt": ""}, 400, "prompt"),
    (GENERATE, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (GENERATE, {"prompt": "x", "model_name": "nobody"}, 404, "model_name"),
    (GENERATE, {"prompt": "x", "seq_id": 5}, 400, "seq_id"),
    (GENERATE, {"prompt": "x", "n": 2}, 400, "n"),
    (GENERATE, {"prompt": "x", "logit_bias": {"1024": 1}}, 400, "logit_bias"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "metadata": DEEP}, 400, "metadata"),
    (COMPLETION, {"model": "demo", "prompt": "x", "metadata": DEEP}, 400, "metadata"),
    (GENERATE, {"prompt": "x", "metadata": DEEP}, 400, "metadata"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "max_tokens": 10**9}, 400, "max_tokens"),
    (CHAT, {"model": "demo", "messages": MESSAGE, "enable_thinking": True}, 400, "enable_thinking"),
    (GENERATE, b"{", 400, "body"),
    (GENERATE, b"[]", 400, "body"),
    (GENERATE, b'{"prompt": "\xff\xfe"}', 400, "body"),
    (GENERATE, b'{"prompt": "\\ud800"}', 400, "body"),
    (GENERATE, b"", 400, "body"),
    (GENERATE, b"[" * 100_000, 400, "body"),
    (CHAT, b"x" * 10_000_000, 413, "body"),
]


async def post(http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    return await (http.post(path, content=body) if isinstance(body, bytes) else http.post(path, json=body))


async def test_bad_input_is_named_and_leaves_nothing_behind(served: Served, worker: ScriptedWorker) -> None:
    await served.http.post(GENERATE, json={"prompt": "warm"})
    gc.collect()
    before = (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), served.client.connection.subscriptions)
    for path, body, status, field in BAD:
        answer = await post(served.http, path, body)
        what = f"{path} {str(body)[:80]}"
        assert answer.status_code == status, f"{what}: {answer.text}"
        error = answer.json()["error"]
        assert error["param"] == field, what
        assert field is None or error["message"].startswith(field), what
    assert len(worker.requests) == 1  # nothing of it reached a worker
    assert served.ingress.admission.running == 0
    assert not served.client.streams
    served.ingress.admission.check_integrity()
    after = (len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), served.client.connection.subscriptions)
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1] + 1
    assert after[2] == before[2]


async def test_a_long_prompt_is_told_its_length_and_the_limit(served: Served) -> None:
    error = (await post(served.http, COMPLETION, {"model": "demo", "prompt": [5] * CONTEXT})).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"this model's maximum context length is {CONTEXT} tokens, {CONTEXT - 1} of a prompt" in error["message"]


async def test_a_huge_max_tokens_is_told_the_limit(served: Served, worker: ScriptedWorker) -> None:
    body = {"model": "demo", "prompt": [5] * 500, "max_tokens": CONTEXT}
    error = (await post(served.http, COMPLETION, body)).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens, which leaves {CONTEXT - 500}" in error["message"]
    assert worker.requests == []


async def test_a_body_without_a_length_is_cut_off_too(serving: Serve) -> None:
    served = await serving(max_body_bytes=10_000)

    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    answer = await served.http.post(GENERATE, content=endless())
    assert answer.status_code == 413
    assert "10000" in answer.json()["error"]["message"]


async def test_a_body_that_drips_is_refused_and_its_connection_closed(serving: Serve) -> None:
    served = await serving(body_timeout_s=0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
        error = await reader.readuntil(b"}}")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b"", "closed"
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.close()
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in head
    assert b"body: must come within 0.3 s" in error
    assert b'"code":"request_timeout"' in error


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("GET", "/nowhere?key=secret", "there is no route GET /nowhere"),
        ("POST", "/chat/completions", "POST /chat/completions, but there is /v1/chat/completions: the base URL"),
        ("GET", "/models", "GET /models, but there is /v1/models: the base URL of OpenAI's clients ends with /v1"),
        ("POST", "/v1/v1/chat/completions", "no route POST /v1/v1/chat/completions: the base URL has /v1 twice"),
        ("GET", "/generate", "the route does not take GET /generate"),
    ],
)  # fmt: skip
async def test_a_route_that_there_is_not_is_named(served: Served, method: str, path: str, said: str) -> None:
    message = (await served.http.request(method, path)).json()["error"]["message"]
    assert said in message
    assert "secret" not in message


async def test_models_with_a_slash_behind(served: Served) -> None:
    assert (await served.http.get("/v1/models/")).json() == (await served.http.get("/v1/models")).json()
    assert (await served.http.get("/v1/models/demo")).json()["id"] == "demo"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "no_such_route"),
        ("DELETE", "/sessions/x/kv", 405, "method_not_allowed"),
        ("GET", "/sessions/x/y", 404, "no_such_route"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("GET", "/sessions/unknown", 404, "session_not_found"),
        ("DELETE", "/sessions/unknown", 404, "session_not_found"),
        ("GET", "/sessions/unknown/kv", 404, "session_not_found"),
    ],
)
async def test_refusals_have_one_form(served: Served, method: str, path: str, status: int, code: str) -> None:
    answer = await served.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code


KEYS = f"""
[[keys]]
name = "alice"
sha256 = "{hash_key("alice-secret")}"
tenant = "alice"
max_concurrent = 1

[[keys]]
name = "bob"
sha256 = "{hash_key("bob-secret")}"
tenant = "bob"
admin = true
requests_per_minute = 18
"""
ALICE = {"authorization": "Bearer alice-secret"}
BOB = {"x-api-key": "bob-secret"}


async def test_keys_make_tenants(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    body = {"prompt": "x", "seq_id": "mine"}
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic alice-secret"}):
        refused = await served.http.post(GENERATE, json=body, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/workers", "/stats", "/metrics", "/sessions/mine", "/kv/route/mine"):
        assert (await served.http.get(path)).status_code == 401
    for path in ("/livez", "/readyz", "/health", "/openapi.json"):
        assert (await served.http.get(path)).status_code == 200

    assert (await served.http.post(GENERATE, json=body, headers=ALICE)).status_code == 200
    assert worker.requests[0][0] == "alice"
    assert (await served.http.get("/sessions/mine", headers=ALICE)).status_code == 200
    assert (await served.http.get("/sessions/mine", headers=BOB)).status_code == 404  # an admin of another tenant
    assert (await served.http.get("/sessions/mine/kv", headers=ALICE)).status_code == 403

    assert (await served.http.post(GENERATE, json=body, headers=BOB)).status_code == 200
    assert (await served.http.get("/sessions/mine/kv", headers=BOB)).status_code == 200
    limited = await served.http.post(GENERATE, json=body, headers=BOB)
    assert limited.status_code == 429
    assert 1 <= int(limited.headers["retry-after"]) <= 10


async def test_overload_is_refused_with_a_time_to_retry(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS, max_concurrent=1)
    worker.held.clear()
    first = asyncio.create_task(served.http.post(GENERATE, json={"prompt": "x"}, headers=ALICE))
    await until(lambda: worker.requests)
    full = await served.http.post(GENERATE, json={"prompt": "x"}, headers=BOB)
    assert full.status_code == 503
    assert full.headers["retry-after"] == "1"
    served.ingress.admission.max_concurrent = 10
    own = await served.http.post(GENERATE, json={"prompt": "x"}, headers=ALICE)
    assert own.status_code == 429
    draining = asyncio.create_task(served.ingress.drain(5))
    await asyncio.sleep(0)
    assert (await served.http.get("/readyz")).status_code == 503
    refused = await served.http.post(GENERATE, json={"prompt": "x"}, headers=BOB)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    worker.held.set()
    assert (await first).status_code == 200
    assert await draining
