"""The OpenAPI 3.1 description at /openapi.json. Pure. The forms that read bodies (`requests`), the patterns that read
headers and the types of answers are the schemas: an operation names a type in place of its schema."""

from __future__ import annotations

from typing import Any

from kvfleet.ingress.answers.anthropic_answers import MESSAGE_EVENTS, MessageAnswer, MessageError
from kvfleet.ingress.answers.native_events import NATIVE_EVENTS
from kvfleet.ingress.answers.openai_answers import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from kvfleet.ingress.answers.response_answers import (
    RESPONSE_EVENTS,
    InputItems,
    InputTokens,
    ResponseAnswer,
    ResponseDeleted,
)
from kvfleet.ingress.fleet import report
from kvfleet.ingress.fleet.batch_operations import BATCH_OPERATIONS
from kvfleet.ingress.fleet.operations import (
    COUNT,
    ERRORS,
    KNOWN,
    OF_NEWEST,
    OF_RESPONSES,
    PATH,
    TEXT,
    Operation,
    asking,
    file_of,
    generating,
    health,
    json_of,
    parameter,
    reading,
    streaming,
)
from kvfleet.ingress.fleet.report import NewestPlacementsAnswer, PlacementsAnswer
from kvfleet.ingress.fleet.timeline import TimelineAnswer
from kvfleet.ingress.http.answer_types import described
from kvfleet.ingress.requests.anthropic import COUNT_TOKENS, MESSAGES
from kvfleet.ingress.requests.batches import BATCH
from kvfleet.ingress.requests.bodies import CHAT, COMPLETION, GENERATE
from kvfleet.ingress.requests.responses import INPUT_TOKENS, RESPONSES
from kvfleet.ingress.requests.texts import DETOKENIZE, TOKENIZE
from kvservice.fields import Schema

VERSION = "3.1.0"
_OPENAPI: Schema = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "properties": {"openapi": TEXT, "info": {"type": "object"}, "paths": {"type": "object"}},
}
OPERATIONS = (
    generating("/v1/chat/completions", "A chat's next message, as OpenAI's.", CHAT, ChatAnswer, ChatChunk),
    generating("/v1/completions", "A text's continuation, as OpenAI's.", COMPLETION, CompletionAnswer, CompletionChunk),
    generating("/generate", "A turn of a session, streamed.", GENERATE, None, *NATIVE_EVENTS),
    generating(
        "/v1/messages",
        "A chat's next message, as Anthropic's.",
        MESSAGES,
        MessageAnswer,
        *MESSAGE_EVENTS,
        error=MessageError,
    ),
    asking(
        "/v1/messages/count_tokens", "What it would have for input.", COUNT_TOKENS, report.CountAnswer, MessageError
    ),
    generating("/v1/responses", "A response, as OpenAI's.", RESPONSES, ResponseAnswer, *RESPONSE_EVENTS),
    asking("/v1/responses/input_tokens", "What it would have for input.", INPUT_TOKENS, InputTokens),
    streaming(
        "/v1/responses/{response_id}",
        "A stored response: as it is, or its events.",
        ResponseAnswer,
        RESPONSE_EVENTS,
        parameter("query", "stream", {"type": "boolean"}, "its events, until it ends"),
        parameter("query", "starting_after", {**COUNT, "maximum": 999_999_999}, "the last event that is known"),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a response, in every tier; one that runs ends.",
        {200: {"description": "It is gone.", "content": json_of(ResponseDeleted)}},
        OF_RESPONSES,
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "End a response in the background.",
        {200: {"description": "As it is now.", "content": json_of(ResponseAnswer)}},
        (400, *OF_RESPONSES),
    ),
    reading(
        "/v1/responses/{response_id}/input_items",
        "What was sent with it.",
        InputItems,
        *(400, *OF_RESPONSES),
        parameters=(
            parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": 100}, "default 20"),
            parameter("query", "order", {"enum": ["asc", "desc"]}, "default desc"),
            parameter("query", "after", {"type": "string", "minLength": 1}, "the item before the first"),
        ),
    ),
    *BATCH_OPERATIONS,
    asking("/tokenize", "A text, or a chat, as tokens.", TOKENIZE, report.TokenizeAnswer),
    asking("/detokenize", "Tokens as text.", DETOKENIZE, report.DetokenizeAnswer),
    reading("/version", "Of this server.", report.VersionAnswer),
    health("/ping", "As /readyz.", (report.StatusAnswer,)),
    reading("/v1/models", "What the fleet serves.", report.ModelsAnswer, *KNOWN),
    reading("/v1/models/{model}", "One model.", report.ModelAnswer, 404, *KNOWN),
    reading("/stats", "The fleet's sums, and this ingress's own counts; for admin keys.", report.StatsAnswer, *KNOWN),
    reading(
        "/workers",
        "Every known worker; for admin keys. `address` is the NATS subject on which it takes requests of this tenant.",
        {"type": "object", "additionalProperties": report.WorkerAnswer},
        *KNOWN,
    ),
    Operation(
        "post",
        "/workers/{worker_id}/drain",
        "Have a worker hand over its requests and end; for admin keys.",
        {200: {"description": "It drains.", "content": json_of(report.DrainingAnswer)}},
        (404, *KNOWN),
    ),
    reading(
        "/kv/route/{seq_id}",
        "Which worker a session goes to. `address` is the NATS subject on which it takes requests of this tenant.",
        report.LocatedAnswer,
        *(400, 429, *KNOWN),
        parameters=(parameter("query", "model", TEXT, "of a session that there is not yet"),),
    ),
    reading("/sessions/{seq_id}", "A session and where its blocks are.", report.SessionAnswer, 404, 429, *KNOWN),
    Operation(
        "delete",
        "/sessions/{seq_id}",
        "Forget a session, in every tier.",
        {200: {"description": "It is gone.", "content": json_of(report.DeletedAnswer)}},
        (404, 409, 429, *KNOWN),
    ),
    Operation(
        "get",
        "/sessions/{seq_id}/kv",
        "K and V of one layer as safetensors; for admin keys.",
        {200: {"description": "K and V", "content": {"application/octet-stream": {"schema": TEXT}}}},
        (400, 404, 429, 500, 501, *KNOWN),
        parameters=(parameter("query", "layer", {**COUNT, "maximum": 999_999_999}, "default 0"),),
    ),
    reading(
        "/v1/placements",
        "The last decisions, newest first: of this key's tenant, of all for admin keys.",
        NewestPlacementsAnswer,
        *(400, 429, *KNOWN),
        parameters=OF_NEWEST,
    ),
    reading(
        "/v1/pauses",
        "How long conversations of this key's tenant pause while a tool runs, and what that saved.",
        report.PausesAnswer,
        *(400, 429, *KNOWN),
        parameters=OF_NEWEST[:1],
    ),
    reading(
        "/v1/timeline",
        "The course of the last streams, the newest first, and when workers came, drained and went. Of this key's "
        "tenant and of the workers that its streams were at; of all for admin keys.",
        TimelineAnswer,
        *(400, 429, *KNOWN),
        parameters=OF_NEWEST,
    ),
    reading(
        "/v1/placements/{id}",
        "Why a request went to its worker, attempt by attempt.",
        PlacementsAnswer,
        *(400, 404, *KNOWN),
    ),
    health("/livez", "Whether the process works.", (report.StatusAnswer,)),
    health("/readyz", "Whether a request would be served.", (report.StatusAnswer,)),
    health("/health", "The same, with what is there.", (report.HealthAnswer, report.KnownHealthAnswer), 403, 421),
    Operation(
        "get",
        "/metrics",
        "Prometheus metrics; for admin keys.",
        {200: {"description": "metrics", "content": {"text/plain": {"schema": TEXT}}}},
        KNOWN,
    ),
    reading("/openapi.json", "This description.", _OPENAPI),
    Operation("get", "/", "The dashboard, for browsers.", {200: file_of("text/html")}),
    Operation(
        "get",
        "/dashboard/{file}",
        "What the dashboard's page is made of.",
        {200: file_of("text/javascript", "text/css")},
        (404,),
    ),
)


def openapi_document(operations: tuple[Operation, ...] = OPERATIONS) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = _described(one)
    told, components = described(paths)
    return {
        "openapi": VERSION,
        "info": {"title": "kvfleet", "version": "1", "description": "A fleet of language model workers."},
        "paths": told,
        "components": {
            "schemas": components | _of_bodies(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "an API key, or a token of the issuer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"apiKey": []}],
    }


def _of_bodies() -> dict[str, Any]:
    forms = TOKENIZE, CHAT, COMPLETION, GENERATE, MESSAGES, COUNT_TOKENS, RESPONSES, INPUT_TOKENS, BATCH
    return {name: schema for form in forms for name, schema in form.components.items()}


def _described(operation: Operation) -> dict[str, Any]:
    responses = {str(status): answer for status, answer in operation.answers.items()}
    for status in (*operation.errors, 405):
        responses[str(status)] = {"description": ERRORS[status], "content": json_of(operation.error)}
        if status in (429, 503):
            after = {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"}
            responses[str(status)]["headers"] = {"Retry-After": after}
    value: dict[str, Any] = {
        "operationId": operation.method + "".join(c if c.isalnum() else "_" for c in operation.path),
        "summary": operation.summary,
        "responses": responses,
    }
    if parameters := [one for one in PATH if f"{{{one['name']}}}" in operation.path] + list(operation.parameters):
        value["parameters"] = parameters
    if operation.body is not None:
        value["requestBody"] = {"required": True, "content": {operation.media: {"schema": operation.body}}}
    return value
