"""Anthropic's messages: what they ask of a worker, and what they get, whole and in events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ingress_rig import Served
from scripted_worker import ScriptedWorker

ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 200,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Speak."}]}],
}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object", "properties": {}}}
CALLS = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def says(worker: ScriptedWorker, text: str, step: int = 3) -> None:
    worker.reply = [(10 + at % 7, text[at : at + step]) for at in range(0, len(text), step)]


def events_of(text: str) -> list[dict[str, Any]]:
    events = []
    for one in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in one.split("\n") if ": " in line)
        if "data" in lines:
            event = json.loads(lines["data"])
            assert lines["event"] == event["type"]
            events.append(event)
    return events


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As clients put blocks together."""
    blocks: list[dict[str, Any]] = []
    partial = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            partial = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                partial += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                blocks[-1][key] += delta[key]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(partial)
    return blocks


async def test_a_message(served: Served, worker: ScriptedWorker) -> None:
    answer = await served.http.post("/v1/messages", json=ASKED, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    told = answer.json()
    assert told["content"] == [{"type": "text", "text": "Hello!"}]
    assert (told["type"], told["role"], told["model"], told["stop_reason"]) == (
        "message",
        "assistant",
        "demo",
        "end_turn",
    )
    request = worker.requests[0][1]
    assert told["usage"]["input_tokens"] == len(request.prompt_ids)
    assert told["usage"]["output_tokens"] == 4
    counted = await served.http.post(
        "/v1/messages/count_tokens", json={key: ASKED[key] for key in ("model", "system", "messages")}
    )
    assert counted.json() == {"input_tokens": len(request.prompt_ids)}


@pytest.mark.parametrize("step", [1, 4, 200])
async def test_calls_whole_and_streamed(served: Served, worker: ScriptedWorker, step: int) -> None:
    says(worker, CALLS, step)
    asked = {**ASKED, "tools": [WEATHER]}
    told = (await served.http.post("/v1/messages", json=asked)).json()
    assert told["stop_reason"] == "tool_use"
    text, call = told["content"]
    assert text == {"type": "text", "text": "Well."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Paris"})
    streamed = events_of((await served.http.post("/v1/messages", json={**asked, "stream": True})).text)
    kinds = [event["type"] for event in streamed]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 2
    blocks = joined(streamed)
    assert blocks[0] == text
    assert {**blocks[1], "id": ""} == {**call, "id": ""}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_history_of_calls(served: Served, worker: ScriptedWorker) -> None:
    history = [
        {"role": "user", "content": "Will it rain?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must look.", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    asked = {**ASKED, "messages": history, "tools": [WEATHER], "tool_choice": {"type": "any"}, "stop_sequences": ["x"]}
    assert (await served.http.post("/v1/messages", json=asked)).status_code == 200
    chat = await served.http.post("/tokenize", json={
        "model": "demo",
        "tools": [{"type": "function", "function": {
            "name": "weather", "description": "Of a city.", "parameters": WEATHER["input_schema"],
        }}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Will it rain?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
            ]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
            {"role": "user", "content": "And?"},
        ],
    })  # fmt: skip
    request = worker.requests[0][1]
    assert request.prompt_ids == tuple(chat.json()["tokens"])
    assert request.sampling.grammar is not None
    assert request.sampling.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "tool_choice.name"),
        ({"temperature": 2}, "temperature"),
        ({"n": 2}, "n"),
    ],
)
async def test_what_cannot_be_is_refused_as_anthropic_does(
    served: Served, worker: ScriptedWorker, fields: dict[str, Any], why: str
) -> None:
    refused = await served.http.post("/v1/messages", json={**ASKED, **fields})
    assert refused.status_code == 400
    told = refused.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert why in told["error"]["message"]


async def test_the_stop_sequence_is_named(served: Served, worker: ScriptedWorker) -> None:
    worker.stop_string = "###"
    asked = {**ASKED, "stop_sequences": ["###", "+++"]}
    told = (await served.http.post("/v1/messages", json=asked)).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "###")
    streamed = events_of((await served.http.post("/v1/messages", json={**asked, "stream": True})).text)
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "###"}
    worker.stop_string = ""
    cut = (await served.http.post("/v1/messages", json={**ASKED, "max_tokens": 2})).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_thoughts_are_blocks_of_their_own(served: Served, thinker: ScriptedWorker) -> None:
    says(thinker, "I must look.\n</think>\n\nIt rains.", 4)
    asked = {"model": "thinker", "messages": [{"role": "user", "content": "Speak."}], "max_tokens": 50}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    told = (await served.http.post("/v1/messages", json=asked)).json()
    assert told["content"] == [
        {"type": "thinking", "thinking": "I must look.", "signature": ""},
        {"type": "text", "text": "It rains."},
    ]
    streamed = events_of((await served.http.post("/v1/messages", json={**asked, "stream": True})).text)
    assert joined(streamed) == told["content"]
    says(thinker, "It rains.")
    asked["thinking"] = {"type": "disabled"}
    told = (await served.http.post("/v1/messages", json=asked)).json()
    assert told["content"] == [{"type": "text", "text": "It rains."}]


async def test_what_the_output_must_be(served: Served, worker: ScriptedWorker) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    asked = {**ASKED, "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}}}
    assert (await served.http.post("/v1/messages", json=asked)).status_code == 200
    grammar = worker.requests[0][1].sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema


async def test_a_stream_goes_on_in_the_midst_of_blocks(served: Served, worker: ScriptedWorker) -> None:
    says(worker, CALLS, 2)
    asked = {**ASKED, "tools": [WEATHER], "stream": True}
    headers = {"accept": "text/event-stream; event-ids=1"}
    whole = (await served.http.post("/v1/messages", json=asked, headers=headers)).text
    events = whole.removesuffix("\n\n").split("\n\n")
    ids = {at: one.split("\n")[0] for at, one in enumerate(events) if one.startswith("id: ")}
    assert len(set(ids.values())) == len(ids) > 10
    for at, event_id in [*ids.items()][:-1]:
        headers = {"Last-Event-ID": event_id.removeprefix("id: ")}
        rest = (await served.http.post("/v1/messages", json=asked, headers=headers)).text
        assert rest.removesuffix("\n\n").split("\n\n") == events[at + 1 :], event_id


@pytest.mark.parametrize(
    ("make", "kind", "status"),
    [
        (lambda asked: {**asked, "model": "nobody"}, "not_found_error", 404),
        (lambda asked: {**asked, "max_tokens": 10**9}, "invalid_request_error", 400),
    ],
)
async def test_refusals_have_types_of_anthropics(
    served: Served, worker: ScriptedWorker, make: Any, kind: str, status: int
) -> None:
    refused = await served.http.post("/v1/messages", json=make(ASKED))
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)


async def test_an_error_in_the_midst_is_an_event(served: Served, worker: ScriptedWorker) -> None:
    worker.failure, worker.fails_after = ("engine_failed", "the engine has failed", False), 2
    events = events_of((await served.http.post("/v1/messages", json={**ASKED, "stream": True})).text)
    assert events[0]["type"] == "message_start"
    assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "api_error")
