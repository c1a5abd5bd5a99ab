"""OpenAI's library: tools, calls whole and streamed, `.parse()` with pydantic's models, and an agent's loop."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
from checks import KEY, MODEL, OPENAI, raised, run_checks
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client = OpenAI(base_url=OPENAI, api_key=KEY)
ASKED: list[Any] = [{"role": "user", "content": "Will it rain in Paris?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SEEDED: Any = {"model": MODEL, "messages": ASKED, "seed": 7, "temperature": 0.8, "max_tokens": 300}
CALLING: Any = SEEDED | {"tools": [WEATHER, CLOCK], "tool_choice": "required", "parallel_tool_calls": False}


class Guest(BaseModel):
    """Who stands at the gate."""

    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]
    age: Annotated[int, Field(ge=1, le=120)]


class Party(BaseModel):
    guests: Annotated[list[Guest], Field(min_length=2, max_length=3)]


def is_weather(arguments: str) -> bool:
    said = json.loads(arguments)
    return set(said) == {"city", "days"} and said["city"] in ("Rome", "Paris") and 1 <= said["days"] <= 9


def check_required() -> Any:
    answer = client.chat.completions.create(**CALLING)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.id
    assert (
        is_weather(call.function.arguments)
        if call.function.name == "weather"
        else json.loads(call.function.arguments) == {}
    )
    return answer.model_dump()


def check_named() -> Any:
    answer = client.chat.completions.create(
        **CALLING | {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {})
    return answer.choices[0].model_dump()


def check_parallel() -> Any:
    """As many calls as the model likes: each has an id of its own, also as deltas of a stream."""
    asked = CALLING | {"parallel_tool_calls": True, "seed": 3, "tools": [CLOCK], "max_tokens": 120}
    calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    return [call.id for call in calls]


def check_streamed_deltas() -> Any:
    """Put together as every user of the library does it by hand."""
    whole = client.chat.completions.create(**CALLING).choices[0]
    calls: dict[int, dict[str, str]] = {}
    reasons = []
    for chunk in client.chat.completions.create(**CALLING, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            assert delta.function is not None
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}
    assert whole.message.tool_calls is not None
    assert [(one["name"], one["arguments"]) for one in calls.values()] == [
        (one.function.name, one.function.arguments) for one in whole.message.tool_calls if one.type == "function"
    ]
    assert all(one["id"] for one in calls.values())
    return calls


def check_stream_helper() -> Any:
    with client.chat.completions.stream(**CALLING) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in events
    assert final.choices[0].message.tool_calls
    return events


def check_strict_under_auto() -> Any:
    """What the model says is its own affair; if it calls, the arguments are kept to their schema."""
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    choice = client.chat.completions.create(**SEEDED | {"max_tokens": 60}, tools=[strict]).choices[0]
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        assert is_weather(call.function.arguments)
    assert choice.message.tool_calls or choice.message.content
    return choice.model_dump()


def check_parse_schema() -> Any:
    answer = client.chat.completions.parse(**SEEDED | {"max_tokens": 1000}, response_format=Party)
    party = answer.choices[0].message.parsed
    assert party is not None
    assert 2 <= len(party.guests) <= 3
    return party.model_dump()


def check_parse_tools() -> Any:
    answer = client.chat.completions.parse(
        **SEEDED, tools=[pydantic_function_tool(Guest)], tool_choice="required", parallel_tool_calls=False
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Guest)
    return call.function.parsed_arguments.model_dump()


def check_parse_stream() -> Any:
    with client.chat.completions.stream(**SEEDED, response_format=Guest) as stream:
        partial = [event.parsed for event in stream if event.type == "content.delta"]
        guest = stream.get_final_completion().choices[0].message.parsed
    assert guest is not None
    assert len(partial) > 1
    return guest.model_dump()


async def check_parse_async() -> Any:
    async with AsyncOpenAI(base_url=OPENAI, api_key=KEY) as asking:
        answer = await asking.chat.completions.parse(**SEEDED, response_format=Guest)
    assert answer.choices[0].message.parsed is not None
    return answer.choices[0].message.parsed.model_dump()


def check_json_object() -> Any:
    asked = SEEDED | {"response_format": {"type": "json_object"}, "temperature": 0.2, "max_tokens": 400}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content
    if choice.finish_reason == "stop":  # an object of any form may be longer than it had room for
        assert isinstance(json.loads(choice.message.content), dict)
    assert choice.message.content.lstrip().startswith("{")
    return choice.message.content


def check_cut_schema() -> Any:
    """The library says that an answer was too long to be parsed."""
    asked = SEEDED | {"max_tokens": 4, "response_format": Party}
    return str(raised(openai.LengthFinishReasonError, client.chat.completions.parse, **asked))


def check_refused_schema() -> Any:
    schema = {"type": "object", "properties": {"a": {"type": "no such"}}}
    asked = SEEDED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    error = raised(openai.BadRequestError, client.chat.completions.create, **asked)
    assert error.param == "response_format.json_schema.schema"
    return str(error)


def check_agent_loop() -> Any:
    """The model calls, is told, calls again, is told, and speaks. What it said goes back as the library gave it."""
    messages: list[Any] = [{"role": "system", "content": "You tell the weather."}, *ASKED]
    told = []
    for turn in range(3):
        choice = client.chat.completions.create(
            **CALLING
            | {"messages": messages, "tools": [WEATHER], "tool_choice": "required" if turn < 2 else "none"}
            | {"max_tokens": 300 if turn < 2 else 30}
        ).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            assert is_weather(call.function.arguments)
            asked = json.loads(call.function.arguments)
            told.append(asked)
            answer = json.dumps({"city": asked["city"], "rain": [True] * asked["days"]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    assert len(told) == 2
    assert messages[-1].content
    return [told, messages[-1].content]


if __name__ == "__main__":
    run_checks(globals())
