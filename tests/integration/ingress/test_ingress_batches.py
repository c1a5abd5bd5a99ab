"""Several prompts in one request: a request to the fleet for each, one answer in their order, or one error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from ingress_rig import Serve, Served, serve, start_placement, until
from scripted_worker import CONTEXT, DEMO, ScriptedWorker
from tokenizers import Tokenizer

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.subjects import Subjects
from tests.support import sse
from tests.support.fake_fleet import FakeFleet

PATH = "/v1/completions"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PROMPTS: list[Any] = ["Once", "Twice told", [5, 6, 7], "Once more"]
IDS: list[list[int]] = [TOKENIZER.encode(one).ids if isinstance(one, str) else one for one in PROMPTS]
ASKED: dict[str, Any] = {"model": "demo", "prompt": PROMPTS, "max_tokens": 3}
SPOKEN = ["Hello", "llo!", "lo!"]  # by choice


async def stream(served: Served, body: dict[str, Any], **headers: str) -> list[Any]:
    async with served.http.stream("POST", PATH, json={**body, "stream": True}, headers=headers) as told:
        assert told.status_code == 200, await told.aread()
        lines = [line.removeprefix("data: ") async for line in sse.alines(told) if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def nothing_is_left(served: Served) -> None:
    ingress = served.ingress
    ingress.runs.check_integrity()
    ingress.admission.check_integrity()
    assert (ingress.admission.running, ingress.runs.kept, ingress.runs.memory.used) == (0, 0, 0)
    assert served.client.streams == 0


async def test_choices_come_in_the_order_of_prompts(served: Served, worker: ScriptedWorker) -> None:
    told = (await served.http.post(PATH, json={**ASKED, "n": 3})).json()
    assert [choice["index"] for choice in told["choices"]] == list(range(12))
    assert [choice["text"] for choice in told["choices"]] == SPOKEN * 4
    prompts = sum(map(len, IDS))
    assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (prompts, 4 * 8)
    assert told["usage"]["total_tokens"] == prompts + 32
    asked = [request for _, request in worker.requests]
    assert sorted(list(one.prompt_ids) for one in asked) == sorted(IDS)
    notes = told["kvfleet"]["requests"]
    by_prompt = {one.prompt_ids: one.request for one in asked}
    assert [one["request_id"] for one in notes] == [by_prompt[tuple(ids)] for ids in IDS]
    assert told["id"] == "cmpl-" + notes[0]["request_id"] == "cmpl-" + told["kvfleet"]["request_id"]
    assert {one["worker_id"] for one in notes} == {"w1"}
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(one["cached_tokens"] for one in notes)
    nothing_is_left(served)


async def test_a_stream_has_the_same_choices(served: Served, worker: ScriptedWorker) -> None:
    worker.token_s = 0.01
    events = await stream(served, {**ASKED, "n": 3, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 32
    assert len(last["kvfleet"]["requests"]) == 4
    choices = [choice for event in events for choice in event["choices"]]
    for index in range(12):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == SPOKEN[index % 3]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [mine[-1]["finish_reason"]]
    order = [choice["index"] // 3 for choice in choices]
    assert order != sorted(order), "they run side by side"
    nothing_is_left(served)


async def test_what_lm_eval_asks(served: Served) -> None:
    """Log likelihoods: prompts of ids, echoed with log probabilities, one token each."""
    body = {
        "model": "demo",
        "prompt": IDS,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        "temperature": 0,
    }
    told = (await served.http.post(PATH, json=body)).json()
    for ids, choice in zip(IDS, told["choices"], strict=True):
        values = choice["logprobs"]["token_logprobs"]
        assert values == [None, *(-0.25 * at for at in range(1, len(ids))), -0.5]
        assert choice["text"] == TOKENIZER.decode(ids, skip_special_tokens=False) + "He"
    scores = (await stream(served, body))[:-1]
    echoed = [
        choice
        for event in scores
        for choice in event["choices"]
        if len((choice["logprobs"] or {"tokens": ()})["tokens"]) > 1
    ]
    assert sorted(choice["index"] for choice in echoed) == [0, 1, 2, 3]


async def test_openais_client_reads_it(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        told = await client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3)
        assert [(choice.index, choice.text) for choice in told.choices] == [(0, "Hello"), (1, "Hello")]
        texts = ["", ""]
        async for chunk in await client.completions.create(model="demo", prompt=["a", "b"], max_tokens=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == ["Hello", "Hello"]


async def test_a_list_of_one_is_as_ever(served: Served) -> None:
    told = (await served.http.post(PATH, json={**ASKED, "prompt": ["Once"]})).json()
    assert told["kvfleet"]["worker_id"] == "w1"


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "field", "status"),
    [
        ({"prompt": ["a", [1, 99_999]]}, "prompt[1][1]", 400),
        ({"prompt": [[1], [2] * (CONTEXT + 1)]}, "prompt[1]", 400),
        ({"prompt": ["a", "word " * 3 * CONTEXT]}, "prompt[1]", 400),
        ({"prompt": ["a", ""]}, "prompt[1]", 400),
        ({"prompt": ["a"] * 129}, "prompt", 400),
        ({"model": "other"}, "model", 404),
        ({"logit_bias": {"99999": 1}}, "logit_bias", 400),
    ],
)
async def test_one_that_is_wrong_ends_all(
    served: Served, worker: ScriptedWorker, changes: dict[str, Any], field: str, status: int
) -> None:
    for streams in (False, True):
        told = await served.http.post(PATH, json={**ASKED, **changes, "stream": streams})
        assert (told.status_code, told.json()["error"]["param"]) == (status, field)
    assert worker.requests == []
    nothing_is_left(served)


@pytest.mark.parametrize("header", ["Idempotency-Key", "Last-Event-ID"])
async def test_nobody_can_come_back_to_it(served: Served, worker: ScriptedWorker, header: str) -> None:
    value = "k" if header == "Idempotency-Key" else "a" * 26 + ":3"
    told = await served.http.post(PATH, json={**ASKED, "stream": True}, headers={header: value})
    assert (told.status_code, told.json()["error"]["param"]) == (400, header)
    assert "one prompt" in told.json()["error"]["message"]
    assert worker.requests == []
    nothing_is_left(served)


async def test_a_failure_before_the_first_event_is_the_answer(served: Served, worker: ScriptedWorker) -> None:
    worker.failure = ("invalid_request", "it broke", False)
    for streams in (False, True):
        told = await served.http.post(PATH, json={**ASKED, "stream": streams})
        assert told.status_code == 400
        assert "it broke" in told.json()["error"]["message"]
    await until(lambda: not worker.running)
    nothing_is_left(served)


async def test_a_failure_in_the_midst_is_the_last_event_and_ends_the_others(
    served: Served, worker: ScriptedWorker
) -> None:
    worker.token_s, worker.failure, worker.fails_after = 0.02, ("invalid_request", "it broke", False), 2
    events = await stream(served, ASKED)
    assert "it broke" in events[-1]["error"]["message"]
    await until(lambda: not worker.running)
    nothing_is_left(served)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_stops_all(served: Served, worker: ScriptedWorker, streams: bool) -> None:
    worker.stalls_at = 1
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(served.http.post(PATH, json={**ASKED, "stream": streams}))
        await until(lambda: len(worker.requests) == 4 and not worker.held.is_set())
        asking.cancel()
    await until(lambda: not served.ingress.admission.running)
    assert {one.request for one in worker.cancels} >= {request.request for _, request in worker.requests}
    worker.held.set()
    nothing_is_left(served)


async def test_a_slow_client_stops_the_reading_of_all(served: Served, worker: ScriptedWorker) -> None:
    """Nothing is read on for a client that does not read, so that its sequences pause."""
    worker.reply = [(6, "x" * 4000)] * 400
    body = {**ASKED, "max_tokens": 400, "stream": True}
    async with served.http.stream("POST", PATH, json=body) as told:
        await until(lambda: worker.generated == 1600)
        lines = [line async for line in sse.alines(told) if line.startswith("data: ")]
    assert sum(line.count("x" * 4000) for line in lines) == 1600
    nothing_is_left(served)


# ---------------------------------------------------------------------------------------------- limits

LIMITS: dict[str, dict[str, Any]] = {
    "rated": {"requests_per_minute": 30},
    "few": {"max_concurrent": 4},
    "tokens": {"tokens_per_minute": 20},
}
KEYS = json.dumps({"keys": [{"name": name, "sha256": hash_key(name), **said} for name, said in LIMITS.items()]})


async def asks(served: Served, key: str, **changes: Any) -> tuple[int, Any]:
    told = await served.http.post(PATH, json={**ASKED, **changes}, headers={"authorization": f"Bearer {key}"})
    return told.status_code, told.json().get("error")


async def test_each_prompt_counts_as_a_request(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    status, error = await asks(served, "rated", prompt=["a"] * 6)
    assert (status, error["param"]) == (400, "prompt"), "never let in: a burst has 5"
    assert (await asks(served, "rated", prompt=["a"] * 4))[0] == 200
    assert (await asks(served, "rated", prompt=["a"] * 2))[0] == 429
    assert (await asks(served, "rated", prompt=["a"]))[0] == 200
    assert len(worker.requests) == 5
    served.ingress.admission.check_integrity()


async def test_each_choice_of_each_prompt_counts_while_it_runs(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    assert (await asks(served, "few", prompt=["a"] * 2, n=3))[0] == 400
    assert (await asks(served, "few", prompt=["a"] * 2, n=2))[0] == 200
    worker.held.clear()
    running = asyncio.create_task(asks(served, "few", prompt=["a"] * 3))
    await until(lambda: len(worker.running) == 3)
    assert (await asks(served, "few", prompt=["a"] * 2))[0] == 429
    worker.held.set()
    assert (await running)[0] == 200
    nothing_is_left(served)


async def test_prompts_are_charged_together_or_not_at_all(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(keys=KEYS)
    status, _ = await asks(served, "tokens", prompt=[[5] * 11, [6] * 10])
    assert status == 413, "no waiting helps"
    assert worker.requests == []
    assert (await asks(served, "tokens", prompt=[[5] * 8, [6] * 9], max_tokens=1))[0] == 200, "nothing was taken"
    assert (await asks(served, "tokens", prompt=[[5] * 8]))[0] == 429
    nothing_is_left(served)


async def test_the_processs_requests_are_counted(serving: Serve, worker: ScriptedWorker) -> None:
    served = await serving(max_concurrent=4)
    told = await served.http.post(PATH, json={**ASKED, "prompt": ["a"] * 5})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "prompt")
    worker.held.clear()
    running = asyncio.create_task(served.http.post(PATH, json={**ASKED, "prompt": ["a"] * 3}))
    await until(lambda: len(worker.running) == 3)
    assert (await served.http.post(PATH, json={**ASKED, "prompt": ["a"] * 2})).status_code == 503
    worker.held.set()
    assert (await running).status_code == 200
    nothing_is_left(served)


# ---------------------------------------------------------------------------------------------- on real engines


async def test_a_worker_that_is_killed_changes_nothing(
    nats_url: str, fleet_buckets: Subjects, fleet: FakeFleet
) -> None:
    for name in ("w1", "w2"):
        await fleet.start(name, fake_tokens_per_s=12)  # all run at once for a while, also on a busy machine
    placement, connection = await start_placement(nats_url, fleet_buckets, "p0")
    served = await serve(nats_url, fleet_buckets)
    prompts = [f"{at}. Sing, goddess" for at in range(24)]
    body = {"model": "demo", "prompt": prompts, "max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True,
            "logprobs": 2, "echo": True}  # fmt: skip
    whole = (await served.http.post(PATH, json=body)).json()
    answers = [(choice["index"], choice["text"], choice["logprobs"]) for choice in whole["choices"]]
    assert [at for at, *_ in answers] == list(range(24))
    asking = asyncio.create_task(served.http.post(PATH, json=body))
    streams = served.client._streams
    await until(lambda: len(streams) == 24 and all(one.assembly.tokens > 0 for one in streams.values()))
    await fleet.workers["w1"].kill()
    again = (await asking).json()
    assert "error" not in again, again
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in again["choices"]] == answers
    nothing_is_left(served)
    await served.stop()
    await placement.stop()
    await connection.close()
