"""The OpenAI routes, over HTTP and with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from ingress_rig import Served
from scripted_worker import DEMO, ScriptedWorker
from tokenizers import Tokenizer

from tests.support import sse

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
    assert usage.completion_tokens == 4
    assert usage.total_tokens == usage.prompt_tokens + 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    (_, request), *_ = worker.requests
    assert request.sampling.temperature == 0.8  # the model's default
    assert request.session is not None  # so that the next turn goes to the same worker


async def test_a_whole_chat_answer(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, max_completion_tokens=2, temperature=0, seed=7)
    assert answer.choices[0].message.content == "Hel"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    sampling = worker.requests[0][1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 0.0, 7)


async def test_completions_with_text_and_with_ids(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        whole = await client.completions.create(model="demo", prompt="Once", max_tokens=5, stop=["x"])
        stream = await client.completions.create(model="demo", prompt=[5, 6, 7], stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert whole.choices[0].text == streamed == "Hello!"
    assert worker.requests[0][1].prompt_ids[0] == 0  # BOS, once
    assert worker.requests[0][1].sampling.stop == ("x",)
    assert worker.requests[1][1].prompt_ids == (5, 6, 7)
    assert worker.requests[1][1].sampling.max_tokens == 16


async def test_the_list_of_models(served: Served) -> None:
    async with client_of(served) as client:
        models = await client.models.list()
    assert [model.id for model in models.data] == ["demo"]


async def test_every_answer_names_its_request(served: Served) -> None:
    answer = await served.http.post("/v1/chat/completions", json=CHAT)
    assert answer.headers["x-kvfleet-worker"] == "w1"
    assert answer.json()["kvfleet"]["request_id"] == answer.headers["x-request-id"]
    refused = await served.http.post("/v1/chat/completions", content=b"{")
    assert len(refused.headers["x-request-id"]) == 26


async def test_the_second_turn_of_a_chat_finds_its_history_cached(served: Served, worker: ScriptedWorker) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    spelled = [(tokenizer.token_to_id(letter), letter) for letter in "Hello"]  # as no tokenizer would write it
    assert [token for token, _ in spelled] != tokenizer.encode("Hello", add_special_tokens=False).ids
    worker.reply = spelled
    messages: list[dict[str, str]] = [{"role": "user", "content": "Speak to me of love."}]
    for turn in range(3):
        answer = (await served.http.post("/v1/chat/completions", json={"model": "demo", "messages": messages})).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        before = worker.sequences[turn - 1] if turn else ()
        assert cached == len(before)  # the whole earlier turn, the generated ids included
        assert worker.requests[turn][1].prompt_ids[: len(before)] == before
        messages += [
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
            {"role": "user", "content": "And then?"},
        ]
    assert len({request.session for _, request in worker.requests}) == 1  # one conversation on the ring
    text = tokenizer.decode(list(worker.requests[2][1].prompt_ids), skip_special_tokens=False)
    assert text == (
        "<|bos|><|user|>Speak to me of love.<|end|><|assistant|>Hello<|end|><|user|>And then?<|end|>"
        "<|assistant|>Hello<|end|><|user|>And then?<|end|><|assistant|>"
    )


async def test_a_chat_with_a_seq_id_is_durable_and_forks(served: Served, worker: ScriptedWorker) -> None:
    first = {**CHAT, "seq_id": "talk"}
    await served.http.post("/v1/chat/completions", json=first)
    assert (await served.http.get("/sessions/talk")).json()["tokens"] == len(worker.sequences[0])
    served.ingress.splices._turns.clear()  # as another ingress would: nothing in memory
    served.ingress.splices._tails.clear()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "More."}]
    answer = await served.http.post("/v1/chat/completions", json={**first, "messages": messages})
    assert worker.requests[1][1].prompt_ids[: len(worker.sequences[0])] == worker.sequences[0]
    assert answer.status_code == 200
    other = [{"role": "user", "content": "Something else entirely."}]
    answer = await served.http.post("/v1/chat/completions", json={**first, "messages": other})
    assert answer.status_code == 200
    assert (await served.http.get("/sessions/talk")).json()["tokens"] == len(worker.sequences[2])


async def test_an_error_before_the_first_token_is_a_status(served: Served, worker: ScriptedWorker) -> None:
    worker.failure = ("invalid_request", "cannot do that", False)
    for stream in (False, True):
        answer = await served.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_request"


async def test_an_error_after_the_first_token_is_the_last_event(served: Served, worker: ScriptedWorker) -> None:
    worker.failure, worker.fails_after = ("invalid_request", "cannot go on", False), 3
    async with client_of(served) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        pieces = []
        with pytest.raises(openai.APIError, match="cannot go on"):
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
    assert "".join(pieces) == "Hello"


async def test_comments_keep_a_queued_stream_alive(served: Served, worker: ScriptedWorker) -> None:
    worker.held.clear()
    lines: list[str] = []
    async with served.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        async for line in sse.alines(answer):
            lines.append(line)
            if lines.count(": queued") + lines.count(": waiting") == 2:
                worker.held.set()
    assert lines[0] == ": queued"
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    values: list[dict[str, Any]] = [json.loads(one) for one in data[:-1]]
    assert "".join(v["choices"][0]["delta"].get("content", "") for v in values) == "Hello!"
