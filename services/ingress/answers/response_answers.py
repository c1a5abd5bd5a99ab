"""Answers of /v1/responses: the types of responses, their items and events, which `openapi` describes. Pure."""

from __future__ import annotations

from typing import Any, Literal

from kvfleet.ingress.answers.openai_answers import FleetNote, ScoredToken
from kvfleet.ingress.http.answer_types import Described, Natural

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Described):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class OutputThought(Described):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Described):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(Described):
    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[OutputThought]
    encrypted_content: None


class OutputCall(Described):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Described):
    cached_tokens: Natural
    cache_write_tokens: Natural


class OutputDetails(Described):
    reasoning_tokens: Natural


class ResponseUsage(Described):
    input_tokens: Natural
    input_tokens_details: InputDetails
    output_tokens: Natural
    output_tokens_details: OutputDetails
    total_tokens: Natural


class ResponseFault(Described):
    code: str
    message: str


class Incomplete(Described):
    reason: Literal["max_output_tokens"]


class ReasoningTold(Described):
    effort: str | None
    summary: str | None


class ResponseAnswer(Described):
    id: str
    object: Literal["response"]
    created_at: Natural
    status: Status
    background: bool
    error: ResponseFault | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: Natural | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningTold
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: Natural
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None
    kvfleet: FleetNote | None


class ResponseDeleted(Described):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Described):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Described):
    object: Literal["response.input_tokens"]
    input_tokens: Natural


# Events. Their numbers follow from the tokens alone, however these arrive.


class ResponseEvent(Described):
    """With the whole response as it is."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: Natural
    response: ResponseAnswer


class ItemEvent(Described):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: Natural
    output_index: Natural
    item: OutputItem


class PartEvent(Described):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    content_index: Literal[0]
    part: OutputText | OutputThought


class TextGrew(Described):
    type: Literal["response.output_text.delta"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    content_index: Literal[0]
    delta: str
    logprobs: list[ScoredToken]


class TextDone(Described):
    type: Literal["response.output_text.done"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    content_index: Literal[0]
    text: str
    logprobs: list[ScoredToken]


class ThoughtGrew(Described):
    type: Literal["response.reasoning_text.delta"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    content_index: Literal[0]
    delta: str


class ThoughtDone(Described):
    type: Literal["response.reasoning_text.done"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    content_index: Literal[0]
    text: str


class CallGrew(Described):
    type: Literal["response.function_call_arguments.delta"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    delta: str


class CallDone(Described):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: Natural
    output_index: Natural
    item_id: str
    arguments: str


NumberedEvent = (
    ResponseEvent | ItemEvent | PartEvent | TextGrew | TextDone | ThoughtGrew | ThoughtDone | CallGrew | CallDone
)
RESPONSE_EVENTS = (
    ResponseEvent, ItemEvent, PartEvent, TextGrew, TextDone, ThoughtGrew, ThoughtDone, CallGrew, CallDone,
)  # fmt: skip
