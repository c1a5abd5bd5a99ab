"""What the ingress serves at /openapi.json: every route, what it takes and what it answers, as OpenAPI 3.1. Pure.

Bodies are described by the forms that read them (`requests`), headers by the patterns that do; a test compares the
paths with those of `app`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvfleet.ingress.http.openapi_answers import (
    CHAT_CHUNK,
    COMPLETION_CHUNK,
    COMPONENTS,
    COUNT,
    ERROR,
    NATIVE_EVENTS,
    TEXT,
    events_of,
    json_content,
)
from kvfleet.ingress.requests.fields import BodyForm, Schema
from kvfleet.ingress.requests.native_schema import GENERATE
from kvfleet.ingress.requests.openai_schema import CHAT, COMPLETION
from kvfleet.ingress.runs.event_ids import ACCEPT_PARAMETER, EVENT_ID, LAST_EVENT_ID
from kvfleet.ingress.runs.repeats import IDEMPOTENCY_KEY, MAX_KEY_CHARS
from kvproto.questions import MAX_NEWEST

VERSION = "3.1.0"

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
    """One route. `errors` beside 405, which every route has."""

    method: str
    path: str
    summary: str
    answers: dict[int, dict[str, Any]]
    errors: tuple[int, ...] = ()
    body: Schema | None = None
    parameters: tuple[dict[str, Any], ...] = ()


def _parameter(where: str, name: str, schema: Schema, about: str) -> dict[str, Any]:
    return {"in": where, "name": name, "schema": schema, "required": where == "path", "description": about}


def _seq_id() -> dict[str, Any]:
    return _parameter("path", "seq_id", {"type": "string", "minLength": 1}, "the session's name, percent-encoded")


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
        "schema": {"type": "string"} if what == "reset" else {"type": "integer", "minimum": 0},
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
_GENERATING = (400, 401, 403, 404, 408, 409, 413, 421, 422, 429, 500, 501, 503, 504)


def _generating(path: str, summary: str, form: BodyForm[Any], answer: str | None, *events: Schema) -> Operation:
    content = {**(json_content(answer) if answer else {}), **events_of(*events, ids=answer is None)}
    about = EVENTS + (ID_LINES if answer is None else ID_LINES_WHERE_ASKED_FOR)
    answers: dict[int, dict[str, Any]] = {
        200: {"description": about, "headers": _LEFT, "content": content},
        204: {"description": "The client has had all events of this request."},
    }
    return Operation("post", path, summary, answers, _GENERATING, form.schema, _REPEATS)


def _reading(path: str, summary: str, answer: str, *errors: int, **more: Any) -> Operation:
    answers = {200: {"description": summary, "content": json_content(answer)}}
    return Operation("get", path, summary, answers, errors, **more)


def _health(path: str, summary: str, answer: str, *errors: int) -> Operation:
    content = json_content(answer)
    answers = {200: {"description": "yes", "content": content}, 503: {"description": "no", "content": content}}
    return Operation("get", path, summary, answers, errors)


def _file(*kinds: str) -> dict[str, Any]:
    return {"description": "the file", "content": {kind: {"schema": TEXT} for kind in kinds}}


OPERATIONS = (
    _generating("/v1/chat/completions", "A chat's next message, as OpenAI's.", CHAT, "ChatAnswer", CHAT_CHUNK, ERROR),
    _generating(
        "/v1/completions",
        "A text's continuation, as OpenAI's.",
        COMPLETION,
        "CompletionAnswer",
        COMPLETION_CHUNK,
        ERROR,
    ),
    _generating("/generate", "A turn of a session, streamed.", GENERATE, None, *NATIVE_EVENTS),
    _reading("/v1/models", "What the fleet serves.", "Models", *_KNOWN),
    _reading(
        "/v1/models/{model}",
        "One model.",
        "Model",
        404,
        *_KNOWN,
        parameters=(_parameter("path", "model", {"type": "string", "minLength": 1}, "its name"),),
    ),
    _reading("/stats", "The fleet's sums, and this ingress's own counts; for admin keys.", "Stats", *_KNOWN),
    _reading(
        "/workers",
        "Every known worker; for admin keys. `address` is the NATS subject on which it takes requests of this tenant.",
        "Workers",
        *_KNOWN,
    ),
    _reading(
        "/kv/route/{seq_id}",
        "Which worker a session goes to. `address` is the NATS subject on which it takes requests of this tenant.",
        "Located",
        400,
        429,
        *_KNOWN,
        parameters=(_seq_id(), _parameter("query", "model", TEXT, "of a session that there is not yet")),
    ),
    _reading(
        "/sessions/{seq_id}",
        "A session and where its blocks are.",
        "Session",
        404,
        429,
        *_KNOWN,
        parameters=(_seq_id(),),
    ),
    Operation(
        "delete",
        "/sessions/{seq_id}",
        "Forget a session, in every tier.",
        {200: {"description": "It is gone.", "content": json_content("Deleted")}},
        (404, 409, 429, *_KNOWN),
        parameters=(_seq_id(),),
    ),
    Operation(
        "get",
        "/sessions/{seq_id}/kv",
        "K and V of one layer as safetensors; for admin keys.",
        {200: {"description": "K and V", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
        (400, 404, 429, 500, 501, *_KNOWN),
        parameters=(_seq_id(), _parameter("query", "layer", {**COUNT, "maximum": 999_999_999}, "default 0")),
    ),
    _reading(
        "/v1/placements",
        "The last decisions, newest first: of this key's tenant, of all for admin keys.",
        "NewestPlacements",
        400,
        429,
        *_KNOWN,
        parameters=(
            _parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_NEWEST}, "default 50"),
            _parameter("query", "model", {"type": "string", "maxLength": 256}, "of this model alone"),
        ),
    ),
    _reading(
        "/v1/placements/{id}",
        "Why a request went to its worker, attempt by attempt.",
        "Placements",
        400,
        404,
        *_KNOWN,
        parameters=(_parameter("path", "id", {"type": "string", "minLength": 1}, "any id that an answer shows"),),
    ),
    _health("/livez", "Whether the process works.", "Status"),
    _health("/readyz", "Whether a request would be served.", "Status"),
    _health("/health", "The same, with what is there.", "Health", 403, 421),
    Operation(
        "get",
        "/metrics",
        "Prometheus metrics; for admin keys.",
        {200: {"description": "metrics", "content": {"text/plain": {"schema": TEXT}}}},
        _KNOWN,
    ),
    _reading("/openapi.json", "This description.", "OpenApi"),
    Operation("get", "/", "The dashboard, for browsers.", {200: _file("text/html")}),
    Operation(
        "get",
        "/dashboard/{file}",
        "What the dashboard's page is made of.",
        {200: _file("text/javascript", "text/css")},
        (404,),
        parameters=(_parameter("path", "file", {"type": "string", "pattern": r"^[a-z_]+\.(js|css)$"}, "of the page"),),
    ),
)


def openapi_document(operations: tuple[Operation, ...] = OPERATIONS) -> dict[str, Any]:
    """The whole description."""
    paths: dict[str, Any] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = _described(one)
    return {
        "openapi": VERSION,
        "info": {"title": "kvfleet", "version": "1", "description": "A fleet of language model workers."},
        "paths": paths,
        "components": {
            "schemas": COMPONENTS | CHAT.components | COMPLETION.components | GENERATE.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "an API key, or a token of the issuer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"apiKey": []}],
    }


def _described(operation: Operation) -> dict[str, Any]:
    value: dict[str, Any] = {
        "operationId": operation.method + "".join(c if c.isalnum() else "_" for c in operation.path),
        "summary": operation.summary,
        "responses": {
            **{str(status): answer for status, answer in operation.answers.items()},
            **{str(status): _error(status) for status in (*operation.errors, 405)},
        },
    }
    if operation.parameters:
        value["parameters"] = list(operation.parameters)
    if operation.body is not None:
        value["requestBody"] = {"required": True, "content": {"application/json": {"schema": operation.body}}}
    return value


def _error(status: int) -> dict[str, Any]:
    value: dict[str, Any] = {"description": ERRORS[status], "content": json_content("Error")}
    if status in (429, 503):
        value["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "seconds"}}
    return value
