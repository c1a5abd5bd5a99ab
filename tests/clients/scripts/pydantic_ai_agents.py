"""pydantic-ai: agents with structured output and a tool, on chats of OpenAI's form and on messages of Anthropic's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from checks import BASE, KEY, MODEL, OPENAI, run_checks
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

of_openai = OpenAIProvider(base_url=OPENAI, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=of_openai)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE, api_key=KEY))
SETTINGS = ModelSettings(temperature=0.0, max_tokens=300, parallel_tool_calls=False)


class Guest(BaseModel):
    """Who stands at the gate."""

    name: Annotated[str, Field(max_length=12)]
    of: Literal["sea", "rain", "night"]


class ToolFirst(AbstractCapability[None]):
    """The demo model would not choose it by itself, or for ever."""

    def get_model_settings(self) -> Any:
        return lambda ctx: ModelSettings(tool_choice=["clock" if ctx.run_step == 1 else "final_result"])


def tool_and_output(model: Any) -> Any:
    asked: list[str] = []

    def clock(city: Literal["Rome", "Paris"]) -> str:
        """The time of a city."""
        asked.append(city)
        return f"noon in {city}"

    agent = Agent(
        model, output_type=ToolOutput(Guest), tools=[clock], capabilities=[ToolFirst()], model_settings=SETTINGS,
        instructions="You are a sentry.",
    )  # fmt: skip
    result = agent.run_sync("Who goes there?")
    assert len(asked) == 1
    assert isinstance(result.output, Guest)
    return [asked, result.output.model_dump()]


def check_text() -> Any:
    result = Agent(chat, model_settings=SETTINGS | {"max_tokens": 24}).run_sync("Who goes there?")
    assert result.output
    assert result.usage.output_tokens > 0
    return result.output


async def check_stream() -> Any:
    agent = Agent(chat, model_settings=SETTINGS | {"max_tokens": 24})
    async with agent.run_stream("Who goes there?") as stream:
        said = "".join([text async for text in stream.stream_text(delta=True)])
    assert said == (await agent.run("Who goes there?")).output
    return said


def check_output_by_tool() -> Any:
    result = Agent(chat, output_type=ToolOutput(Guest), model_settings=SETTINGS).run_sync("Who goes there?")
    assert isinstance(result.output, Guest)
    return result.output.model_dump()


def check_output_by_schema() -> Any:
    result = Agent(chat, output_type=NativeOutput(Guest), model_settings=SETTINGS).run_sync("Who goes there?")
    assert isinstance(result.output, Guest)
    return result.output.model_dump()


def check_tool_and_output() -> Any:
    return tool_and_output(chat)


def check_anthropic_text() -> Any:
    result = Agent(messages, model_settings=SETTINGS | {"max_tokens": 24}).run_sync("Who goes there?")
    assert result.output
    return result.output


def check_anthropic_tool_and_output() -> Any:
    return tool_and_output(messages)


def check_responses() -> Any:
    return tool_and_output(OpenAIResponsesModel(MODEL, provider=of_openai))


if __name__ == "__main__":
    run_checks(globals())
