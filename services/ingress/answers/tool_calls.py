"""Parts of a message as OpenAI's clients get them: whole, and as deltas. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from kvchat.message_builder import call_id
from kvchat.parts import ArgumentsGrew, CallBegan, Part, Said, Thought
from kvfleet.ingress.http.answer_types import Described, Natural


class CallText(Described):
    name: str
    arguments: str


class CallAnswer(Described):
    id: str
    type: Literal["function"]
    function: CallText


class CallTextDelta(Described):
    name: str = ""
    arguments: str = ""


class CallDelta(Described):
    index: Natural
    function: CallTextDelta
    id: str = ""
    type: Literal["function"] = "function"


def delta_of(parts: Iterable[Part], request: str, choice: int) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Said(text):
                delta["content"] = delta.get("content", "") + text
            case Thought(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallBegan(index, name):
                function = {"name": name, "arguments": ""}
                known = {"index": index, "id": call_id(request, choice, index), "type": "function"}
                calls[index] = known | {"function": function}
            case ArgumentsGrew(index, text):
                calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                calls[index]["function"]["arguments"] += text
    return delta | ({"tool_calls": [*calls.values()]} if calls else {})


def message_of(parts: Iterable[Part], request: str, choice: int) -> dict[str, Any]:
    told = delta_of(parts, request, choice)
    calls = [{key: value for key, value in call.items() if key != "index"} for call in told.pop("tool_calls", ())]
    content = told.pop("content", None if calls else "")
    message = {"role": "assistant", "content": content, "refusal": None, **told}
    return message | ({"tool_calls": calls} if calls else {})
