"""Calls of the shape that transformers' parsers make, as we tell them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # the schemas of their arguments, by name
MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # what reading them may raise
REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that a message's thoughts have


def calls_of(value: Any, tools: Tools) -> list[tuple[str, str]]:
    """Names and arguments. Arguments that are text are cast to what their tool's schema says. Raises ValueError for
    what is no call of a tool that there is."""
    found = []
    for one in value if isinstance(value, list) else [value]:
        said = one.get("function", one) if isinstance(one, dict) else {}
        name = said.get("name")
        if not isinstance(name, str) or name not in tools:
            raise ValueError(f"{name!r} is no tool")
        arguments = said.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("arguments must be an object")
        properties = tools[name].get("properties", {})
        cast = {key: _cast(said, properties.get(key)) for key, said in arguments.items()}
        found.append((name, json.dumps(cast, ensure_ascii=False)))
    return found


def _cast(said: Any, schema: Any) -> Any:
    if isinstance(said, str):
        for kind in _types(schema):
            try:
                return _read(said, kind)
            except (ValueError, RecursionError):
                continue
    return said


def _types(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        said = schema.get("type", ())
        yield from (said,) if isinstance(said, str) else (one for one in said if isinstance(one, str))
        for union in ("anyOf", "oneOf"):
            for choice in schema.get(union) or ():
                yield from _types(choice)
        if schema.get("nullable"):
            yield "null"


def _read(said: str, kind: str) -> Any:
    """As transformers does. Raises ValueError."""
    word = said.strip()
    if kind in ("integer", "number"):
        return _number(said, whole=kind == "integer")
    if kind == "boolean" and word.lower() in ("true", "1", "false", "0"):
        return word.lower() in ("true", "1")
    if kind == "null" and word in ("null", "None"):
        return None
    if kind in ("object", "array"):
        value = json.loads(said)
        if isinstance(value, dict if kind == "object" else list):
            return value
    raise ValueError(f"{said!r} is none")


def _number(said: str, *, whole: bool) -> float:
    if whole:
        with contextlib.suppress(ValueError):
            return int(said)
    number = float(said)
    if not math.isfinite(number) or (whole and not number.is_integer()):
        raise ValueError(f"{said!r} is none")
    return int(number) if whole or (number.is_integer() and "." not in said) else number
