"""OpenAI's library: responses, whole and streamed, in the background, kept and deleted, with tools and schemas."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, Literal

import openai
from checks import KEY, MODEL, OPENAI, raised, run_checks
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=OPENAI, api_key=KEY)
SEEDED: Any = {"model": MODEL, "input": "Who goes there?", "temperature": 0.0, "max_output_tokens": 24}
CLOCK: Any = {
    "type": "function",
    "name": "clock",
    "description": "The time of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
LIMIT_S = 60.0


class Guest(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]


def check_create() -> Any:
    response = client.responses.create(**SEEDED, instructions="You are a sentry.")
    assert response.object == "response"
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.output[0].type == "message"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens <= 24
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return response.model_dump()


def check_incomplete() -> Any:
    response = client.responses.create(**SEEDED | {"max_output_tokens": 16})
    if response.usage is not None and response.usage.output_tokens == 16:
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
    return response.status


def check_stream() -> Any:
    whole = client.responses.create(**SEEDED)
    events = list(client.responses.create(**SEEDED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == last.response.output_text
    return [event.type for event in events]


def check_stream_helper() -> Any:
    with client.responses.stream(**SEEDED | {"max_output_tokens": 300}) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text
    return final.output_text


def check_next_turn() -> Any:
    first = client.responses.create(**SEEDED)
    second = client.responses.create(**SEEDED | {"input": "And who are you?"}, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    by_hand = client.responses.create(
        **SEEDED
        | {
            "input": [
                {"role": "user", "content": SEEDED["input"]},
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And who are you?"},
            ]
        }
    )
    assert second.usage is not None
    assert by_hand.usage is not None
    assert second.usage.input_tokens == by_hand.usage.input_tokens
    assert second.output_text == by_hand.output_text
    return second.output_text


def check_retrieve_and_delete() -> Any:
    made = client.responses.create(**SEEDED)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    items = client.responses.input_items.list(made.id)
    assert [one.type for one in items] == ["message"]
    client.responses.delete(made.id)
    return str(raised(openai.NotFoundError, client.responses.retrieve, response_id=made.id))


def check_not_stored() -> Any:
    made = client.responses.create(**SEEDED, store=False)
    return str(raised(openai.NotFoundError, client.responses.retrieve, response_id=made.id))


def check_background() -> Any:
    made = client.responses.create(**SEEDED, background=True)
    assert made.background
    assert made.status in ("queued", "in_progress", "completed", "incomplete")
    end = time.monotonic() + LIMIT_S
    while made.status in ("queued", "in_progress"):
        assert time.monotonic() < end, made.status
        time.sleep(0.1)
        made = client.responses.retrieve(made.id)
    assert made.output_text == client.responses.create(**SEEDED).output_text
    return made.status


def check_background_stream() -> Any:
    """A stream that is left, and taken up again behind the last event that came."""
    stream = client.responses.create(**SEEDED | {"max_output_tokens": 100}, background=True, stream=True)
    begun = [next(stream) for _ in range(8)]
    stream.close()
    assert begun[0].type == "response.created"
    made = begun[0].response.id
    rest = list(client.responses.retrieve(made, stream=True, starting_after=begun[-1].sequence_number))
    events = begun + rest
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == client.responses.retrieve(made).output_text
    return len(events)


def check_cancel() -> Any:
    made = client.responses.create(
        **SEEDED | {"max_output_tokens": 1500, "temperature": 1.0}, background=True, extra_body={"ignore_eos": True}
    )
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    return cancelled.status


def check_tools() -> Any:
    """An agent's loop: a call, its result beside the earlier response, a message."""
    asked = SEEDED | {"max_output_tokens": 200}
    called = client.responses.create(**asked, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    (call,) = [one for one in called.output if one.type == "function_call"]
    assert call.name == "clock"
    assert json.loads(call.arguments)["city"] in ("Rome", "Paris")
    told: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    answer = client.responses.create(
        **asked | {"input": told}, previous_response_id=called.id, tools=[CLOCK], tool_choice="none"
    )
    assert answer.output_text
    return [call.arguments, answer.output_text]


def check_streamed_call() -> Any:
    asked = SEEDED | {"max_output_tokens": 200}
    events = list(
        client.responses.create(
            **asked,
            tools=[CLOCK],
            tool_choice={"type": "function", "name": "clock"},
            parallel_tool_calls=False,
            stream=True,
        )
    )
    said = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert said == done.arguments
    assert json.loads(said)["city"] in ("Rome", "Paris")
    return said


def check_parse() -> Any:
    response = client.responses.parse(**SEEDED | {"max_output_tokens": 200}, text_format=Guest)
    assert isinstance(response.output_parsed, Guest)
    return response.output_parsed.model_dump()


def check_errors() -> Any:
    seen = []
    wrong: list[tuple[type[openai.APIStatusError], str, Any]] = [
        (openai.BadRequestError, "temperature", 9),
        (openai.NotFoundError, "model", "no-such-model"),
        (openai.BadRequestError, "previous_response_id", "resp_nosuch"),
    ]
    for kind, name, value in wrong:
        error = raised(kind, client.responses.create, **SEEDED | {name: value})
        assert error.param == name
        seen.append(str(error))
    return seen


async def check_async() -> Any:
    async with AsyncOpenAI(base_url=OPENAI, api_key=KEY) as asking:
        whole = await asking.responses.create(**SEEDED)
        said = ""
        async for event in await asking.responses.create(**SEEDED, stream=True):
            said += event.delta if event.type == "response.output_text.delta" else ""
    assert said == whole.output_text
    return said


if __name__ == "__main__":
    run_checks(globals())
