"""Fields of a JSON body: how each is read, and its JSON Schema, in one object. Pure.

Tables of fields are classes whose attributes they are: `openapi` describes what `read` takes, and nothing else can be
read. Every error names the field and the limit; `null` counts as absent, so a schema allows it wherever a field may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, overload

import orjson

from kvproto.errors import InvalidRequest

MAX_DEPTH = 64  # of what a field holds, in lists and objects: less than what orjson reads and what it writes

Body = dict[str, Any]
Schema = dict[str, Any]
T = TypeVar("T")
D = TypeVar("D")

_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}


def parse_body(data: bytes) -> Body:
    """A request's JSON object. Raises InvalidRequest for anything else: malformed, invalid UTF-8, too deep, of which it
    names the field."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be a JSON object, got {kind_of(value)}", field="body")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


def _check_depth(body: Body) -> None:
    for name, value in body.items():
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [inner for outer in level for inner in _inside(outer) if type(inner) in (list, dict)]
            if not level:
                break
        else:
            raise InvalidRequest(f"at most {MAX_DEPTH} lists and objects in one another", field=name[:80])


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def kind_of(value: object) -> str:
    """How JSON calls a value's type, for error messages."""
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def expected(what: str, value: object, field: str) -> InvalidRequest:
    return InvalidRequest(f"must be {what}, got {kind_of(value)}", field=field)


@dataclass(frozen=True, slots=True)
class BodyField(Generic[T]):
    """`schema` is that of a value that is there; `read_value` raises InvalidRequest with the name it is given."""

    name: str
    schema: Schema
    read_value: Callable[[Any, str], T]
    required: bool = False

    @overload
    def read(self, body: Body) -> T | None: ...
    @overload
    def read(self, body: Body, default: D) -> T | D: ...
    def read(self, body: Body, default: Any = None) -> Any:
        """The field's value, `default` where it is absent. Raises InvalidRequest naming it."""
        value = body.get(self.name)
        if value is None:
            if self.required:
                raise InvalidRequest("missing", field=self.name)
            return default
        return self.read_value(value, self.name)

    def need(self, body: Body) -> T:
        """The value of one that is `required`."""
        value = self.read(body)
        assert value is not None
        return value


@cache
def fields_of(table: type) -> dict[str, BodyField[Any]]:
    """The fields of a table and of those it extends, by name."""
    members = (one for base in reversed(table.__mro__) for one in vars(base).values())
    return {one.name: one for one in members if isinstance(one, BodyField)}


def object_schema(table: type) -> Schema:
    """What a body of a table's fields looks like; any other field must be absent."""
    known = fields_of(table)
    return {
        "type": "object",
        "required": sorted(name for name, one in known.items() if one.required),
        "properties": {
            name: one.schema if one.required else {"anyOf": [one.schema, {"type": "null"}]}
            for name, one in sorted(known.items())
        },
        "additionalProperties": {"type": "null"},
    }


# ---------------------------------------------------------------------------------------------- kinds of fields


def integer(name: str, low: int, high: int) -> BodyField[int]:
    def read(value: Any, field: str) -> int:
        if type(value) is float and value.is_integer() and abs(value) < 2**63:
            value = int(value)  # JSON knows one kind of number
        if type(value) is not int:
            raise expected("an integer", value, field)
        if not low <= value <= high:
            raise InvalidRequest(f"must be within [{low}, {high}], got {value}", field=field)
        return value

    return BodyField(name, {"type": "integer", "minimum": low, "maximum": high}, read)


def number(name: str, low: float, high: float) -> BodyField[float]:
    def read(value: Any, field: str) -> float:
        if type(value) not in (int, float):
            raise expected("a number", value, field)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"must be within [{low:g}, {high:g}], got {value}", field=field)
        return float(value)

    return BodyField(name, {"type": "number", "minimum": low, "maximum": high}, read)


def boolean(name: str) -> BodyField[bool]:
    def read(value: Any, field: str) -> bool:
        if type(value) is not bool:
            raise expected("a boolean", value, field)
        return value

    return BodyField(name, {"type": "boolean"}, read)


def text(name: str, max_chars: int, *, empty: bool = False, required: bool = False) -> BodyField[str]:
    def read(value: Any, field: str) -> str:
        if type(value) is not str:
            raise expected("a string", value, field)
        if len(value) > max_chars:
            raise InvalidRequest(f"at most {max_chars} characters, got {len(value)}", field=field)
        if not value and not empty:
            raise InvalidRequest("must not be empty", field=field)
        return value

    schema = {"type": "string", "maxLength": max_chars, "minLength": 0 if empty else 1}
    return BodyField(name, schema, read, required)


class Unserved(BodyField[None]):
    """A field that would change the answer and is not served: only what asks for nothing special is taken."""


def unserved(name: str, *defaults: Any) -> Unserved:

    def read(value: Any, field: str) -> None:
        if not any(value == one and type(value) in _alike(one) for one in defaults):
            raise InvalidRequest("not supported by this server", field=field)

    return Unserved(name, {"enum": list(defaults)} if defaults else {"type": "null"}, read)


def ignored(name: str) -> BodyField[None]:
    """A field that changes nothing in an answer, whatever it holds."""
    return BodyField(name, {}, lambda value, field: None)


def refuse_unserved(body: Body, table: type) -> None:
    """Raises InvalidRequest naming the first field of a body that the table does not know, or that asks for what is not
    served."""
    known = fields_of(table)
    for name, value in body.items():
        one = known.get(name)
        if one is None and value is not None:
            raise InvalidRequest("unrecognized request argument", field=name[:80])
        if isinstance(one, Unserved):
            one.read(body)


def _alike(value: object) -> tuple[type, ...]:
    """0 and 0.0 are one default, but False is not 0."""
    return (int, float) if type(value) in (int, float) else (type(value),)
