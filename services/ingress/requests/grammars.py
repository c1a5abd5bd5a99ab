"""What an output's text must be, as OpenAI's clients and vLLM's say it. Pure. Workers read the schemas themselves.

response_format      of OpenAI: its `type` is text, json_object or json_schema
structured_outputs   of vLLM: one of json, json_object, regex, choice, grammar
guided_...           the same under their older names: guided_json, guided_regex, guided_choice, guided_grammar
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from kvproto.errors import InvalidRequest
from kvproto.messages import Grammar, GrammarForm, ResponseFormat
from kvproto.response_format import MAX_GRAMMAR_CHARS, grammar_of, grammar_of_schema
from kvservice.fields import Flag

MAX_CHOICES = 65_536

Schema = dict[str, Any]
Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choice = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    __pydantic_config__ = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 1})

    json: Schema | Source | None = None
    json_object: Flag | None = None
    regex: Source | None = None
    choice: Choice | None = None
    grammar: Source | None = None


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """Fields of a body. `grammar` raises InvalidRequest if more than one says what the text must be."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # also of what is in its fields

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choice | None = None
    guided_grammar: Source | None = None

    @property
    def grammar(self) -> Grammar | None:
        found = [one for field in fields(self) for one in _grammars(field.name, getattr(self, field.name))]
        if len(found) > 1:
            raise InvalidRequest(f"cannot be had together with {found[0].said}", field=found[1].said)
        return found[0] if found else None


def _grammars(field: str, said: Any) -> list[Grammar]:
    """Those of one field, which is to be at most one."""
    if said is None:
        return []
    if isinstance(said, ResponseFormat):
        return [] if (grammar := grammar_of(said)) is None else [grammar]
    if isinstance(said, StructuredOutputs):
        parts = [(one.name, getattr(said, one.name)) for one in fields(said)]
        found = [_grammar(f"{field}.{name}", name, value) for name, value in parts if value not in (None, False)]
        if not found:
            raise InvalidRequest("must say one of " + ", ".join(name for name, _ in parts), field=field)
        return found
    return [_grammar(field, field.removeprefix("guided_"), said)]


def _grammar(field: str, name: str, said: Any) -> Grammar:
    if name == "json_object":
        return Grammar(GrammarForm.JSON_OBJECT, said=field)
    if isinstance(said, dict):
        return grammar_of_schema(said, field)
    form = {"json": GrammarForm.JSON_SCHEMA, "regex": GrammarForm.REGEX, "choice": GrammarForm.CHOICE}.get(name)
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"at most {MAX_GRAMMAR_CHARS} characters, got {len(text)}", field=field)
    return Grammar(form or GrammarForm.LARK, text, field)
