"""Tools over HTTP, with OpenAI's own client: what the worker is asked, and what is read of its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from ingress_rig import Served
from openai.types.chat import ChatCompletion
from scripted_worker import ScriptedWorker, demo_bundle

from kvproto.messages import GrammarForm
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STOP: dict[str, Any] = {"type": "function", "function": {"name": "stop"}}
CHAT: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "Speak."}], "tools": [WEATHER, STOP],
}  # fmt: skip
CALLS = (
    'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)


def says(worker: ScriptedWorker, text: str, step: int = 3) -> None:
    worker.reply = [(10 + at % 7, text[at : at + step]) for at in range(0, len(text), step)]


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)


async def test_calls_of_a_whole_answer(served: Served, worker: ScriptedWorker) -> None:
    says(worker, CALLS)
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, max_tokens=100)
    ChatCompletion.model_validate(answer.to_dict())
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(one.type, one.function.name, one.function.arguments) for one in calls] == [
        ("function", "weather", '{"city": "Paris"}'), ("function", "stop", "{}"),
    ]  # fmt: skip
    assert len({one.id for one in calls}) == 2
    assert all(one.id.isalnum() and len(one.id) == 9 for one in calls)
    sampling = worker.requests[0][1].sampling
    assert sampling.grammar is None, "a model may say what it likes"
    assert not sampling.skip_special_tokens


@pytest.mark.parametrize("step", [1, 3, 50])
async def test_calls_are_streamed_as_they_come(served: Served, worker: ScriptedWorker, step: int) -> None:
    says(worker, CALLS, step)
    async with client_of(served) as client, client.chat.completions.stream(**CHAT, max_tokens=200) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(one.function.name, one.function.arguments) for one in calls] == [
        ("weather", '{"city": "Paris"}'), ("stop", "{}"),
    ]  # fmt: skip
    if step == 1:
        assert kinds.count("tool_calls.function.arguments.delta") > 10


async def test_a_stream_goes_on_in_the_midst_of_arguments(served: Served, worker: ScriptedWorker) -> None:
    says(worker, CALLS, 2)
    whole = await served.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200, "stream": True})
    events = [json.loads(line[6:]) for line in whole.text.split("\n") if line.startswith("data: {")]
    ids = [event["kvfleet"]["event_id"] for event in events]
    for at in range(1, len(events) - 1):
        again = await served.http.post(
            "/v1/chat/completions", json={**CHAT, "max_tokens": 200, "stream": True},
            headers={"Last-Event-ID": ids[at]},
        )  # fmt: skip
        rest = [json.loads(line[6:]) for line in again.text.split("\n") if line.startswith("data: {")]
        assert [one["choices"] for one in rest] == [one["choices"] for one in events[at + 1 :]], ids[at]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["weather", "stop"]), ({"type": "function", "function": {"name": "stop"}}, ["stop"])],
)
async def test_what_must_be_called_is_a_grammar(
    served: Served, worker: ScriptedWorker, choice: Any, names: list[str]
) -> None:
    says(worker, CALLS)
    async with client_of(served) as client:
        await client.chat.completions.create(**CHAT, tool_choice=choice)
    grammar = worker.requests[0][1].sampling.grammar
    assert grammar is not None
    assert grammar.form is GrammarForm.LARK
    assert [name for name in ("weather", "stop") if f'\\"name\\": \\"{name}\\"' in grammar.text] == names


async def test_none_calls_none(served: Served, worker: ScriptedWorker) -> None:
    says(worker, CALLS)
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**CHAT, tool_choice="none", max_tokens=100)
    assert answer.choices[0].message.content == CALLS
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_the_history_has_calls_and_answers(served: Served, worker: ScriptedWorker) -> None:
    """And what the model wrote is not computed again: the template writes it as it was."""
    says(worker, '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', 4)
    async with client_of(served) as client:
        first = await client.chat.completions.create(**CHAT, max_tokens=100)
        said = first.choices[0].message
        assert said.content is None
        assert said.tool_calls is not None
        history = [
            *CHAT["messages"],
            said.to_dict(),
            {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "Rain."},
        ]
        says(worker, "It rains.")
        second = await client.chat.completions.create(**{**CHAT, "messages": history})
    assert second.choices[0].message.content == "It rains."


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [STOP, STOP]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
         "tools[0].function.parameters"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"properties": [1]}}}]},
         "tools[0].function.parameters.properties"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"required": [1]}}}]},
         "tools[0].function.parameters.required"),
        ({"plan": {}}, "plan"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_by_name(served: Served, fields: dict[str, Any], field: str) -> None:
    refused = await served.http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


# ---------------------------------------------------------------------------------------------- reasoning


async def test_reasoning_is_told_apart(served: Served, thinker: ScriptedWorker) -> None:
    says(thinker, "I must look.\n</think>\n\nIt rains.", 4)
    asked = {"model": "thinker", "messages": [{"role": "user", "content": "Speak."}], "max_tokens": 50}
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream]
    told = answer.choices[0].message.to_dict()
    assert (told["content"], told["reasoning_content"]) == ("It rains.", "I must look.")
    for key in ("content", "reasoning_content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == told[key]
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 3 <= (usage.completion_tokens_details.reasoning_tokens or 0) <= 6
    assert usage.completion_tokens == len(thinker.reply)


async def test_the_template_is_told_how_to_think(served: Served, thinker: ScriptedWorker) -> None:
    asked = {"model": "thinker", "messages": [{"role": "user", "content": "Speak."}]}
    says(thinker, "It rains.")
    async with client_of(served) as client:
        await client.chat.completions.create(**asked)
        answer = await client.chat.completions.create(
            **asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
    assert answer.choices[0].message.content == "It rains."
    thinking, plain = (request.prompt_ids for _, request in thinker.requests)
    assert thinking[: len(plain)] == plain
    assert len(thinking) > len(plain)


async def test_a_schema_is_for_what_comes_behind_the_reasoning(served: Served, thinker: ScriptedWorker) -> None:
    asked = {"model": "thinker", "messages": [{"role": "user", "content": "Speak."}]}
    async with client_of(served) as client:
        await client.chat.completions.create(**asked, response_format={"type": "json_object"})
    grammar = thinker.requests[0][1].sampling.grammar
    assert grammar is not None
    assert "think>" in grammar.text


# ---------------------------------------------------------------------------------------------- a tokenizer's own

OWN = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True,
            "content": "json", "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}  # fmt: skip
BEFORE = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "x-regex": r"^(?:<\|channel>.*?<channel\|>)?(.*?)(?:<\|tool_call>|$)"},
        "thinking": {"type": "string", "x-regex": r"<\|channel>thought\n(.*?)<channel\|>"},
        "tool_calls": {
            "type": "array", "x-regex-iterator": r"<\|tool_call>(.*?)<tool_call\|>",
            "items": {
                "type": "object", "x-regex": r"call:(?P<name>\w+)(?P<arguments>\{.*\})",
                "properties": {"name": {}, "arguments": {"type": "object", "x-parser": "gemma4-tool-call",
                                                         "additionalProperties": {}}},
            },
        },
    },
}  # fmt: skip
OWN_CALLS = (
    "<|channel>thought\nHm.<channel|>Well."
    '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:stop{}<tool_call|>'
)


@pytest.mark.parametrize("said", [OWN, BEFORE], ids=["response_template", "response_schema"])
async def test_a_tokenizer_says_how_its_model_calls(
    nats_url: str, fleet_buckets: Subjects, served: Served, said: dict[str, Any]
) -> None:
    template = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}<|assistant|>"
    bundle = demo_bundle("own", chat_template=template, response_schema=json.dumps(said))
    worker = await ScriptedWorker.start(nats_url, fleet_buckets, "w2", bundle)
    async with asyncio.timeout(LIMIT_S):
        while "own" not in (await served.http.get("/v1/models")).text:
            await asyncio.sleep(0.05)
    says(worker, OWN_CALLS)
    asked = {**CHAT, "model": "own", "max_tokens": 200}
    async with client_of(served) as client:
        answer = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
    for one in (answer, streamed):
        (choice,) = one.choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.to_dict()["reasoning_content"]) == ("Well.", "Hm.")
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == [
            ("weather", '{"city": "Paris"}'), ("stop", "{}"),
        ]  # fmt: skip
    refused = await served.http.post("/v1/chat/completions", json={**asked, "tool_choice": "required"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"
    assert "cannot be enforced" in refused.json()["error"]["message"]
    says(worker, "No call at all.")
    plain = await served.http.post("/v1/chat/completions", json={**asked, "tools": []})
    assert plain.json()["choices"][0]["message"]["content"] == "No call at all."
    await worker.stop()
