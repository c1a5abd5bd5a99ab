"""Anthropic's library: messages, whole and streamed, tools and their results, thinking, counting, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from checks import BASE, KEY, MODEL, raised, run_checks

client = Anthropic(base_url=BASE, api_key=KEY)
ASKED: Any = {
    "model": MODEL,
    "max_tokens": 24,
    "extra_body": {"temperature": 0},  # the library has no argument for it any more; requests may still say it
    "system": "You are a sentry.",
    "messages": [{"role": "user", "content": "Who goes there?"}],
}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Rome", "Paris"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLING: Any = ASKED | {"tools": [WEATHER, CLOCK], "max_tokens": 300}
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def is_weather(said: Any) -> bool:
    return set(said) == {"city", "days"} and said["city"] in ("Rome", "Paris") and 1 <= said["days"] <= 9


def check_create() -> Any:
    message = client.messages.create(**ASKED)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert text_of(message)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 24
    return message.model_dump()


def check_request_id() -> Any:
    """What a user names when something went wrong. The library reads the header `request-id`."""
    named = client.messages.create(**ASKED)._request_id
    error = raised(anthropic.NotFoundError, client.messages.create, **ASKED | {"model": "no-such-model"})
    assert named
    assert error.request_id
    return [named, error.request_id]


def check_blocks() -> Any:
    """As Claude Code and its like send them: lists of blocks, with marks of what may be cached."""
    cached: Any = {"type": "ephemeral"}
    asked = ASKED | {
        "system": [{"type": "text", "text": "You are a sentry. " * 20, "cache_control": cached}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who goes there?", "cache_control": cached}]}
        ],
        "metadata": {"user_id": "someone"},
    }
    assert text_of(client.messages.create(**asked))
    usage = client.messages.create(**asked).usage
    assert usage.cache_read_input_tokens
    return usage.model_dump()


def check_stream() -> Any:
    events = list(client.messages.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    return kinds


def check_stream_helper() -> Any:
    with client.messages.stream(**ASKED) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == text_of(final) == text_of(client.messages.create(**ASKED))
    assert final.usage.output_tokens > 0
    return final.model_dump()


def check_any_tool() -> Any:
    message = client.messages.create(**CALLING, tool_choice=ONE)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert is_weather(call.input) if call.name == "weather" else call.input == {}
    return message.model_dump()


def check_named_tool() -> Any:
    named: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    message = client.messages.create(**CALLING, tool_choice=named)
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert is_weather(call.input)
    return call.model_dump()


def check_streamed_tool() -> Any:
    named: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(**CALLING, tool_choice=named) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = final.content
    assert call.type == "tool_use"
    assert is_weather(call.input)
    assert final.stop_reason == "tool_use"
    return pieces


def check_agent_loop() -> Any:
    """Call, result, call, result, text: what the library gave goes back as it is."""
    messages: list[Any] = list(ASKED["messages"])
    for choice in (ONE, ONE, {"type": "none"}):
        asked = CALLING | {"messages": messages, "tool_choice": choice, "tools": [WEATHER]}
        message = client.messages.create(**asked | {"max_tokens": 300 if choice is ONE else 24})
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain."}]}
            for call in message.content
            if call.type == "tool_use"
        ]
        assert results
        messages.append({"role": "user", "content": results})
    assert len(messages) == 6
    assert text_of(message)
    return text_of(message)


def check_stop_sequences() -> Any:
    said = text_of(client.messages.create(**ASKED))
    stop = said[4:8]
    message = client.messages.create(**ASKED, stop_sequences=[stop])
    assert text_of(message) == said.partition(stop)[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    return [stop, text_of(message)]


def check_count_tokens() -> Any:
    fields = ("model", "messages", "system")
    counted = client.messages.count_tokens(**{name: ASKED[name] for name in fields})
    usage = client.messages.create(**ASKED).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return counted.input_tokens


def check_thinking() -> Any:
    """The demo model has never learnt to: the field is taken, and an answer comes."""
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**ASKED | {"max_tokens": 1100}, thinking=thinking)
    assert {block.type for block in message.content} <= {"text", "thinking"}
    assert message.content
    return message.stop_reason


def check_models() -> Any:
    """Written for Anthropic's own pages of models, it reads OpenAI's list too."""
    return [model.id for model in client.models.list()]


def check_errors() -> Any:
    stranger = Anthropic(base_url=BASE, api_key="kvf_wrong")
    seen = {}
    wrong: list[tuple[str, type[anthropic.APIStatusError], Anthropic, Any]] = [
        ("temperature", anthropic.BadRequestError, client, {"extra_body": {"temperature": 1.5}}),
        ("messages", anthropic.BadRequestError, client, {"messages": []}),
        ("no_such_field", anthropic.BadRequestError, client, {"extra_body": {"no_such_field": 1}}),
        ("model", anthropic.NotFoundError, client, {"model": "no-such-model"}),
        ("key", anthropic.AuthenticationError, stranger, {}),
    ]
    for name, kind, asking, change in wrong:
        error = raised(kind, asking.messages.create, **ASKED | change)
        assert isinstance(error.body, dict)
        assert error.body["type"] == "error"
        assert name in error.body["error"]["message"]
        seen[name] = [error.status_code, error.body["error"]["type"]]
    return seen


def check_error_of_a_stream() -> Any:
    def stream() -> None:
        with client.messages.stream(**ASKED | {"model": "no-such-model"}) as stream:
            list(stream)

    return str(raised(anthropic.NotFoundError, stream))


def check_bearer() -> Any:
    """As `ANTHROPIC_AUTH_TOKEN` has it sent."""
    return text_of(Anthropic(base_url=BASE, auth_token=KEY).messages.create(**ASKED))


async def check_async() -> Any:
    async with AsyncAnthropic(base_url=BASE, api_key=KEY) as asking:
        whole = await asking.messages.create(**ASKED)
        async with asking.messages.stream(**ASKED) as stream:
            said = "".join([text async for text in stream.text_stream])
    assert said == text_of(whole)
    return said


if __name__ == "__main__":
    run_checks(globals())
