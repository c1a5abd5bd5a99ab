"""What operations of the OpenAPI description are made of: errors, headers, parameters, answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvfleet.ingress.http.error_bodies import ErrorAnswer
from kvfleet.ingress.requests.bodies import CHAT
from kvfleet.ingress.runs.event_ids import ACCEPT_PARAMETER, EVENT_ID, LAST_EVENT_ID
from kvfleet.ingress.runs.repeats import IDEMPOTENCY_KEY, MAX_KEY_CHARS
from kvproto.client import MAX_NEWEST
from kvservice.fields import BodyForm, Schema

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
    media: str = "application/json"  # of the body


def parameter(where: str, name: str, schema: Schema, about: str) -> dict[str, Any]:
    return {"in": where, "name": name, "schema": schema, "required": where == "path", "description": about}


PATH = (
    parameter("path", "model", {"type": "string", "minLength": 1}, "its name"),
    parameter("path", "seq_id", {"type": "string", "minLength": 1}, "the session's name, percent-encoded"),
    parameter("path", "response_id", {"type": "string", "minLength": 1}, "of a stored response"),
    parameter("path", "worker_id", {"type": "string", "minLength": 1}, "as /workers names it"),
    parameter("path", "file_id", {"type": "string", "minLength": 1}, "of a file, or of a batch's results"),
    parameter("path", "batch_id", {"type": "string", "minLength": 1}, "of a batch"),
    parameter("path", "id", {"type": "string", "minLength": 1}, "any id that an answer shows"),
    parameter("path", "file", {"type": "string", "pattern": r"^[a-z_]+\.(js|css)$"}, "of the page"),
)
OF_NEWEST = (
    parameter("query", "limit", {"type": "integer", "minimum": 1, "maximum": MAX_NEWEST}, "default 50"),
    parameter("query", "model", {"type": "string", "maxLength": 256}, "of this model alone"),
)
REPEATS = (
    parameter(
        "header",
        LAST_EVENT_ID,
        {"type": "string", "anyOf": [{"pattern": EVENT_ID}, {"maxLength": 0}]},
        "The last event that arrived of this same request, whose connection broke: the stream goes on after it. Only "
        "where the answer is streamed.",
    ),
    parameter(
        "header",
        IDEMPOTENCY_KEY,
        {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]([ -~]*[!-~])?$"},
        "Requests with the same key, route and body are one request: it is run once, and answered each time.",
    ),
)
LEFT = {
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
KNOWN = (401, 403, 421, 503)  # 503: of a signed token, while its issuer does not answer
ASKING = (400, 401, 403, 404, 408, 413, 421, 422, 429, 503)
OF_RESPONSES = (404, 409, 429, *KNOWN)
GENERATING = (400, 401, 403, 404, 408, 409, 413, 421, 422, 429, 500, 501, 503, 504)


def json_of(*answers: object) -> dict[str, Any]:
    return {"application/json": {"schema": answers[0] if len(answers) == 1 else {"anyOf": [*answers]}}}


def generating(
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
    content = {**(json_of(answer) if answer else {}), "text/event-stream": {"schema": event}}
    about = EVENTS + (ID_LINES_WHERE_ASKED_FOR if answer else ID_LINES)
    answers: dict[int, dict[str, Any]] = {
        200: {"description": about, "headers": LEFT, "content": content},
        204: {"description": "The client has had all events of this request."},
    }
    return Operation("post", path, summary, answers, GENERATING, form.schema, REPEATS, error)


def streaming(
    path: str, summary: str, answer: type, events: tuple[type, ...], *parameters: dict[str, Any]
) -> Operation:
    """What one that generates has brought, or brings."""
    created = generating(path, summary, CHAT, answer, *events)
    return replace(created, method="get", errors=GENERATING, body=None, parameters=parameters)


def reading(path: str, summary: str, answer: object, *errors: int, **more: Any) -> Operation:
    answers = {200: {"description": summary, "content": json_of(answer)}}
    return Operation("get", path, summary, answers, errors, **more)


def asking(path: str, summary: str, form: BodyForm[Any], answer: type, error: type = ErrorAnswer) -> Operation:
    told = {200: {"description": summary, "content": json_of(answer)}}
    return Operation("post", path, summary, told, ASKING, form.schema, error=error)


def health(path: str, summary: str, answers: tuple[type, ...], *errors: int) -> Operation:
    content = json_of(*answers)
    told = {200: {"description": "yes", "content": content}, 503: {"description": "no", "content": content}}
    return Operation("get", path, summary, told, errors)


def file_of(*kinds: str) -> dict[str, Any]:
    return {"description": "the file", "content": {kind: {"schema": TEXT} for kind in kinds}}
