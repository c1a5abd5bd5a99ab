"""Items of /v1/responses, what goes in and what comes out, and the chat's messages that they are. Pure.

reasoning, message, function_call   in a row: one message of the assistant
function_call_output                a message of the role tool
item_reference                      an item of a stored response, by its id
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from kvchat.messages import CalledFunction, ChatMessage, ToolCall

ID = re.compile(r"resp_([a-z2-7]{26})\Z")
ITEM_ID = "^(?:msg|fc|rs)_([a-z2-7]{26})_[0-9]{1,6}$"  # of an item that came out


def request_of(response: str) -> str | None:
    """The request that made a response; None for no id of ours."""
    found = ID.match(response)
    return found[1] if found else None


def request_of_item(item: str) -> str:
    """The request that made an output's item, by its id."""
    return item.split("_")[1]


@dataclass(frozen=True, slots=True)
class SaidPart:
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: tuple[()] = ()
    logprobs: list[Any] = field(default_factory=list)  # which a client sends back


@dataclass(frozen=True, slots=True)
class MessageItem:
    role: Literal["user", "assistant", "system", "developer"]
    content: str | tuple[SaidPart, ...]
    type: Literal["message"] = "message"
    id: str = ""
    status: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True)
class FunctionCallItem:
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class FunctionOutputItem:
    type: Literal["function_call_output"]
    call_id: str
    output: str | tuple[SaidPart, ...]
    id: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class SummaryPart:
    type: Literal["summary_text"]
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    type: Literal["reasoning_text"]
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningItem:
    type: Literal["reasoning"]
    summary: tuple[SummaryPart, ...] = ()
    content: tuple[ReasoningPart, ...] = ()
    id: str = ""
    status: str = ""


@dataclass(frozen=True, slots=True)
class ReferenceItem:
    id: Annotated[str, Field(pattern=ITEM_ID)]
    type: Literal["item_reference"] = "item_reference"


def _type_of(said: Any) -> str:
    if not isinstance(said, Mapping):
        return "message"
    kind = said.get("type")
    return str(kind) if kind is not None else "message" if "role" in said else "item_reference"


def without_nulls(said: Any) -> Any:
    """Clients send items back with all fields that a type has."""
    if isinstance(said, Mapping):
        return {key: without_nulls(value) for key, value in said.items() if value is not None}
    return [without_nulls(one) for one in said] if isinstance(said, list) else said


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(
        _type_of,
        custom_error_type="unserved",
        custom_error_message="items of this type are not supported by this server",
    ),
]
ItemKind = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ReferenceItem
_ITEMS: TypeAdapter[tuple[ItemKind, ...]] = TypeAdapter(tuple[Item, ...])


def read_items(said: list[Any]) -> tuple[ItemKind, ...]:
    """Items that were read, or made, before."""
    return _ITEMS.validate_python(without_nulls(said))


def messages_of(items: Iterable[ItemKind]) -> Iterator[ChatMessage]:
    """What an assistant thought, said and called in a row is one message."""
    thoughts, texts, calls = list[str](), list[str](), list[ToolCall]()

    def said() -> Iterator[ChatMessage]:
        if thoughts or texts or calls:
            reasoning = "".join(thoughts) if thoughts else None
            yield ChatMessage("assistant", "".join(texts), tool_calls=tuple(calls), reasoning_content=reasoning)
        for one in (thoughts, texts, calls):
            one.clear()

    for item in items:
        match item:
            case ReasoningItem():
                if texts or calls:
                    yield from said()
                thoughts += [part.text for part in item.content]
            case MessageItem(role="assistant"):
                if calls:
                    yield from said()
                texts.append(_text(item.content))
            case FunctionCallItem():
                calls.append(ToolCall(item.call_id, CalledFunction(item.name, item.arguments)))
            case MessageItem():
                yield from said()
                yield ChatMessage("system" if item.role == "developer" else item.role, _text(item.content))
            case FunctionOutputItem():
                yield from said()
                yield ChatMessage("tool", _text(item.output), tool_call_id=item.call_id)
    yield from said()


def _text(said: str | tuple[SaidPart, ...]) -> str:
    return said if isinstance(said, str) else "".join(part.text for part in said)
