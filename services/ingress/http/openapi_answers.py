"""JSON Schemas of what the ingress answers. Pure. A test holds every answer against them.

Objects of a fixed form are closed (`additionalProperties` false), so that a field that is added and not described here
is found.
"""

from __future__ import annotations

from typing import Any

from kvfleet.ingress.requests.fields import Schema
from kvfleet.ingress.runs.event_ids import EVENT_ID

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
TRUTH: Schema = {"type": "boolean"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def mapped(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def closed(**fields: Schema) -> Schema:
    """An object of exactly these fields."""
    return {"type": "object", "required": list(fields), "properties": fields, "additionalProperties": False}


def extended(schema: Schema, **optional: Schema) -> Schema:
    """A closed object that may have more."""
    return {**schema, "properties": {**schema["properties"], **optional}}


def open_object(**fields: Schema) -> Schema:
    """An object of at least these fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


_TOP = closed(token=TEXT, logprob=NUMBER, bytes=listed(COUNT))
_CHAT_LOGPROBS = closed(
    content=listed(closed(token=TEXT, logprob=NUMBER, bytes=listed(COUNT), top_logprobs=listed(_TOP))),
    refusal={"type": "null"},
)
_COMPLETION_LOGPROBS = closed(
    tokens=listed(TEXT),
    token_logprobs=listed(NUMBER),
    top_logprobs=listed(mapped(NUMBER)),
    text_offset=listed(COUNT),
)
_REASON: Schema = {"enum": ["stop", "length"]}


def _answer(kind: str, choice: Schema) -> Schema:
    return closed(
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        system_fingerprint=TEXT,
        choices=listed(choice),
        usage=ref("Usage"),
        kvfleet=_FLEET,
    )


def _chunk(kind: str, content: str, delta: Schema, logprobs: Schema) -> Schema:
    choice = closed(index=COUNT, **{content: delta}, logprobs=maybe(logprobs), finish_reason=maybe(_REASON))
    head = closed(
        id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, system_fingerprint=TEXT, choices=listed(choice)
    )
    fleet = {**_FLEET, "required": ["event_id"], "properties": {**_FLEET["properties"], "event_id": _EVENT_ID}}
    return extended({**head, "required": [*head["required"], "kvfleet"]}, usage=maybe(ref("Usage")), kvfleet=fleet)


def _native(kind: str, **fields: Schema) -> Schema:
    return closed(type={"const": kind}, **fields)


_EVENT_ID: Schema = {"type": "string", "pattern": EVENT_ID}
_FLEET = closed(request_id=TEXT, worker_id=TEXT, cached_tokens=COUNT, queue_s=maybe(NUMBER))
_DELTA: Schema = {
    "type": "object",
    "properties": {"role": {"const": "assistant"}, "content": TEXT},
    "additionalProperties": False,
}
CHAT_CHUNK = _chunk("chat.completion.chunk", "delta", _DELTA, _CHAT_LOGPROBS)
COMPLETION_CHUNK = _chunk("text_completion", "text", TEXT, _COMPLETION_LOGPROBS)
NATIVE_EVENTS = (
    _native("start", seq_id=TEXT, prompt=TEXT, cached_tokens=COUNT, worker_id=TEXT, request_id=TEXT),
    extended(
        _native("token", token=TEXT, token_id=COUNT),
        logprob=NUMBER,
        top_logprobs=listed(closed(token=TEXT, token_id=COUNT, logprob=NUMBER)),
    ),
    _native(
        "done",
        generated_text=TEXT,
        tokens_generated=COUNT,
        finish_reason=_REASON,
        usage=ref("Usage"),
        seq_id=TEXT,
        worker_id=TEXT,
        request_id=TEXT,
    ),
    _native("error", error=TEXT, code=TEXT),
)
ERROR = closed(error=closed(message=TEXT, type=TEXT, param=maybe(TEXT), code=TEXT))
_TIERS = mapped(COUNT)
_MODEL = closed(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT)
_ACTUAL = closed(
    accepted=TRUTH,
    cached_tokens=maybe(_TIERS),
    queue_ms=maybe(NUMBER),
    ttft_ms=maybe(NUMBER),
    output_tokens=COUNT,
    ended=TRUTH,
    error_code=maybe(TEXT),
)
_CANDIDATE = closed(worker_id=TEXT, chosen=TRUTH, cost_ms=maybe(NUMBER), terms_ms=mapped(NUMBER), matched_tokens=_TIERS)
_ATTEMPT = closed(
    attempt=COUNT,
    decided_unix_ms=COUNT,
    placement_id=TEXT,
    tenant=TEXT,
    model=TEXT,
    policy=TEXT,
    worker_id=TEXT,
    why=TEXT,
    prompt_tokens=COUNT,
    expected_hit_tokens=_TIERS,
    expected_ttft_ms=maybe(NUMBER),
    source_worker_id=maybe(TEXT),
    source_tokens=COUNT,
    candidates=listed(_CANDIDATE),
    candidates_total=COUNT,
    actual=_ACTUAL,
)
_WORKER = closed(
    address=TEXT,
    state={"enum": ["starting", "ready", "draining", "dead"]},
    model=TEXT,
    model_revision=TEXT,
    epoch=TEXT,
    pid=COUNT,
    host=TEXT,
    started_unix_ms=COUNT,
    block_size=COUNT,
    blocks=COUNT,
    context_length=COUNT,
    slots=COUNT,
    load={"type": "object"},
    rates={"type": "object"},
    blocks_held=COUNT,
)
_OWN_COUNTS = (
    "active_streams", "generated_tokens_total", "prompt_tokens_total", "cached_tokens_total", "spliced_tokens_total",
    "sessions", "placed_total", "placement_fallbacks_total", "lost_attempts_total",
)  # fmt: skip
_LOCATED = {"worker_id": TEXT, "address": maybe(TEXT), "region": maybe(TEXT)}

COMPONENTS: dict[str, Schema] = {
    "Error": ERROR,
    "Usage": closed(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=closed(cached_tokens=COUNT),
    ),
    "ChatAnswer": _answer(
        "chat.completion",
        closed(
            index=COUNT,
            message=closed(role={"const": "assistant"}, content=TEXT, refusal={"type": "null"}),
            logprobs=maybe(_CHAT_LOGPROBS),
            finish_reason=_REASON,
        ),
    ),
    "CompletionAnswer": _answer(
        "text_completion",
        closed(index=COUNT, text=TEXT, logprobs=maybe(_COMPLETION_LOGPROBS), finish_reason=_REASON),
    ),
    "Model": _MODEL,
    "Models": closed(object={"const": "list"}, data=listed(ref("Model"))),
    "Workers": mapped(_WORKER),
    "Stats": closed(
        workers=COUNT,
        ready=COUNT,
        placements=COUNT,
        vaults=COUNT,
        models=listed(TEXT),
        hit_rate=NUMBER,
        load={"type": "object"},
        rates={"type": "object"},
        ingress=closed(id=TEXT, **dict.fromkeys(_OWN_COUNTS, COUNT)),
    ),
    "Located": closed(**_LOCATED),
    "Session": closed(
        seq_id=TEXT,
        model=TEXT,
        turns=COUNT,
        created_unix_ms=COUNT,
        updated_unix_ms=COUNT,
        busy=TRUTH,
        tokens=COUNT,
        cached_tokens=COUNT,
        blocks=listed(COUNT),
        worker_id=maybe(TEXT),
        address=maybe(TEXT),
        region=maybe(TEXT),
        workers=mapped(_TIERS),
    ),
    "Deleted": closed(seq_id=TEXT, deleted={"const": True}),
    "NewestPlacements": closed(placements=listed(closed(request_id=TEXT, **_ATTEMPT["properties"]))),
    "Placements": closed(request_id=TEXT, attempts=listed(_ATTEMPT)),
    "Status": closed(status=TEXT),
    "Health": extended(
        closed(status=TEXT, nats=TRUTH, workers_ready=COUNT, placements=COUNT, vaults=COUNT),
        ingress=TEXT,
        models=listed(TEXT),
        models_unavailable=listed(TEXT),
    ),
    "OpenApi": open_object(openapi=TEXT, info={"type": "object"}, paths={"type": "object"}),
}


def events_of(*data: Schema, ids: bool) -> dict[str, Any]:
    """A stream whose events have one of these as their data, and ids always or where they are asked for."""
    payload: Schema = {"contentMediaType": "application/json", "contentSchema": {"anyOf": list(data)}}
    event = {
        "type": "object",
        "required": ["id", "data"] if ids else ["data"],
        "properties": {
            "id": _EVENT_ID,
            "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, payload]},
        },
    }
    return {"text/event-stream": {"schema": event}}


def json_content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(name)}}
