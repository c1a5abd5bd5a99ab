"""Readers of one field of a JSON body. Pure. Every error names the field and the limit; `null` counts as absent."""

from __future__ import annotations

import math
from typing import Any

import orjson

from kvproto.errors import InvalidRequest

Body = dict[str, Any]

_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}


def parse_body(data: bytes) -> Body:
    """A request's JSON object. Raises InvalidRequest for anything else: malformed, invalid UTF-8, too deep."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be a JSON object, got {kind_of(value)}", field="body")
    return value


def kind_of(value: object) -> str:
    """How JSON calls a value's type, for error messages."""
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def expected(what: str, value: object, field: str) -> InvalidRequest:
    return InvalidRequest(f"must be {what}, got {kind_of(value)}", field=field)


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer() and abs(value) < 2**63:
        value = int(value)  # JSON knows one kind of number
    if type(value) is not int:
        raise expected("an integer", value, name)
    if not low <= value <= high:
        raise InvalidRequest(f"must be within [{low}, {high}], got {value}", field=name)
    return value


def number(body: Body, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise expected("a number", value, name)
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"must be within [{low:g}, {high:g}], got {value}", field=name)
    return float(value)


def boolean(body: Body, name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        raise expected("a boolean", value, name)
    return value


def text(body: Body, name: str, max_chars: int) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not str:
        raise expected("a string", value, name)
    if len(value) > max_chars:
        raise InvalidRequest(f"at most {max_chars} characters, got {len(value)}", field=name)
    return value


def required_text(body: Body, name: str, max_chars: int) -> str:
    value = text(body, name, max_chars)
    if value is None:
        raise InvalidRequest("missing", field=name)
    if not value:
        raise InvalidRequest("must not be empty", field=name)
    return value
