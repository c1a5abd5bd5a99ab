"""The OpenAI routes, over HTTP and with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from ingress_rig import Served
from scripted_worker import ScriptedWorker

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Speak."}]}


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


async def test_a_chat_streams_to_the_openai_client(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello!"
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert chunks[-1].choices == []
    assert usage.completion_tokens == 3
    assert usage.total_tokens == usage.prompt_tokens + 3
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    (_, request), *_ = worker.requests
    assert request.sampling.temperature == 0.8  # the model's default
    assert request.sampling.stop_ids == (2, 1)
    assert request.session == request.request  # the first turn names the conversation


async def test_a_whole_chat_answer(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, max_completion_tokens=2, temperature=0, seed=7)
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    sampling = worker.requests[0][1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 0.0, 7)
