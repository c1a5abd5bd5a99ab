"""What OpenAI's clients say in `response_format`, as a grammar. Pure."""

from __future__ import annotations

import json
from typing import Any

from kvproto.errors import InvalidRequest
from kvproto.messages import FormatType, Grammar, GrammarForm, ResponseFormat

MAX_GRAMMAR_CHARS = 1_048_576
_SCHEMA = "response_format.json_schema"


def grammar_of(said: ResponseFormat) -> Grammar | None:
    """None: any text. Raises InvalidRequest."""
    if (said.type is FormatType.JSON_SCHEMA) != (said.json_schema is not None):
        raise InvalidRequest("goes with the type json_schema, and no other", field=_SCHEMA)
    if said.type is FormatType.TEXT:
        return None
    if said.json_schema is None or said.json_schema.schema is None:
        return Grammar(GrammarForm.JSON_OBJECT)
    return grammar_of_schema(said.json_schema.schema, f"{_SCHEMA}.schema")


def grammar_of_schema(schema: dict[str, Any], said: str) -> Grammar:
    """Raises InvalidRequest that names the field `said`."""
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"is no JSON: {error}", field=said) from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", field=said)
    return Grammar(GrammarForm.JSON_SCHEMA, text, said)
