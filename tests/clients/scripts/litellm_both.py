"""litellm: kvfleet as a server of OpenAI's form, and of Anthropic's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import litellm
from checks import BASE, KEY, MODEL, OPENAI, raised, run_checks
from pydantic import BaseModel, Field

ASKED: list[Any] = [{"role": "user", "content": "Who goes there?"}]
CHAT: Any = {
    "model": f"openai/{MODEL}", "api_base": OPENAI, "api_key": KEY, "messages": ASKED, "temperature": 0,
    "max_tokens": 24,
}  # fmt: skip
MESSAGES: Any = CHAT | {"model": f"anthropic/{MODEL}", "api_base": BASE}
CLOCK: Any = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Guest(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]


def said_by(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def called_by(answer: Any) -> Any:
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")
    assert answer.choices[0].finish_reason == "tool_calls"
    return call.model_dump()


def check_openai() -> Any:
    answer = litellm.completion(**CHAT)
    said = answer.choices[0].message.content
    assert said
    assert answer.usage.completion_tokens > 0
    assert said_by(litellm.completion(**CHAT, stream=True)) == said
    return answer.model_dump()


def check_openai_tools() -> Any:
    return called_by(
        litellm.completion(
            **CHAT | {"max_tokens": 200}, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False
        )
    )


def check_openai_schema() -> Any:
    answer = litellm.completion(**CHAT | {"max_tokens": 200}, response_format=Guest)
    return Guest.model_validate_json(answer.choices[0].message.content).model_dump()


def check_openai_text() -> Any:
    asked = {name: value for name, value in CHAT.items() if name != "messages"}
    answer = litellm.text_completion(**asked | {"model": f"text-completion-openai/{MODEL}"}, prompt="O Romeo,")
    assert answer.choices[0].text
    return answer.choices[0].text


async def check_openai_async() -> Any:
    whole = (await litellm.acompletion(**CHAT)).choices[0].message.content
    said = ""
    async for chunk in await litellm.acompletion(**CHAT, stream=True):
        said += chunk.choices[0].delta.content or ""
    assert said == whole
    return said


def check_openai_errors() -> Any:
    wrong: list[tuple[type[Exception], Any]] = [
        (litellm.BadRequestError, {"temperature": 9}),
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.AuthenticationError, {"api_key": "kvf_wrong"}),
    ]
    return [str(raised(kind, litellm.completion, **CHAT | change)) for kind, change in wrong]


def check_anthropic() -> Any:
    answer = litellm.completion(**MESSAGES)
    said = answer.choices[0].message.content
    assert said == litellm.completion(**CHAT).choices[0].message.content
    assert answer.usage.completion_tokens > 0
    assert said_by(litellm.completion(**MESSAGES, stream=True)) == said
    return answer.model_dump()


def check_anthropic_tools() -> Any:
    return called_by(
        litellm.completion(
            **MESSAGES | {"max_tokens": 200}, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False
        )
    )


def check_anthropic_errors() -> Any:
    asked = MESSAGES | {"model": "anthropic/no-such-model"}
    return str(raised(litellm.NotFoundError, litellm.completion, **asked))


if __name__ == "__main__":
    run_checks(globals())
