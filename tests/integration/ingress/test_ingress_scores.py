"""Scores of prompts over HTTP: `echo`, `prompt_logprobs`, and the ids of tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from cut_streams import read, texts
from ingress_rig import Serve, Served, until
from openai.types import Completion
from scripted_worker import DEMO, HELLO_IDS, ScriptedWorker
from tokenizers import Tokenizer

from kvfleet.ingress.settings import RunLimits
from kvproto.messages import StopToken, TokenLogprobs
from kvproto.subjects import Subjects
from tests.support import sse

PROMPT = "Once more unto"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
IDS: list[int] = TOKENIZER.encode(PROMPT).ids
ASKED = {"model": "demo", "prompt": PROMPT, "echo": True, "logprobs": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Speak."}]}


def spelled(token: int) -> str:
    text: str = TOKENIZER.decode([token], skip_special_tokens=False)
    return text


async def answer(served: Served, **changes: Any) -> dict[str, Any]:
    told = await served.http.post("/v1/completions", json={**ASKED, **changes})
    assert told.status_code == 200, told.text
    return dict(told.json())


async def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with served.http.stream("POST", path, json={**body, "stream": True}) as told:
        assert told.status_code == 200, await told.aread()
        lines = [line.removeprefix("data: ") async for line in sse.alines(told) if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def of_prompt(lists: dict[str, Any], alternatives: int = 2) -> None:
    """The prompt's part of a completion's log probabilities."""
    count = len(IDS)
    assert lists["tokens"][:count] == [spelled(token) for token in IDS]
    assert lists["token_logprobs"][:count] == [None, *(-0.25 * at for at in range(1, count))]
    assert lists["top_logprobs"][0] is None
    for at in range(1, count):
        tops = {spelled(token): -0.25 * at for token in range(6, 6 + alternatives)}
        assert lists["top_logprobs"][at] == tops | {spelled(IDS[at]): -0.25 * at}


# ---------------------------------------------------------------------------------------------- echo


async def test_an_echoed_prompt_and_its_log_probabilities(served: Served, worker: ScriptedWorker) -> None:
    told = await answer(served, max_tokens=2)
    Completion.model_validate(told | {"choices": [told["choices"][0] | {"logprobs": None}]})  # its floats know no null
    (choice,) = told["choices"]
    assert choice["text"] == PROMPT + "Hel"
    lists = choice["logprobs"]
    of_prompt(lists)
    assert [len(one) for one in lists.values()] == [len(IDS) + 2] * 4
    assert lists["tokens"][-2:] == [spelled(token) for token in HELLO_IDS[:2]]
    assert lists["token_logprobs"][-2:] == [-0.5, -1.0]
    pieces = [spelled(token) for token in IDS[1:]]
    assert "".join(pieces) == PROMPT
    begins = [len("".join(pieces[:at])) for at in range(len(pieces))]
    assert lists["text_offset"][: len(IDS)] == [0, *begins], "the BOS is not in the text"
    assert lists["text_offset"][-2:] == [len(PROMPT), len(PROMPT) + 2]
    assert told["usage"]["completion_tokens"] == 2
    assert told["usage"]["prompt_tokens"] == len(IDS)
    sampling = worker.requests[0][1].sampling
    assert (sampling.prompt_logprobs, sampling.logprobs, sampling.max_tokens) == (2, 2, 2)


async def test_nothing_need_be_generated(served: Served, worker: ScriptedWorker) -> None:
    told = await answer(served, max_tokens=0)
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    of_prompt(choice["logprobs"])
    assert len(choice["logprobs"]["tokens"]) == len(IDS)
    assert told["usage"] | {"prompt_tokens_details": 0, "completion_tokens_details": 0} == {
        "prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS), "prompt_tokens_details": 0,
        "completion_tokens_details": 0,
    }  # fmt: skip
    assert worker.generated == 0
    (choice,) = (await answer(served, max_tokens=0, logprobs=None))["choices"]
    assert (choice["text"], choice["logprobs"]) == (PROMPT, None)


async def test_a_prompt_of_ids_is_echoed_as_its_text(served: Served) -> None:
    (choice,) = (await answer(served, prompt=IDS, max_tokens=1, n=1))["choices"]
    assert choice["text"] == TOKENIZER.decode(IDS, skip_special_tokens=False) + "He"
    of_prompt(choice["logprobs"])
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[:3] == [0, len(spelled(IDS[0])), len(spelled(IDS[0]) + spelled(IDS[1]))]


async def test_a_prompt_with_characters_of_several_tokens(served: Served) -> None:
    """Each begins where its first character does."""
    text = "na\u00efve \u4e16\u754c \U0001f600!"
    (choice,) = (await answer(served, prompt=text, max_tokens=0))["choices"]
    assert choice["text"] == text
    offsets, ids = choice["logprobs"]["text_offset"], TOKENIZER.encode(text).ids
    assert len(offsets) == len(ids) > len(text) + 1
    assert offsets == sorted(offsets)
    assert max(offsets) == len(text) - 1


@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_every_choice_echoes(served: Served, logprobs: int | None) -> None:
    told = await answer(served, n=3, logprobs=logprobs)
    assert [choice["text"] for choice in told["choices"]] == [PROMPT + said for said in ("Hello!", "llo!", "lo!")]
    for at, choice in enumerate(told["choices"]):
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            of_prompt(choice["logprobs"], logprobs)
            assert choice["logprobs"]["token_logprobs"][len(IDS) :] == [-0.5 * (i + 1) for i in range(4 - at)]
    assert told["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"max_tokens": 0, "n": 2}, {"logprobs": None}, {"max_tokens": 0}])
async def test_a_stream_says_the_same(served: Served, more: dict[str, Any]) -> None:
    whole = await answer(served, **more)
    told = await chunks(served, "/v1/completions", {**ASKED, **more})
    choices = [choice for chunk in told for choice in chunk["choices"]]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert mine[0]["text"] == PROMPT, "the prompt is one event, before all others"
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [expected["finish_reason"]]
        scored = [choice["logprobs"] for choice in mine if choice["logprobs"] is not None]
        if expected["logprobs"] is None:
            assert scored == []
        else:
            joined = {name: [one for lists in scored for one in lists[name]] for name in expected["logprobs"]}
            assert joined == expected["logprobs"]


@pytest.mark.parametrize("more", [{}, {"n": 2}])
async def test_the_token_that_ended_an_echoed_answer_is_its_last_entry(
    served: Served, worker: ScriptedWorker, more: dict[str, Any]
) -> None:
    """lm-eval takes the last entry for a generated token, also where a model has nothing more to say."""
    worker.reply, worker.stop_token = [], StopToken(2, TokenLogprobs(-0.125, (2, 7), (-0.125, -3.0)))
    told = await answer(served, max_tokens=1, **more)
    for choice in told["choices"]:
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
        lists = choice["logprobs"]
        assert [len(one) for one in lists.values()] == [len(IDS) + 1] * 4
        of_prompt(lists)
        assert (lists["tokens"][-1], lists["token_logprobs"][-1]) == (spelled(2), -0.125)
        assert lists["top_logprobs"][-1] == {spelled(2): -0.125, spelled(7): -3.0}
        assert lists["text_offset"][-1] == len(PROMPT)
    assert told["usage"]["completion_tokens"] == 0
    choices = [
        choice for chunk in await chunks(served, "/v1/completions", {**ASKED, **more}) for choice in chunk["choices"]
    ]
    for expected in told["choices"]:
        scored = [one["logprobs"] for one in choices if one["index"] == expected["index"] and one["logprobs"]]
        assert {name: [one for lists in scored for one in lists[name]] for name in scored[0]} == expected["logprobs"]
    plain = await answer(served, max_tokens=1, echo=False, **more)
    assert plain["choices"][0]["logprobs"]["tokens"] == []


async def test_openais_client_reads_it(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        asked: Any = ASKED
        told = await client.completions.create(**asked, max_tokens=1)
        assert told.choices[0].text == PROMPT + "He"
        assert told.choices[0].logprobs is not None
        assert (told.choices[0].logprobs.token_logprobs or [])[1] == -0.25
        stream = await client.completions.create(**asked, max_tokens=1, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == PROMPT + "He"


# ---------------------------------------------------------------------------------------------- prompt_logprobs


def listed(ids: list[int], alternatives: int) -> list[Any]:
    """As vLLM's servers tell them."""
    told: list[Any] = [None]
    for at, token in enumerate(ids[1:], 1):
        entry = {str(token): {"logprob": -0.25 * at, "rank": at, "decoded_token": spelled(token)}}
        for rank, top in enumerate(range(6, 6 + alternatives), 1):
            entry[str(top)] = {"logprob": -0.25 * at, "rank": rank, "decoded_token": spelled(top)}
        told.append(entry)
    return told


@pytest.mark.parametrize("alternatives", [0, 1, 20])
async def test_prompt_logprobs_of_a_completion(served: Served, alternatives: int) -> None:
    told = await answer(served, echo=False, logprobs=None, prompt_logprobs=alternatives, n=2)
    for choice in told["choices"]:
        assert choice["prompt_logprobs"] == listed(IDS, alternatives)
        assert choice["logprobs"] is None
        assert next(iter(choice["prompt_logprobs"][1])) == str(IDS[1]), "the token's own comes first"
    assert "prompt_logprobs" not in told


async def test_prompt_logprobs_of_a_chat(served: Served, worker: ScriptedWorker) -> None:
    told = (await served.http.post("/v1/chat/completions", json={**CHAT, "prompt_logprobs": 2})).json()
    ids = list(worker.requests[0][1].prompt_ids)
    assert told["prompt_logprobs"] == listed(ids, 2)
    assert told["choices"][0]["message"]["content"] == "Hello!"
    assert told["choices"][0]["logprobs"] is None


async def test_an_echo_and_a_list_may_have_other_alternatives(served: Served, worker: ScriptedWorker) -> None:
    (choice,) = (await answer(served, prompt_logprobs=4, max_tokens=0))["choices"]
    assert choice["prompt_logprobs"] == listed(IDS, 4)
    of_prompt(choice["logprobs"], 2)
    assert worker.requests[0][1].sampling.prompt_logprobs == 4


async def test_without_being_asked_for_there_are_none(served: Served, worker: ScriptedWorker) -> None:
    told = await answer(served, echo=False, logprobs=1)
    assert [told["choices"][0][name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")] == [None] * 3
    told = (await served.http.post("/v1/chat/completions", json=CHAT)).json()
    assert (told["prompt_logprobs"], told["prompt_token_ids"], told["choices"][0]["token_ids"]) == (None, None, None)
    assert {request.sampling.prompt_logprobs for _, request in worker.requests} == {None}


# ---------------------------------------------------------------------------------------------- ids


async def test_ids_of_a_completion(served: Served) -> None:
    told = await answer(served, return_token_ids=True, n=2, logprobs=None)
    for at, choice in enumerate(told["choices"]):
        assert choice["prompt_token_ids"] == IDS
        assert choice["token_ids"] == list(HELLO_IDS[at:])
        assert choice["text"].startswith(PROMPT)


async def test_ids_of_a_chat(served: Served, worker: ScriptedWorker) -> None:
    told = (await served.http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True})).json()
    assert told["prompt_token_ids"] == list(worker.requests[0][1].prompt_ids)
    assert told["choices"][0]["token_ids"] == list(HELLO_IDS)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_ids_in_a_stream(served: Served, worker: ScriptedWorker, chat: bool, logprobs: bool) -> None:
    """The prompt's in each choice's first event alone, the others with their token's, text or no text."""
    worker.reply = [(550, ""), (81, "Hel"), (951, ""), (6, "lo!")]
    path, body = ("/v1/chat/completions", CHAT) if chat else ("/v1/completions", {"model": "demo", "prompt": PROMPT})
    scored: dict[str, Any] = ({"logprobs": True} if chat else {"logprobs": 0}) if logprobs else {}
    told = await chunks(served, path, {**body, **scored, "n": 2, "return_token_ids": True})
    prompt = list(worker.requests[0][1].prompt_ids)
    for index in range(2):
        mine = [(chunk, choice) for chunk in told for choice in chunk["choices"] if choice["index"] == index]
        at = 0 if chat else 1
        assert mine[0][at]["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in chunk and "prompt_token_ids" not in choice for chunk, choice in mine[1:])
        ids = [choice["token_ids"] for _, choice in mine if "token_ids" in choice]
        assert ids == [[token] for token, _ in worker.reply[index:]]


# ---------------------------------------------------------------------------------------------- what breaks


async def test_a_stream_that_was_cut_after_its_echo_has_no_second_one(served: Served, worker: ScriptedWorker) -> None:
    body = {**ASKED, "stream": True}
    whole = await read(served, "/v1/completions", body)
    worker.token_s = 0.05
    before = await read(served, "/v1/completions", body, events=1)
    assert texts(before) == {0: PROMPT}
    after = await read(served, "/v1/completions", body, last_event_id=before[-1].id)
    assert texts(before + after) == texts(whole) == {0: PROMPT + "Hello!"}


async def test_scores_that_are_here_are_not_asked_for_again(served: Served, worker: ScriptedWorker) -> None:
    """The client leaves in the midst of its prompt, and comes back with its Idempotency-Key."""
    worker.stalls_in_prompt = 2
    body, key = {**ASKED, "max_tokens": 1}, {"idempotency-key": "k"}
    first = asyncio.create_task(served.http.post("/v1/completions", json=body, headers=key))
    await until(lambda: not worker.held.is_set())
    await asyncio.sleep(0.1)
    first.cancel()
    await until(lambda: not served.ingress.admission.running)
    worker.stalls_in_prompt = None
    worker.held.set()
    told = (await served.http.post("/v1/completions", json=body, headers=key)).json()
    of_prompt(told["choices"][0]["logprobs"])
    assert [request.scored for _, request in worker.requests] == [1, 4]


async def test_older_workers_are_not_asked(nats_url: str, fleet_buckets: Subjects, serving: Serve) -> None:
    served = await serving()
    known = served.client.members.view
    older = await ScriptedWorker.start(nats_url, fleet_buckets, "w2", scores=False)
    await until(lambda: len(list(known.ready())) == 2)
    for at in range(6):
        told = await answer(served, prompt=f"{at} of them", max_tokens=1)
        assert None not in told["choices"][0]["logprobs"]["token_logprobs"][1:]
    assert all(request.sampling.prompt_logprobs is None for _, request in older.requests)
    await older.stop()


async def test_what_no_memory_is_there_for_is_refused_at_once(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(runs=RunLimits(running_bytes=400_000))
    for more in ({"n": 20}, {"n": 20, "prompt_logprobs": 20, "echo": False}):
        told = await served.http.post("/v1/completions", json={**ASKED, "prompt": PROMPT * 20, "max_tokens": 1, **more})
        assert told.status_code == 413
        assert told.json()["error"]["param"] == "prompt"
    assert worker.requests == []
    assert (await answer(served, max_tokens=1))["choices"][0]["text"] == PROMPT + "He"
