"""Bodies of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them, read as chats. Pure.

system                             a system message
tool_use, thinking of an assistant calls, and reasoning, of its message
tool_result of a user              a message of the role tool, before the user's text
cache_control, metadata            accepted: what may be reused is, anyway
thinking.budget_tokens             accepted, as a hint: reasoning ends with max_tokens alone
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvchat.conversation import MAX_MESSAGES
from kvchat.messages import CalledFunction, ChatMessage, ToolCall
from kvchat.tools import FunctionName, FunctionSpec, NamedFunction, NamedTool, ToolAsk, ToolSpec
from kvfleet.ingress.requests.asks import ANYWHERE, MAX_STOPS, Count, FleetAsk, PlacementAsk, SamplingAsk, Share, Stop
from kvfleet.ingress.requests.bodies import MAX_MODEL_CHARS, ChatAsk
from kvfleet.ingress.requests.grammars import GrammarAsk
from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar
from kvproto.response_format import grammar_of_schema
from kvservice.fields import Body, BodyForm, Flag, Number


@dataclass(frozen=True, slots=True)
class TextBlock:
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: None = None


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | tuple[TextBlock, ...] = ""
    is_error: Flag = False
    cache_control: dict[str, Any] | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


@dataclass(frozen=True, slots=True)
class SaidMessage:
    role: Literal["user", "assistant"]
    content: str | tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class CustomTool:
    name: FunctionName
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    description: str | None = None
    strict: Flag | None = None
    cache_control: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


@dataclass(frozen=True, slots=True)
class Thinking:
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    type: Literal["json_schema"]
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OutputConfig:
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountAsk:
    __pydantic_config__ = ConfigDict(extra="forbid")

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
    messages: Annotated[tuple[SaidMessage, ...], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | tuple[TextBlock, ...] = ""
    tools: tuple[CustomTool, ...] = ()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesAsk(CountAsk):
    max_tokens: Count
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)] = ()
    stream: Flag = False
    placement: PlacementAsk = ANYWHERE
    kvfleet: FleetAsk | None = None


_OTHERS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("metadata", "cache_control", "context_management", "betas")),
    "service_tier": ("auto", "standard_only"),
}
MESSAGES = BodyForm(MessagesAsk, _OTHERS)
COUNT_TOKENS = BodyForm(CountAsk, _OTHERS)


def read_messages(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    ask = MESSAGES.read(body)
    sampling = SamplingAsk(
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        stop=ask.stop_sequences,
        grammar=_grammar(ask.output_config),
    )
    return chat_of(ask, sampling, stream=ask.stream, placement=ask.placement, kvfleet=ask.kvfleet)


def read_count(body: Body) -> ChatAsk:
    """Raises InvalidRequest naming the field."""
    return chat_of(COUNT_TOKENS.read(body), SamplingAsk())


def chat_of(ask: CountAsk, sampling: SamplingAsk, **more: Any) -> ChatAsk:
    system = ask.system if isinstance(ask.system, str) else "".join(one.text for one in ask.system)
    messages = [ChatMessage("system", system)] if system else []
    for at, said in enumerate(ask.messages):
        messages += _assistant(said, at) if said.role == "assistant" else _user(said, at)
    tools = ToolAsk(tuple(_tool(one) for one in ask.tools), _choice(ask.tool_choice), _parallel(ask.tool_choice))
    values = {} if ask.thinking is None else {"enable_thinking": ask.thinking.type != "disabled"}
    if ask.output_config is not None and (effort := ask.output_config.effort) is not None:
        more["reasoning_effort"] = "xhigh" if effort == "max" else effort
    return ChatAsk(model=ask.model, messages=tuple(messages), sampling=sampling, grammars=GrammarAsk(), tools=tools,
                   chat_template_kwargs=values, **more)  # fmt: skip


def _grammar(said: OutputConfig | None) -> Grammar | None:
    if said is None or said.format is None:
        return None
    return grammar_of_schema(said.format.schema, "output_config.format.schema")


def _user(said: SaidMessage, at: int) -> Iterator[ChatMessage]:
    texts = [said.content] if isinstance(said.content, str) else []
    for block in () if isinstance(said.content, str) else said.content:
        if isinstance(block, ToolResultBlock):
            answer = block.content if isinstance(block.content, str) else "".join(one.text for one in block.content)
            yield ChatMessage("tool", answer, tool_call_id=block.tool_use_id)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise InvalidRequest(f"a user says no {block.type}", field=f"messages[{at}].content")
    if texts:
        yield ChatMessage("user", "".join(texts))


def _assistant(said: SaidMessage, at: int) -> Iterator[ChatMessage]:
    blocks = (TextBlock("text", said.content),) if isinstance(said.content, str) else said.content
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise InvalidRequest("an assistant gives no tool_result", field=f"messages[{at}].content")
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    yield ChatMessage(
        "assistant",
        "".join(block.text for block in blocks if isinstance(block, TextBlock)),
        tool_calls=tuple(
            ToolCall(block.id, CalledFunction(block.name, json.dumps(block.input, ensure_ascii=False)))
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ),
        reasoning_content="".join(thoughts) if thoughts else None,
    )


def _tool(said: CustomTool) -> ToolSpec:
    return ToolSpec("function", FunctionSpec(said.name, said.description, said.input_schema, said.strict))


def _choice(said: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedTool | None:
    if said is None:
        return None
    if said.type == "tool":
        if said.name is None:
            raise InvalidRequest("missing", field="tool_choice.name")
        return NamedTool("function", NamedFunction(said.name))
    return "required" if said.type == "any" else "none" if said.type == "none" else "auto"


def _parallel(said: ToolChoice | None) -> bool | None:
    return False if said is not None and said.disable_parallel_tool_use else None
