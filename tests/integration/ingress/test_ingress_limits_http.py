"""Limits of keys and tenants over HTTP: what is charged, to whom, how often, and what an answer says of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from cut_streams import read
from ingress_rig import Serve, Served, until
from scripted_worker import ScriptedWorker

from kvfleet.ingress.auth.api_keys import hash_key, parse_keys
from kvfleet.ingress.settings import RunLimits

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
PROMPT = [5] * 40
BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}


def keys_of(*, tenants: dict[str, Any] | None = None, **limits: dict[str, Any]) -> str:
    """A key by name and secret alike, all of one tenant."""
    entries = [{"name": name, "sha256": hash_key(name), "tenant": "t", **said} for name, said in limits.items()]
    return json.dumps({"keys": entries, "tenants": tenants or {}})


def tokens_left(headers: Any) -> int:
    return int(headers["x-ratelimit-remaining-tokens"])


async def ask(served: Served, key: str, body: dict[str, Any] = BODY, **headers: str) -> Any:
    return await served.http.post(COMPLETION, json=body, headers={"x-api-key": key, **headers})


async def test_prompt_and_generated_tokens_are_charged(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 100, "requests_per_minute": 600}, b={}))
    first = await ask(served, "a")
    assert first.status_code == 200
    assert tokens_left(first.headers) == 100 - 40 - 4, "a whole answer has its tokens behind it"
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert first.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert first.headers["x-ratelimit-limit-requests"] == "600"
    assert first.headers["x-ratelimit-remaining-requests"] == "99"
    second = await ask(served, "a")
    assert second.status_code == 200
    third = await ask(served, "a")
    error = third.json()["error"]
    assert (third.status_code, error["code"]) == (429, "limit_exceeded")
    assert "100 tokens per minute with this API key" in error["message"]
    assert 10 <= int(third.headers["retry-after"]) <= 17  # 28 tokens at 100 a minute
    assert int(third.headers["x-ratelimit-remaining-tokens"]) < 40
    assert len(worker.requests) == 2, "nothing of it reached a worker"
    unlimited = await ask(served, "b")
    assert unlimited.status_code == 200
    assert not [name for name in unlimited.headers if name.startswith("x-ratelimit")]
    served.ingress.admission.check_integrity()


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE])
async def test_what_is_more_than_a_limit_as_a_whole(serving: Serve, worker: ScriptedWorker, path: str) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 30}))
    words = "word " * 60
    body = {
        CHAT: {"model": "demo", "messages": [{"role": "user", "content": words}], "stream": True},
        COMPLETION: {"model": "demo", "prompt": words},
        GENERATE: {"prompt": words, "seq_id": "s"},
    }[path]
    refused = await served.http.post(path, json=body, headers={"x-api-key": "a"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (413, "payload_too_large", "prompt")
    assert "tokens_per_minute of this API key is 30" in error["message"]
    assert "retry-after" not in refused.headers
    assert not worker.requests
    assert served.ingress.admission.running == 0
    assert served.ingress.sessions.running == 0, "its turn is free"
    served.ingress.runs.check_integrity()


async def test_the_longest_answer(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"max_tokens": 2}, tenants={"t": {"max_tokens": 3}}, b={}))
    for name in ("max_tokens", "max_completion_tokens"):
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], name: 3}
        refused = await served.http.post(CHAT, json=body, headers={"x-api-key": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        assert (await served.http.post(CHAT, json=body, headers={"x-api-key": "b"})).status_code == 200
    unsaid = {"model": "demo", "prompt": "x"}
    for key, most in (("a", 2), ("b", 3)):
        answer = await ask(served, key, unsaid)
        assert answer.json()["usage"]["completion_tokens"] == most
    assert {request.sampling.max_tokens for _, request in worker.requests} == {2, 3}


async def test_limits_of_a_tenant_are_of_all_its_keys(serving: Serve, worker: ScriptedWorker) -> None:
    tenants = {"t": {"max_concurrent": 1, "tokens_per_minute": 100}}
    served = await serving(keys=keys_of(tenants=tenants, a={}, b={"tokens_per_minute": 1000}))
    worker.held.clear()
    first = asyncio.create_task(ask(served, "a"))
    await until(lambda: worker.requests)
    busy = await ask(served, "b")
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert "1 requests at once with tenant t" in busy.json()["error"]["message"]
    worker.held.set()
    assert (await first).status_code == 200
    second = await ask(served, "b")
    assert (second.status_code, second.headers["x-ratelimit-limit-tokens"]) == (200, "100")
    assert (await ask(served, "a")).status_code == 429


async def test_repeats_are_not_charged_again(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 10_000, "requests_per_minute": 30}))
    admission = served.ingress.admission
    for _ in range(9):  # the burst is 5
        answer = await ask(served, "a", **{"idempotency-key": "order-1"})
        assert answer.status_code == 200
    assert tokens_left(answer.headers) >= 10_000 - 44
    assert answer.headers["x-ratelimit-remaining-requests"] == "4"
    assert len(worker.requests) == 1

    worker.reply, worker.token_s = [(50 + n, f" word{n}") for n in range(60)], 0.004
    body = {**BODY, "max_tokens": 60, "stream": True}
    before = await read(served, COMPLETION, body, events=9, x_api_key="a")
    for _ in range(3):
        before += await read(served, COMPLETION, body, events=5, x_api_key="a", last_event_id=before[-1].id)
    await read(served, COMPLETION, body, x_api_key="a", last_event_id=before[-1].id)
    own, tenants = admission.limiter.every()
    assert len(worker.requests) > 2
    after = await ask(served, "a", {**BODY, "max_tokens": 1})
    assert after.headers["x-ratelimit-remaining-requests"] in ("2", "3"), "the burst, and three requests"
    assert own.day_tokens + own.generated == 44 + 100 + 41, "the first, the one that was cut three times, the last"
    assert own.day_tokens + own.generated == tenants.day_tokens + tenants.generated


async def test_a_running_stream_is_charged_once_for_all_its_readers(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 10_000}))
    worker.reply, worker.token_s = [(50 + n, f" word{n}") for n in range(40)], 0.005
    body = {**BODY, "max_tokens": 40}
    answers = await asyncio.gather(*(ask(served, "a", body, **{"idempotency-key": "k"}) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    own, _ = served.ingress.admission.limiter.every()
    assert own.day_tokens + own.generated == 80
    assert len(worker.requests) == 1


async def test_counters_outlive_a_reload(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 50, "max_concurrent": 1}))
    assert (await ask(served, "a")).status_code == 200
    served.ingress.tenancy.use(parse_keys(keys_of(a={"tokens_per_minute": 50, "max_concurrent": 2})))
    assert (await ask(served, "a")).status_code == 429


async def test_openais_client_reads_them(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"tokens_per_minute": 60}))
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="a", max_retries=0) as client:
        raw = await client.completions.with_raw_response.create(model="demo", prompt=PROMPT, max_tokens=4)
        assert raw.headers["x-ratelimit-remaining-tokens"] == "16"
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="demo", prompt=PROMPT)
        assert int(caught.value.response.headers["retry-after"]) >= 20


async def test_each_choice_counts_and_no_more_than_may_run(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=keys_of(a={"max_concurrent": 4}))
    worker.held.clear()
    first = asyncio.create_task(ask(served, "a", {**BODY, "n": 3}))
    await until(lambda: worker.requests)
    assert served.ingress.admission.choices == 3
    busy = await ask(served, "a", {**BODY, "n": 2})
    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "limit_exceeded")
    never = await ask(served, "a", {**BODY, "n": 5})
    assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
    worker.held.set()
    assert (await first).status_code == 200
    assert served.ingress.admission.limiter.running == 0
    served.ingress.admission.check_integrity()


async def test_memory_of_running_answers(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(runs=RunLimits(running_bytes=400_000))
    memory = served.ingress.runs.memory
    body = {**BODY, "max_tokens": 200}
    refused = await ask(served, "", {**body, "n": 8, "logprobs": 5})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (413, "max_tokens")
    assert "n * max_tokens is 1600 tokens" in error["message"]
    worker.held.clear()
    running = asyncio.create_task(ask(served, "", body))
    await until(lambda: worker.requests)
    memory.used += 400_000  # as if others held it
    full = await ask(served, "", body)
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    memory.used -= 400_000
    worker.held.set()
    assert (await running).status_code == 200
    await until(lambda: not memory.used)
    served.ingress.runs.check_integrity()
