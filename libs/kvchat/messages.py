"""Messages of a chat, as OpenAI's clients send them and as templates get them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from kvservice.fields import Made


@dataclass(frozen=True, slots=True)
class TextPart:
    type: Literal["text"]
    text: str


_PARTS = TypeAdapter(Annotated[list[TextPart], Field(fail_fast=True)])


def _read_content(said: Any, read_text: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Parts become one text; an assistant's may be absent."""
    if type(said) is list:
        return "".join(part.text for part in _PARTS.validate_python(said))
    return "" if said is None and info.data.get("role") == "assistant" else read_text(said)


def _refuse(said: Any) -> None:
    if said:
        raise PydanticCustomError("unserved", "not supported by this server")


Content = WrapValidator(_read_content, json_schema_input_type=str | list[TextPart] | None)
Role = Literal["system", "developer", "user", "assistant", "tool"]
Nothing = Annotated[None, Made(Annotated[Any, WithJsonSchema({"enum": [None, False, 0, "", [], {}]})], _refuse)]


@dataclass(frozen=True, slots=True)
class CalledFunction:
    name: str
    arguments: str

    def as_template_value(self) -> dict[str, Any]:
        """Templates write arguments as JSON themselves, so they get what the text says, where it says an object."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    __pydantic_config__ = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"role": {"const": "assistant"}}},
            "else": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        }
    )

    role: Annotated[Role, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str, Content, Field(default_factory=lambda: None, validate_default=True)]
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # of an earlier turn, which a template may want
    function_call: Nothing = None
    audio: Nothing = None
    refusal: Nothing = None
    annotations: Nothing = None


def template_values(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """As transformers' templates expect them. A tool's answer has the name of the tool that was called."""
    names: dict[str, str] = {}
    values = []
    for one in messages:
        value: dict[str, Any] = {"role": one.role, "content": one.content}
        if one.tool_calls:
            names |= {call.id: call.function.name for call in one.tool_calls}
            value["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.as_template_value()}
                for call in one.tool_calls
            ]
        told = {
            "tool_call_id": one.tool_call_id,
            "name": one.name if one.name is not None else names.get(one.tool_call_id or ""),
            "reasoning_content": one.reasoning_content,
        }
        values.append(value | {key: said for key, said in told.items() if said is not None})
    return values
