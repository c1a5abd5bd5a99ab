"""Choices, log probabilities, biases, penalties and overflow policies over HTTP, and with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import openai
import pytest
from ingress_rig import Served
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_worker import CONTEXT, DEMO, HELLO_IDS, ScriptedWorker
from tokenizers import Tokenizer

from kvproto.messages import Grammar, GrammarForm, Overflow
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Speak."}]}
SPOKEN = ["Hello!", "llo!", "lo!"]  # each choice begins one token later


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def spelled(token: int) -> str:
    text: str = Tokenizer.from_file(str(DEMO / "tokenizer.json")).decode([token], skip_special_tokens=False)
    return text


# ---------------------------------------------------------------------------------------------- OpenAI's client


async def test_three_choices_of_a_chat_with_logprobs(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, n=3, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(answer.to_dict())  # the client itself is lenient
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == SPOKEN
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 + 3 + 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    for at, choice in enumerate(answer.choices):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [one.token for one in choice.logprobs.content] == [spelled(token) for token in HELLO_IDS[at:]]
        assert [one.logprob for one in choice.logprobs.content] == [-0.5 * (i + 1) for i in range(4 - at)]
        for one in choice.logprobs.content:
            assert bytes(one.bytes or ()).decode() == one.token
            assert [(top.token, top.logprob) for top in one.top_logprobs] == [(spelled(t), -9999.0) for t in (6, 7)]
    sampling = worker.requests[0][1].sampling
    assert (sampling.n, sampling.logprobs) == (3, 2)


async def test_three_choices_of_a_chat_stream_with_logprobs(served: Served) -> None:
    texts, scores, ends = ["", "", ""], [[], [], []], [None, None, None]  # type: ignore[var-annotated]
    async with client_of(served) as client:
        stream = await client.chat.completions.create(
            **CHAT, n=3, logprobs=True, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict())
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        assert ends[choice.index] is None
        texts[choice.index] += choice.delta.content or ""
        if choice.logprobs is not None:
            scores[choice.index] += [
                (one.token, one.logprob, one.top_logprobs) for one in choice.logprobs.content or ()
            ]
        ends[choice.index] = choice.finish_reason
    assert texts == SPOKEN
    assert ends == ["stop"] * 3
    for at in range(3):
        assert scores[at] == [(spelled(t), -0.5 * (i + 1), []) for i, t in enumerate(HELLO_IDS[at:])]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_three_choices_of_a_completion_with_logprobs(served: Served, stream: bool) -> None:
    async with client_of(served) as client:
        asked: Any = {"model": "demo", "prompt": "Once", "n": 3, "best_of": 3, "logprobs": 1, "max_tokens": 3}
        answers = [await client.completions.create(**asked)]
        if stream:
            answers = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    for answer in answers:
        if not stream:  # OpenAI's type of a chunk demands a reason to end
            Completion.model_validate(answer.to_dict())
    choices = [choice for answer in answers for choice in answer.choices]
    for at, (text, ended) in enumerate([("Hello", "length"), ("llo!", "stop"), ("lo!", "stop")]):
        mine = [choice for choice in choices if choice.index == at]
        assert "".join(choice.text for choice in mine) == text
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == [ended]
        scored = [choice.logprobs for choice in mine if choice.logprobs is not None]
        tokens = [token for one in scored for token in one.tokens or ()]
        assert tokens == [spelled(token) for token in HELLO_IDS[at : at + 3]]
        assert [v for one in scored for v in one.token_logprobs or ()] == [-0.5 * (i + 1) for i in range(len(tokens))]
        offsets = [offset for one in scored for offset in one.text_offset or ()]
        assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
        tops = [top for one in scored for top in one.top_logprobs or ()]
        assert tops == [{"!": -9999.0} | {t: -0.5 * (i + 1)} for i, t in enumerate(tokens)]


async def test_without_logprobs_there_are_none(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, n=2)
        assert [choice.logprobs for choice in answer.choices] == [None, None]
        stream = await client.chat.completions.create(**CHAT, stream=True)
        assert all(c.logprobs is None for chunk in [chunk async for chunk in stream] for c in chunk.choices)


async def test_what_is_asked_of_sampling_reaches_the_worker(served: Served, worker: ScriptedWorker) -> None:
    asked: Any = {
        "presence_penalty": 1.5, "frequency_penalty": -0.5, "logit_bias": {"7": -100},
        "extra_body": {"repetition_penalty": 1.2, "min_p": 0.1, "min_tokens": 3, "context_overflow": "truncate_left"},
    }  # fmt: skip
    async with client_of(served) as client:
        await client.chat.completions.create(**CHAT, **asked)
        await client.completions.create(model="demo", prompt="Once", **asked)
    extra = {key: value for key, value in asked.items() if key != "extra_body"} | asked["extra_body"]
    assert (await served.http.post("/generate", json={"prompt": "Once", **extra})).status_code == 200
    for _, request in worker.requests:
        sampling = request.sampling
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -0.5, 1.2)
        assert (sampling.logit_bias, sampling.min_p, sampling.min_tokens) == ({7: -100.0}, 0.1, 3)
        assert sampling.overflow is Overflow.TRUNCATE_LEFT
    assert len(worker.requests) == 3


# ---------------------------------------------------------------------------------------------- conversations


async def test_a_chat_goes_on_with_its_first_choice(served: Served, worker: ScriptedWorker) -> None:
    body = {**CHAT, "n": 3, "seq_id": "talk"}
    first = (await served.http.post("/v1/chat/completions", json=body)).json()
    assert (await served.http.get("/sessions/talk")).json()["tokens"] == len(worker.sequences[0])
    messages = [*CHAT["messages"], first["choices"][0]["message"], {"role": "user", "content": "More."}]
    messages[1] = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    answer = (await served.http.post("/v1/chat/completions", json={**CHAT, "messages": messages})).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(worker.sequences[0])


async def test_a_turn_of_a_session_with_logprobs(served: Served) -> None:
    answer = await served.http.post("/generate", json={"prompt": "Once", "logprobs": 1})
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
    top = [{"token": spelled(6), "token_id": 6, "logprob": -9999.0}]
    assert events[1] == {"type": "token", "token": "He", "token_id": 550, "logprob": -0.5, "top_logprobs": top}
    assert events[-1]["generated_text"] == "OnceHello!"


# ---------------------------------------------------------------------------------------------- overflow

LONG = "word " * CONTEXT


@pytest.mark.parametrize(
    ("policy", "max_tokens", "becomes"),
    [("truncate_left", CONTEXT - 1, CONTEXT - 1), ("truncate_left", None, 16), ("sliding", 10**6, 10**6)],
)
async def test_a_prompt_beyond_the_context_goes_to_the_worker_whole(
    served: Served, worker: ScriptedWorker, policy: str, max_tokens: int | None, becomes: int
) -> None:
    for text in (LONG, LONG * 100):  # the second cannot fit however it is tokenised
        body = {"model": "demo", "prompt": text, "context_overflow": policy, "max_tokens": max_tokens}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        request = worker.requests[-1][1]
        assert len(request.prompt_ids) > CONTEXT
        assert (request.sampling.overflow, request.sampling.max_tokens) == (Overflow(policy), becomes)
    chat = {"model": "demo", "messages": [{"role": "user", "content": LONG}], "context_overflow": policy}
    assert (await served.http.post("/v1/chat/completions", json=chat)).status_code == 200


async def test_a_generation_is_cut_to_what_the_prompt_leaves(served: Served, worker: ScriptedWorker) -> None:
    body = {"model": "demo", "prompt": [5] * 500, "context_overflow": "truncate_generation", "max_tokens": 10**6}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    assert worker.requests[-1][1].sampling.max_tokens == CONTEXT - 500


async def test_a_session_keeps_what_a_turn_left_out(served: Served, worker: ScriptedWorker) -> None:
    body = {"prompt": "Once " * 300, "seq_id": "s", "context_overflow": "sliding"}
    for turn in (1, 2):
        assert (await served.http.post("/generate", json=body)).status_code == 200
        kept = (await served.http.get("/sessions/s")).json()
        assert (kept["tokens"], kept["turns"]) == (len(worker.requests[-1][1].prompt_ids) + 4, turn)
    assert kept["tokens"] > CONTEXT
    refused = await served.http.post("/generate", json={"prompt": "x", "seq_id": "s"})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


# ---------------------------------------------------------------------------------------------- structured output


async def test_a_schema_reaches_the_worker(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        await client.chat.completions.create(
            **CHAT, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a"]}}}
        )
    grammar = Grammar(GrammarForm.JSON_SCHEMA, '{"enum":["a"]}', "response_format.json_schema.schema")
    assert worker.requests[0][1].sampling.grammar == grammar


async def test_a_worker_that_would_ignore_a_grammar_is_not_asked(
    nats_url: str, fleet_buckets: Subjects, served: Served, worker: ScriptedWorker
) -> None:
    """As one of an older version does, which takes all else."""
    older = await ScriptedWorker.start(nats_url, fleet_buckets, "w2", grammars=False)
    chats = ({**CHAT, "messages": [{"role": "user", "content": f"Speak {number}."}]} for number in count())
    try:
        async with asyncio.timeout(LIMIT_S):
            while not older.requests:
                await served.http.post("/v1/chat/completions", json=next(chats))
        older.requests.clear()
        for _ in range(8):
            answer = await served.http.post("/v1/chat/completions", json={**next(chats), "guided_regex": "a"})
            assert answer.json()["kvfleet"]["worker_id"] == worker.id
        assert not older.requests
    finally:
        await older.stop()
