"""Responses over HTTP, with OpenAI's own client: whole, streamed, with tools, stored, and one after the other."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from ingress_rig import Serve, Served
from openai.types.responses import Response
from scripted_worker import ScriptedWorker

from kvproto.messages import AdminCommand

CALLS = (
    'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": CITY, "strict": False},
    {"type": "function", "name": "stop", "parameters": {}, "strict": False},
]
ASKED: dict[str, Any] = {"model": "demo", "input": "Speak.", "max_output_tokens": 100}


def says(worker: ScriptedWorker, text: str, step: int = 3) -> None:
    worker.reply = [(10 + at % 7, text[at : at + step]) for at in range(0, len(text), step)]


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


def events_of(text: str) -> list[dict[str, Any]]:
    """Each names its type twice, and they are numbered."""
    events = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in one.split("\n") if not line.startswith(":"))
        if not lines:
            continue  # a comment
        event = json.loads(lines["data"])
        assert lines["event"] == event["type"]
        events.append(event)
    return events


async def streamed(served: Served, asked: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await served.http.post("/v1/responses", json={**asked, "stream": True})
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_text(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.responses.create(
            model="demo", input="Speak.", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5
        )
        again = await client.responses.retrieve(answer.id)
    Response.model_validate(answer.to_dict())
    assert (answer.status, answer.output_text) == ("completed", "Hello!")
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    request = worker.requests[0][1]
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert again.to_dict() == answer.to_dict()


async def test_the_events_of_a_text(served: Served, worker: ScriptedWorker) -> None:
    says(worker, "Hello!", 2)
    events = await streamed(served, ASKED)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if "delta" in event) == "Hello!"
    told = events[-1]["response"]
    assert events[-2]["item"] == told["output"][0]
    stored = (await served.http.get(f"/v1/responses/{told['id']}")).json()
    assert stored == told


@pytest.mark.parametrize("step", [1, 4, 300])
async def test_calls_are_items(served: Served, worker: ScriptedWorker, step: int) -> None:
    says(worker, CALLS, step)
    asked = {**ASKED, "tools": TOOLS, "max_output_tokens": 200}
    whole = (await served.http.post("/v1/responses", json=asked)).json()
    text, weather, stop = whole["output"]
    assert text["content"][0]["text"] == "Well."
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": "Paris"})
    assert (stop["name"], stop["arguments"], stop["status"]) == ("stop", "{}", "completed")
    events = await streamed(served, asked)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [{**one, "id": "", "call_id": ""} for one in done] == [
        {**one, "id": "", **({"call_id": ""} if "call_id" in one else {})} | {"call_id": ""} for one in whole["output"]
    ]
    for at, item in enumerate(done[1:], 1):
        grown = [one["delta"] for one in events if "arguments.delta" in one["type"] and one["output_index"] == at]
        assert "".join(grown) == item["arguments"]


async def test_one_after_the_other_at_any_ingress(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, CALLS)
    async with client_of(first) as one, client_of(second) as other:
        asked = await one.responses.create(**ASKED, tools=TOOLS, instructions="Be brief.")
        call = asked.output[1]
        assert call.type == "function_call"
        says(worker, "It rains.")
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        told = await other.responses.create(**{**ASKED, "input": [output]}, tools=TOOLS, previous_response_id=asked.id)
        third = await one.responses.create(**{**ASKED, "input": "And?"}, previous_response_id=told.id)
        assert third.previous_response_id == told.id
        same = await other.responses.create(
            **{**ASKED, "input": [
                {"role": "user", "content": "Speak."}, *(item.to_dict() for item in asked.output), output,
                *(item.to_dict() for item in told.output), {"role": "user", "content": "And?"},
            ]}, store=False,
        )  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(same.id)
    prompts = [request.prompt_ids for _, request in worker.requests]
    assert prompts[2] == prompts[3]


async def test_items_are_referred_to_by_their_ids(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        first = await client.responses.create(**ASKED)
        said: list[Any] = [{"role": "user", "content": "Speak."}, {"type": "item_reference", "id": first.output[0].id}]
        await client.responses.create(**{**ASKED, "input": [*said, {"role": "user", "content": "And?"}]})
        await client.responses.create(**{**ASKED, "input": "And?"}, previous_response_id=first.id)
        lost = first.output[0].id[:-1] + "7"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**{**ASKED, "input": [{"type": "item_reference", "id": lost}]})  # type: ignore[list-item]
    prompts = [request.prompt_ids for _, request in worker.requests]
    assert prompts[1] == prompts[2]


async def test_the_format_of_the_text_is_a_grammar(served: Served, worker: ScriptedWorker) -> None:
    says(worker, '{"city": "Rome"}')
    async with client_of(served) as client:
        answer = await client.responses.create(
            **ASKED, text={"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
        )
    assert json.loads(answer.output_text) == {"city": "Rome"}
    grammar = worker.requests[0][1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == CITY


async def test_thoughts_are_items(served: Served, thinker: ScriptedWorker) -> None:
    says(thinker, "I must look.\n</think>\n\nIt rains.", 4)
    asked = {**ASKED, "model": "thinker", "reasoning": {"effort": "low", "summary": "auto"}}
    events = await streamed(served, asked)
    told = events[-1]["response"]
    thought, text = told["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "I must look.")
    assert text["content"][0]["text"] == "It rains."
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] >= 3
    assert told["reasoning"] == {"effort": "low", "summary": "auto"}
    says(thinker, "And?")
    await served.http.post("/v1/responses", json={**asked, "input": "So?", "previous_response_id": told["id"]})
    assert len(thinker.requests) == 2


async def test_log_probabilities(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.responses.create(**ASKED, top_logprobs=2, include=["message.output_text.logprobs"])
        again = await client.responses.retrieve(answer.id)
    (item,) = answer.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 4
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    assert again.to_dict() == answer.to_dict()


async def test_an_answer_that_is_cut_is_incomplete(served: Served, worker: ScriptedWorker) -> None:
    answer = (await served.http.post("/v1/responses", json={**ASKED, "max_output_tokens": 2})).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete"
    events = await streamed(served, {**ASKED, "max_output_tokens": 2})
    assert events[-1]["type"] == "response.incomplete"


async def test_a_stream_goes_on_after_any_event(served: Served, worker: ScriptedWorker) -> None:
    says(worker, CALLS, 2)
    asked = {**ASKED, "tools": TOOLS, "stream": True, "max_output_tokens": 200}
    whole = await served.http.post("/v1/responses", json=asked, headers={"accept": "text/event-stream; event-ids=1"})
    events = whole.text.removesuffix("\n\n").split("\n\n")
    ids = {at: one.split("\n")[0] for at, one in enumerate(events) if one.startswith("id: ")}
    for at, event_id in [*ids.items()][:-1]:
        headers = {"Last-Event-ID": event_id.removeprefix("id: ")}
        rest = (await served.http.post("/v1/responses", json=asked, headers=headers)).text
        assert rest.removesuffix("\n\n").split("\n\n") == events[at + 1 :], event_id


async def test_what_was_stored_is_streamed_from_any_number_on(serving: Serve, worker: ScriptedWorker) -> None:
    first, second = await serving(), await serving()
    says(worker, CALLS, 5)
    events = await streamed(first, {**ASKED, "tools": TOOLS, "max_output_tokens": 200})
    path = f"/v1/responses/{events[-1]['response']['id']}?stream=true"
    assert events_of((await second.http.get(path)).text) == events
    for after in range(len(events) - 1):
        rest = (await second.http.get(f"{path}&starting_after={after}")).text
        assert events_of(rest) == events[after + 1 :]


async def test_input_items_are_listed_in_pages(served: Served, worker: ScriptedWorker) -> None:
    said: list[Any] = [{"role": "user", "content": str(number)} for number in range(5)]
    async with client_of(served) as client:
        answer = await client.responses.create(**{**ASKED, "input": said})
        texts = [item.content[0].text async for item in client.responses.input_items.list(answer.id, limit=2)]  # type: ignore[union-attr]
        page = await client.responses.input_items.list(answer.id, order="asc", limit=3)
    assert texts == ["4", "3", "2", "1", "0"]
    assert (len(page.data), page.has_more) == (3, True)


async def test_what_is_deleted_is_gone(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        answer = await client.responses.create(**ASKED)
        await client.responses.delete(answer.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(answer.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**ASKED, previous_response_id=answer.id)
    assert refused.value.param == "previous_response_id"
    asked, said = worker.requests[0][1], (token for token, _ in worker.reply)
    assert [one.ids for one in worker.admin if one.command is AdminCommand.ERASE] == [(*asked.prompt_ids, *said)]


async def test_tokens_are_counted(served: Served, worker: ScriptedWorker) -> None:
    async with client_of(served) as client:
        counted = await client.responses.input_tokens.count(model="demo", input="Speak.", instructions="Be brief.")
        answer = await client.responses.create(**ASKED, instructions="Be brief.")
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_output_tokens": 10**9}, "max_output_tokens"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(
    served: Served, worker: ScriptedWorker, fields: dict[str, Any], field: str
) -> None:
    refused = await served.http.post("/v1/responses", json={**ASKED, **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


@pytest.mark.parametrize(
    ("method", "path", "field"),
    [
        ("GET", "?stream=maybe", "stream"),
        ("GET", "?starting_after=1", "starting_after"),
        ("GET", "?stream=true&starting_after=x", "starting_after"),
        ("GET", "/input_items?limit=0", "limit"),
        ("GET", "/input_items?order=up", "order"),
        ("GET", "/input_items?after=msg_x", "after"),
        ("POST", "/cancel", "response_id"),
    ],
)
async def test_questions_that_cannot_be_are_refused_by_name(
    served: Served, worker: ScriptedWorker, method: str, path: str, field: str
) -> None:
    told = (await served.http.post("/v1/responses", json=ASKED)).json()
    refused = await served.http.request(method, f"/v1/responses/{told['id']}{path}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text
