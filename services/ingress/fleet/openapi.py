"""The OpenAPI 3.1 description at /openapi.json. Pure. The forms that read bodies (`requests`), the patterns that read
headers and the types of answers are the schemas: an operation names a type in place of its schema."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from kvfleet.ingress.fleet.report import NewestPlacementsAnswer, PlacementsAnswer
from kvfleet.ingress.fleet.timeline import TimelineAnswer
from kvfleet.ingress.http.answer_types import described
from kvfleet.ingress.http.error_bodies import ErrorAnswer
from kvfleet.ingress.requests.anthropic import COUNT_TOKENS, MESSAGES
from kvfleet.ingress.requests.bodies import CHAT, COMPLETION, GENERATE
from kvfleet.ingress.requests.responses import INPUT_TOKENS, RESPONSES
from kvfleet.ingress.requests.texts import DETOKENIZE, TOKENIZE
from kvfleet.ingress.runs.event_ids import ACCEPT_PARAMETER, EVENT_ID, LAST_EVENT_ID
from kvfleet.ingress.runs.repeats import IDEMPOTENCY_KEY, MAX_KEY_CHARS
from kvproto.client import MAX_NEWEST
from kvservice.fields import BodyForm, Schema

VERSION = "3.1.0"
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}

ERRORS: dict[int, str] = {
    400: "The request is wrong: the message and `param` name the field.",
    401: "No API key, or one that is not known.",
    403: "This API key may not do that; or, without keys, a page of another site asks.",
    404: "There is none of that name, or it is another tenant's.",
    405: "The route does not take that method.",
    408: "The body has not come in time.",
    409: "The session is busy, or has had another turn since; or the stream was begun from another prompt "
    "(`prompt_changed`): it goes on only at the ingress that it was begun at.",
    413: "The body is too long, or the prompt more than a limit of the key or tenant as a whole; or "
    "the longest answer more than an ingress has memory for.",
    421: "An ingress without API keys is asked under a name that is not its own.",
    422: "The Idempotency-Key or Last-Event-ID is of another request.",
    429: "A limit of this key or of its tenant, or more than the fleet can do in time: Retry-After says when.",
    500: "A fault of this server.",
    501: "The model cannot do that.",
    503: "Nobody can serve it now: Retry-After says when.",
    504: "The request's deadline has passed.",
}
EVENTS = (
    "Server-sent events, each of one line of JSON. An error after the first event is the last event; its code "
    "`draining` says that the request goes on at another ingress. "
)
ID_LINES = "Each has an `id` for Last-Event-ID."
ID_LINES_WHERE_ASKED_FOR = (
    "`kvfleet.event_id` of each is its id for Last-Event-ID. They have `id` lines too where the request has a "
    f"Last-Event-ID, an Idempotency-Key, or the header `Accept: text/event-stream; {ACCEPT_PARAMETER}=1`."
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One route. Every route has the error 405 beside its `errors`."""

    method: str
    path: str
    summary: str
    answers: dict[int, dict[str, Any]]
    errors: tuple[int, ...] = ()
    body: Schema | None = None
    parameters: tuple[dict[str, Any], ...] = ()
    error: type = ErrorAnswer


def _parameter(where: str, name: str, schema: Schema, about: str) -> dict[str, Any]:
    return {"in": where, "name": name, "schema": schema, "required": where == "path", "description": about}


_PATH = (
    _parameter("path", "model", {"type": "string", "minLength": 1}, "its name"),
    _parameter("path", "seq_id", {"type": "string", "minLength": 1}, "the session's name, percent-encoded"),
    _parameter("path", "response_id", {"type": "string", "minLength": 1}, "of a stored response"),
    _parameter("path", "worker_id", {"type": "string", "minLength": 1}, "as /workers names it"),
    _parameter("path", "id", {"type": "string", "minLength": 1}, "any id that an answer shows"),
    _parameter("path", "file", {"type": "string", "pattern": r"^[a-z_]+\.(js|css)$"}, "of the page"),
)
_OF_NEWEST = (
    _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_NEWEST}, "default 50"),
    _parameter("query", "model", {"type": "string", "maxLength": 256}, "of this model alone"),
)
_REPEATS = (
    _parameter(
        "header",
        LAST_EVENT_ID,
        {"type": "string", "anyOf": [{"pattern": EVENT_ID}, {"maxLength": 0}]},
        "The last event that arrived of this same request, whose connection broke: the stream goes on after it. Only "
        "where the answer is streamed.",
    ),
    _parameter(
        "header",
        IDEMPOTENCY_KEY,
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]([ -~]*[!-~])?$"},
        "Requests with the same key, route and body are one request: it is run once, and answered each time.",
    ),
)
_LEFT = {
    f"x-ratelimit-{what}-{of}": {
        "schema": {"type": "string"} if what == "reset" else COUNT,
        "description": about,
    }
    for of in ("requests", "tokens")
    for what, about in (
        ("limit", "a minute's, where this key or its tenant has such a limit"),
        ("remaining", "that may be used at once"),
        ("reset", "until nothing of it is used, as 1m30s"),
    )
}
_KNOWN = (401, 403, 421, 503)  # 503: of a signed token, while its issuer does not answer
_ASKING = (400, 401, 403, 404, 408, 413, 421, 422, 429, 503)
_OF_RESPONSES = (404, 409, 429, *_KNOWN)
_GENERATING = (400, 401, 403, 404, 408, 409, 413, 421, 422, 429, 500, 501, 503, 504)


def _json(*answers: object) -> dict[str, Any]:
    return {"application/json": {"schema": answers[0] if len(answers) == 1 else {"anyOf": [*answers]}}}


def _generating(
    path: str, summary: str, form: BodyForm[Any], answer: type | None, *events: type, error: type = ErrorAnswer
) -> Operation:
    """`answer` is the type of a whole answer, None where there is none; `events` are the types of events' data."""
    errors = [error] if answer else []
    payload = {"contentMediaType": "application/json", "contentSchema": {"anyOf": [*events, *errors]}}
    event = {
        "type": "object",
        "required": ["data"] if answer else ["id", "data"],
        "properties": {
            "id": {"type": "string", "pattern": EVENT_ID},
            "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, payload]},
        },
    }
    content = {**(_json(answer) if answer else {}), "text/event-stream": {"schema": event}}
    about = EVENTS + (ID_LINES_WHERE_ASKED_FOR if answer else ID_LINES)
    answers: dict[int, dict[str, Any]] = {
        200: {"description": about, "headers": _LEFT, "content": content},
        204: {"description": "The client has had all events of this request."},
    }
    return Operation("post", path, summary, answers, _GENERATING, form.schema, _REPEATS, error)


def _streaming(
    path: str, summary: str, answer: type, events: tuple[type, ...], *parameters: dict[str, Any]
) -> Operation:
    """What one that generates has brought, or brings."""
    created = _generating(path, summary, CHAT, answer, *events)
    return replace(created, method="get", errors=_GENERATING, body=None, parameters=parameters)


def _reading(path: str, summary: str, answer: object, *errors: int, **more: Any) -> Operation:
    answers = {200: {"description": summary, "content": _json(answer)}}
    return Operation("get", path, summary, answers, errors, **more)


def _asking(path: str, summary: str, form: BodyForm[Any], answer: type, error: type = ErrorAnswer) -> Operation:
    told = {200: {"description": summary, "content": _json(answer)}}
    return Operation("post", path, summary, told, _ASKING, form.schema, error=error)


def _health(path: str, summary: str, answers: tuple[type, ...], *errors: int) -> Operation:
    content = _json(*answers)
    told = {200: {"description": "yes", "content": content}, 503: {"description": "no", "content": content}}
    return Operation("get", path, summary, told, errors)


def _file(*kinds: str) -> dict[str, Any]:
    return {"description": "the file", "content": {kind: {"schema": TEXT} for kind in kinds}}


_OPENAPI: Schema = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "properties": {"openapi": TEXT, "info": {"type": "object"}, "paths": {"type": "object"}},
}
OPERATIONS = (
    _generating("/v1/chat/completions", "A chat's next message, as OpenAI's.", CHAT, ChatAnswer, ChatChunk),
    _generating(
        "/v1/completions", "A text's continuation, as OpenAI's.", COMPLETION, CompletionAnswer, CompletionChunk
    ),
    _generating("/generate", "A turn of a session, streamed.", GENERATE, None, *NATIVE_EVENTS),
    _generating(
        "/v1/messages",
        "A chat's next message, as Anthropic's.",
        MESSAGES,
        MessageAnswer,
        *MESSAGE_EVENTS,
        error=MessageError,
    ),
    _asking(
        "/v1/messages/count_tokens", "What it would have for input.", COUNT_TOKENS, report.CountAnswer, MessageError
    ),
    _generating("/v1/responses", "A response, as OpenAI's.", RESPONSES, ResponseAnswer, *RESPONSE_EVENTS),
    _asking("/v1/responses/input_tokens", "What it would have for input.", INPUT_TOKENS, InputTokens),
    _streaming(
        "/v1/responses/{response_id}",
        "A stored response: as it is, or its events.",
        ResponseAnswer,
        RESPONSE_EVENTS,
        _parameter("query", "stream", {"type": "boolean"}, "its events, until it ends"),
        _parameter("query", "starting_after", {**COUNT, "maximum": 999_999_999}, "the last event that is known"),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a response, in every tier; one that runs ends.",
        {200: {"description": "It is gone.", "content": _json(ResponseDeleted)}},
        _OF_RESPONSES,
    ),
    Operation(
        "post",
        "/v1/responses/{response_id}/cancel",
        "End a response in the background.",
        {200: {"description": "As it is now.", "content": _json(ResponseAnswer)}},
        (400, *_OF_RESPONSES),
    ),
    _reading(
        "/v1/responses/{response_id}/input_items",
        "What was sent with it.",
        InputItems,
        *(400, *_OF_RESPONSES),
        parameters=(
            _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": 100}, "default 20"),
            _parameter("query", "order", {"enum": ["asc", "desc"]}, "default desc"),
            _parameter("query", "after", {"type": "string", "minLength": 1}, "the item before the first"),
        ),
    ),
    _asking("/tokenize", "A text, or a chat, as tokens.", TOKENIZE, report.TokenizeAnswer),
    _asking("/detokenize", "Tokens as text.", DETOKENIZE, report.DetokenizeAnswer),
    _reading("/version", "Of this server.", report.VersionAnswer),
    _health("/ping", "As /readyz.", (report.StatusAnswer,)),
    _reading("/v1/models", "What the fleet serves.", report.ModelsAnswer, *_KNOWN),
    _reading("/v1/models/{model}", "One model.", report.ModelAnswer, 404, *_KNOWN),
    _reading("/stats", "The fleet's sums, and this ingress's own counts; for admin keys.", report.StatsAnswer, *_KNOWN),
    _reading(
        "/workers",
        "Every known worker; for admin keys. `address` is the NATS subject on which it takes requests of this tenant.",
        {"type": "object", "additionalProperties": report.WorkerAnswer},
        *_KNOWN,
    ),
    Operation(
        "post",
        "/workers/{worker_id}/drain",
        "Have a worker hand over its requests and end; for admin keys.",
        {200: {"description": "It drains.", "content": _json(report.DrainingAnswer)}},
        (404, *_KNOWN),
    ),
    _reading(
        "/kv/route/{seq_id}",
        "Which worker a session goes to. `address` is the NATS subject on which it takes requests of this tenant.",
        report.LocatedAnswer,
        *(400, 429, *_KNOWN),
        parameters=(_parameter("query", "model", TEXT, "of a session that there is not yet"),),
    ),
    _reading("/sessions/{seq_id}", "A session and where its blocks are.", report.SessionAnswer, 404, 429, *_KNOWN),
    Operation(
        "delete",
        "/sessions/{seq_id}",
        "Forget a session, in every tier.",
        {200: {"description": "It is gone.", "content": _json(report.DeletedAnswer)}},
        (404, 409, 429, *_KNOWN),
    ),
    Operation(
        "get",
        "/sessions/{seq_id}/kv",
        "K and V of one layer as safetensors; for admin keys.",
        {200: {"description": "K and V", "content": {"application/octet-stream": {"schema": TEXT}}}},
        (400, 404, 429, 500, 501, *_KNOWN),
        parameters=(_parameter("query", "layer", {**COUNT, "maximum": 999_999_999}, "default 0"),),
    ),
    _reading(
        "/v1/placements",
        "The last decisions, newest first: of this key's tenant, of all for admin keys.",
        NewestPlacementsAnswer,
        *(400, 429, *_KNOWN),
        parameters=_OF_NEWEST,
    ),
    _reading(
        "/v1/timeline",
        "The course of the last streams, the newest first, and when workers came, drained and went. Of this key's "
        "tenant and of the workers that its streams were at; of all for admin keys.",
        TimelineAnswer,
        *(400, 429, *_KNOWN),
        parameters=_OF_NEWEST,
    ),
    _reading(
        "/v1/placements/{id}",
        "Why a request went to its worker, attempt by attempt.",
        PlacementsAnswer,
        *(400, 404, *_KNOWN),
    ),
    _health("/livez", "Whether the process works.", (report.StatusAnswer,)),
    _health("/readyz", "Whether a request would be served.", (report.StatusAnswer,)),
    _health("/health", "The same, with what is there.", (report.HealthAnswer, report.KnownHealthAnswer), 403, 421),
    Operation(
        "get",
        "/metrics",
        "Prometheus metrics; for admin keys.",
        {200: {"description": "metrics", "content": {"text/plain": {"schema": TEXT}}}},
        _KNOWN,
    ),
    _reading("/openapi.json", "This description.", _OPENAPI),
    Operation("get", "/", "The dashboard, for browsers.", {200: _file("text/html")}),
    Operation(
        "get",
        "/dashboard/{file}",
        "What the dashboard's page is made of.",
        {200: _file("text/javascript", "text/css")},
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
    forms = TOKENIZE, CHAT, COMPLETION, GENERATE, MESSAGES, COUNT_TOKENS, RESPONSES, INPUT_TOKENS
    return {name: schema for form in forms for name, schema in form.components.items()}


def _described(operation: Operation) -> dict[str, Any]:
    responses = {str(status): answer for status, answer in operation.answers.items()}
    for status in (*operation.errors, 405):
        responses[str(status)] = {"description": ERRORS[status], "content": _json(operation.error)}
        if status in (429, 503):
            after = {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"}
            responses[str(status)]["headers"] = {"Retry-After": after}
    value: dict[str, Any] = {
        "operationId": operation.method + "".join(c if c.isalnum() else "_" for c in operation.path),
        "summary": operation.summary,
        "responses": responses,
    }
    if parameters := [one for one in _PATH if f"{{{one['name']}}}" in operation.path] + list(operation.parameters):
        value["parameters"] = parameters
    if operation.body is not None:
        value["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return value
