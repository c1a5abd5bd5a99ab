"""docs/reference/http.md: the description that an ingress serves at /openapi.json, as a page to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvfleet.ingress.fleet.openapi import openapi_document
from scripts.reference.json_schema import words
from scripts.reference.markdown import code, head, table, written

Schema = dict[str, Any]


def page() -> str:
    document = openapi_document()
    lines = head("HTTP", "the OpenAPI description that every ingress serves at `/openapi.json`")
    lines += ["[Using the HTTP endpoint](../http.md) says what the fields do, with examples.", ""]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _operation(method, path, operation, document)
    lines += ["## Schemas", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += [f"### {name}", "", *_schema(schema)]
    return written(lines)


def _operation(method: str, path: str, operation: dict[str, Any], document: Schema) -> Iterator[str]:
    yield from (f"## {method.upper()} {path}", "")
    yield from (operation["summary"], "")
    parameters = operation.get("parameters", [])
    yield from table(
        ("parameter", "in", "value", ""),
        ((code(one["name"]), one["in"], words(one["schema"]), one.get("description", "")) for one in parameters),
    )
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from (f"Body, `{kind}`:", "", *_schema(_followed(content["schema"], document)))
    rows = [(status, _contents(answer), answer.get("description", "")) for status, answer in _answers(operation)]
    yield from table(("status", "content", ""), rows)
    events = [event for _, answer in _answers(operation) for event in _events(answer)]
    if events:
        yield from ("Events:", "", *(f"* {words(event)}" for event in events), "")


def _events(answer: dict[str, Any]) -> list[Schema]:
    """What the data of a stream's events may be."""
    stream = answer.get("content", {}).get("text/event-stream", {}).get("schema", {})
    data = stream.get("properties", {}).get("data", {})
    return [event for one in data.get("anyOf", ()) for event in one.get("contentSchema", {}).get("anyOf", ())]


def _answers(operation: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for status, answer in operation["responses"].items():
        yield str(status), answer


def _contents(answer: dict[str, Any]) -> str:
    return "; ".join(
        f"`{kind}`" + (f": {words(one['schema'])}" if "schema" in one and _is_short(one["schema"]) else "")
        for kind, one in answer.get("content", {}).items()
    )


def _is_short(schema: Schema) -> bool:
    """Whether a word or two tell it; events have a list of their own."""
    return "$ref" in schema or schema.get("type") == "string"


def _followed(schema: Schema, document: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _schema(schema: Schema) -> Iterator[str]:
    if "properties" not in schema:
        yield from (words(schema), "")
        return
    required = set(schema.get("required", ()))
    yield from table(
        ("field", "value", ""),
        (
            (code(name), words(one), " ".join(filter(None, ("" if name in required else "optional", _about(one)))))
            for name, one in schema["properties"].items()
        ),
    )


def _about(schema: Schema) -> str:
    return str(schema.get("description", ""))
