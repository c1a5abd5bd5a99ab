"""Anthropic's answers: the types of messages and events, which `openapi` describes. Pure."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from kvfleet.ingress.http.answer_types import Described, Natural
from kvproto.errors import KvfleetError
from kvproto.messages import Finished, FinishReason


class SaidText(Described):
    type: Literal["text"]
    text: str


class SaidThought(Described):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUse(Described):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


BlockAnswer = SaidText | SaidThought | ToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Described):
    """What was read from the cache is not counted among the input."""

    input_tokens: Natural
    cache_read_input_tokens: Natural
    cache_creation_input_tokens: Natural
    output_tokens: Natural


class MessageAnswer(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockAnswer]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(Described):
    type: Literal["message_start"]
    message: MessageAnswer


class BlockStart(Described):
    type: Literal["content_block_start"]
    index: Natural
    content_block: BlockAnswer


class TextDelta(Described):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Described):
    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(Described):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Described):
    type: Literal["content_block_delta"]
    index: Natural
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Described):
    type: Literal["content_block_stop"]
    index: Natural


class MessageEnd(Described):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Described):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Described):
    type: Literal["message_stop"]


class ToldFault(Described):
    type: str
    message: str


class MessageError(Described):
    """The whole answer, or the last event."""

    type: Literal["error"]
    error: ToldFault


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
MESSAGE_EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop)
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip

ID_HEADERS = (b"x-request-id", b"request-id")  # Anthropic's clients read the second


def message_error(error: KvfleetError) -> bytes:
    status = error.http_status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return orjson.dumps(MessageError("error", ToldFault(kind, str(error))))


def message_usage(prompt: int, cached: int, generated: int) -> MessageUsage:
    return MessageUsage(prompt - cached, cached, 0, generated)


def message_end(finished: Finished, *, called: bool) -> MessageEnd:
    if finished.stop:
        return MessageEnd("stop_sequence", finished.stop)
    if finished.reason is FinishReason.LENGTH:
        return MessageEnd("max_tokens", None)
    return MessageEnd("tool_use" if called else "end_turn", None)
