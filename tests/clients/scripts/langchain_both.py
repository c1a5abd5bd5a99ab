"""langchain-openai and langchain-anthropic: messages, streams, bound tools, structured output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from checks import BASE, KEY, MODEL, OPENAI, run_checks
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

CHAT: Any = {"model": MODEL, "base_url": OPENAI, "api_key": KEY, "temperature": 0}
openai = ChatOpenAI(**CHAT, max_tokens=24, stream_usage=True)
openai_long = ChatOpenAI(**CHAT, max_tokens=300)
anthropic: Any = ChatAnthropic(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_tokens=24)
anthropic_long: Any = ChatAnthropic(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_tokens=300)
ASKED: list[Any] = [SystemMessage("You are a sentry."), HumanMessage("Who goes there?")]


@tool
def clock(city: Literal["Rome", "Paris"]) -> str:
    """The time of a city."""
    return f"noon in {city}"


class Guest(BaseModel):
    """Who stands at the gate."""

    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]


def loop(forced: Any, free: Any) -> Any:
    """A call, its result, and what is said then."""
    messages = list(ASKED)
    called = forced.invoke(messages)
    (call,) = called.tool_calls
    assert call["name"] == "clock"
    assert call["args"]["city"] in ("Rome", "Paris")
    result = clock.invoke(call)
    assert isinstance(result, ToolMessage)
    told = free.invoke([*messages, called, result])
    assert told.text
    return [call, told.text]


def check_openai_invoke() -> Any:
    answer = openai.invoke(ASKED)
    assert answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    return answer.model_dump()


def check_openai_stream() -> Any:
    whole = None
    for chunk in openai.stream(ASKED):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.text == openai.invoke(ASKED).text
    assert whole.usage_metadata is not None
    return whole.text


async def check_openai_async() -> Any:
    answers = await openai.abatch([ASKED, ASKED])
    assert answers[0].text == answers[1].text
    return answers[0].text


def check_openai_bind_tools() -> Any:
    forced = openai_long.bind_tools([clock], tool_choice="required", parallel_tool_calls=False, strict=True)
    return loop(forced, openai.bind_tools([clock], tool_choice="none"))


def check_openai_structured_output() -> Any:
    found: dict[str, Any] = {}
    for method in ("json_schema", "function_calling"):
        guest = openai_long.with_structured_output(Guest, method=method, strict=True).invoke(ASKED)
        assert isinstance(guest, Guest)
        found[method] = guest.model_dump()
    return found


def check_openai_open_schema() -> Any:
    """Without `strict` the library says of no object that it has no further properties."""
    (call,) = (
        openai_long.bind_tools([clock], tool_choice="required", parallel_tool_calls=False).invoke(ASKED).tool_calls
    )
    return call


def check_openai_responses() -> Any:
    answer = ChatOpenAI(**CHAT, max_tokens=24, use_responses_api=True).invoke(ASKED)
    assert answer.text
    return answer.model_dump()


def check_openai_completions() -> Any:
    return OpenAI(**CHAT, max_tokens=24).invoke("O Romeo,")


def check_anthropic_invoke() -> Any:
    answer = anthropic.invoke(ASKED)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in anthropic.stream(ASKED))
    return answer.model_dump()


def check_anthropic_bind_tools() -> Any:
    forced = anthropic_long.bind_tools([clock], tool_choice="any", parallel_tool_calls=False, strict=True)
    return loop(forced, anthropic.bind_tools([clock], tool_choice={"type": "none"}))


def check_anthropic_structured_output() -> Any:
    guest = anthropic_long.with_structured_output(Guest).invoke(ASKED)
    assert isinstance(guest, Guest)
    return guest.model_dump()


if __name__ == "__main__":
    run_checks(globals())
