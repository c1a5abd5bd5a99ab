"""Two hundred JSON schemas of the shapes that the JSON Schema test suite has: what an output may be asked to be.

Each bounds what it asks for, so that a model that knows nothing comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SHORT = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}


def schemas() -> dict[str, Schema]:
    """By name."""
    families = {
        "type": _types(), "enum": _enums(), "const": _consts(), "number": _numbers(), "string": _strings(),
        "pattern": _patterns(), "format": _formats(), "array": _arrays(), "object": _objects(), "nested": _nested(),
        "union": _unions(), "recursive": _recursive(), "open": _open(),
        "real": _real(),
    }  # fmt: skip
    return {f"{family}-{at}": schema for family, some in families.items() for at, schema in enumerate(some)}


def _types() -> Iterator[Schema]:
    yield {"type": "boolean"}
    yield {"type": "null"}
    yield SHORT
    yield SMALL
    yield {"type": ["boolean", "null"]}
    yield {"type": ["integer", "null"], "minimum": -5, "maximum": 5}
    yield {"type": ["string", "boolean"], "maxLength": 4}
    yield {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
    yield {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False}
    yield {"type": "object", "additionalProperties": False}
    yield {"type": "array", "maxItems": 0}


def _enums() -> Iterator[Schema]:
    for values in (
        ["red"], ["red", "amber", "green"], ["", " ", "a b"], [1, 2, 3], [1.5, -2.25, 1e10], [True, False], [None],
        [None, 0, "0", False], [[], {}], [[1, 2], [3, 4]], [{"a": 1}, {"a": 2, "b": [None]}],
        ["ü", "日本", "🙂", "ñandú"], ['quo"te', "back\\slash", "new\nline", "tab\t"], ["prefix", "prefixes", "pre"],
        [f"value {at}" for at in range(300)], list(range(500)),
    ):  # fmt: skip
        yield {"enum": values}


def _consts() -> Iterator[Schema]:
    for value in ("fixed", 7, -0.5, True, None, [1, "a", None], {"a": {"b": [1]}}, "日本 🙂", "", {}, " " * 40):
        yield {"const": value}


def _numbers() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 9), (-9, -1), (-100, 100), (17, 1234), (999, 1001), (-1, 0), (10**9, 10**9 + 7)):
        yield {"type": "integer", "minimum": low, "maximum": high}
        yield {"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
    for least, most in ((0.0, 1.0), (-0.5, 0.5), (0.125, 0.25), (-10.0, -9.5), (1.0, 1000.0)):
        yield {"type": "number", "minimum": least, "maximum": most}
        yield {"type": "number", "exclusiveMinimum": least, "exclusiveMaximum": most}
    for step in (2, 5, 10, 25):
        yield {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": step}


def _strings() -> Iterator[Schema]:
    for least, most in ((0, 0), (0, 1), (1, 1), (3, 3), (2, 5), (0, 20), (10, 12), (1, 30), (4, 4), (0, 2)):
        yield {"type": "string", "minLength": least, "maxLength": most}


def _patterns() -> Iterator[Schema]:
    for pattern in (
        "^a$", "^[a-c]+x{2}$", "^[A-Z]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^[^a-z]{2}$", "^\\d{1,3}(\\.\\d{1,3}){3}$",
        "^\\+?[0-9]{6,12}$", "^[a-z]{1,9}(-[a-z]{1,9}){0,3}$", "^#[0-9a-f]{6}$",
        "^\\s{1,2}$", "^[\\u00e0-\\u00ff]{2,4}$",
        "^(ab|cd){1,4}$", "^[0-9]{4}-(0[1-9]|1[0-2])$", "^\\w{1,6}@\\w{1,6}\\.(com|org)$", "^.{3}$", "^(a?b?c?)$",
        "^[\"\\\\]{1,3}$", "^$",
    ):  # fmt: skip
        yield {"type": "string", "pattern": pattern}


def _formats() -> Iterator[Schema]:
    for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "duration"):
        yield {"type": "string", "format": name}


def _arrays() -> Iterator[Schema]:
    for least, most in ((0, 0), (1, 1), (0, 3), (2, 4), (5, 5)):
        yield {"type": "array", "items": SMALL, "minItems": least, "maxItems": most}
        yield {"type": "array", "items": WORD, "minItems": least, "maxItems": most}
    yield {"type": "array", "prefixItems": [SMALL, WORD, {"type": "boolean"}], "items": False, "minItems": 3}
    yield {"type": "array", "prefixItems": [WORD], "items": SMALL, "minItems": 2, "maxItems": 4}
    yield {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "maxItems": 3}
    yield {"type": "array", "items": {"enum": ["x", "o"]}, "minItems": 9, "maxItems": 9}
    yield {"type": "array", "items": {"anyOf": [SMALL, WORD, {"type": "null"}]}, "minItems": 1, "maxItems": 5}


def _objects() -> Iterator[Schema]:
    three = {"a": SMALL, "b": WORD, "c": {"type": "boolean"}}
    for required in ([], ["a"], ["c"], ["a", "c"], ["a", "b", "c"]):
        yield {"type": "object", "properties": three, "required": required, "additionalProperties": False}
    yield {"type": "object", "additionalProperties": SMALL, "maxProperties": 3}
    yield {"type": "object", "properties": {"a": SMALL}, "required": ["a"], "additionalProperties": False, "title": "T"}
    yield {"type": "object", "properties": {"a b": SMALL, "ü": WORD, "\"": SMALL, "": SMALL},
           "required": ["a b", "ü", "\"", ""], "additionalProperties": False}  # fmt: skip
    yield {"type": "object", "properties": {f"p{at}": SMALL for at in range(40)}, "required": ["p0", "p39"],
           "additionalProperties": False}  # fmt: skip
    yield {"type": "object", "properties": {f"p{at}": {"enum": [at]} for at in range(30)},
           "required": [f"p{at}" for at in range(30)], "additionalProperties": False}  # fmt: skip
    yield {"properties": {"kind": {"const": "k"}}, "required": ["kind"], "type": "object",
           "additionalProperties": False, "description": "words that change nothing"}  # fmt: skip


def _closed(**properties: Schema) -> Schema:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def _nested() -> Iterator[Schema]:
    inner: Schema = SMALL
    for depth in range(1, 25):
        inner = _closed(a=inner) if depth % 2 else {"type": "array", "items": inner, "minItems": 1, "maxItems": 1}
        yield inner
    yield _closed(a=_closed(b=_closed(c=WORD), d=SMALL), e=_closed(f={"type": "null"}))
    yield {"type": "array", "items": _closed(x=SMALL, y=SMALL), "minItems": 2, "maxItems": 3}
    yield _closed(rows={"type": "array", "items": {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 2},
                        "minItems": 2, "maxItems": 2})  # fmt: skip


def _unions() -> Iterator[Schema]:
    yield {"anyOf": [SMALL, WORD]}
    yield {"anyOf": [{"type": "null"}, _closed(a=SMALL)]}
    yield {"oneOf": [_closed(kind={"const": "circle"}, r=SMALL), _closed(kind={"const": "square"}, side=SMALL)]}
    yield {"anyOf": [{"type": "array", "items": SMALL, "maxItems": 2}, {"type": "boolean"}]}
    yield {"anyOf": [{"enum": ["a"]}, {"enum": ["b", 1]}, {"const": None}]}
    yield {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}
    yield {"allOf": [_closed(a=SMALL), {"required": ["a"]}]}
    yield _closed(value={"anyOf": [SMALL, {"type": "null"}]}, other={"anyOf": [WORD, {"type": "boolean"}]})
    yield {"anyOf": [_closed(a=SMALL), _closed(a=SMALL, b=WORD), _closed(c={"type": "null"})]}
    for count in (2, 3, 4, 6, 8, 16):
        yield {"anyOf": [_closed(**{f"k{at}": SMALL}) for at in range(count)]}
        yield {"anyOf": [{"type": "string", "pattern": f"^{chr(97 + at)}{{1,3}}$"} for at in range(count)]}


def _recursive() -> Iterator[Schema]:
    def of(definition: Schema) -> Schema:
        return {"$ref": "#/$defs/it", "$defs": {"it": definition}}

    it = {"$ref": "#/$defs/it"}
    yield of({"anyOf": [{"type": "null"}, _closed(next=it)]})
    yield of({"anyOf": [SMALL, {"type": "array", "items": it, "maxItems": 1}]})
    yield of(_closed(value=SMALL, children={"type": "array", "items": it, "maxItems": 1}))
    yield of({"anyOf": [_closed(leaf=WORD), _closed(left=it, leaf=WORD)]})
    yield of({"type": "object", "properties": {"v": SMALL, "n": it}, "required": ["v"], "additionalProperties": False})
    yield of({"anyOf": [{"enum": ["+", "-"]}, _closed(op={"enum": ["neg"]}, of=it)]})
    yield {"$ref": "#/definitions/a", "definitions": {
        "a": {"anyOf": [SMALL, _closed(b={"$ref": "#/definitions/b"})]},
        "b": {"anyOf": [WORD, _closed(a={"$ref": "#/definitions/a"})]}}}  # fmt: skip


def _open() -> Iterator[Schema]:
    """Nothing is said of further properties, as most libraries leave it."""
    point = {"type": "object", "properties": {"x": SMALL, "y": SMALL}, "required": ["x", "y"]}
    yield point
    yield {"type": "object", "properties": {}}
    yield {"properties": {"name": WORD, "at": point}, "type": "object", "required": ["name"]}
    yield {"type": "array", "items": point, "minItems": 1, "maxItems": 3}
    yield {"type": "object", "properties": {"at": {"anyOf": [point, {"type": "null"}]}}, "required": ["at"]}
    yield {"type": "object", "properties": {"at": {"$ref": "#/$defs/P", "description": "d"}}, "$defs": {"P": point}}
    yield {"type": "object", "properties": {"at": {"description": "d", "default": None, "anyOf": [
        {"$ref": "#/$defs/P"}, {"type": "null"}]}}, "$defs": {"P": point}}  # fmt: skip


def _real() -> Iterator[Schema]:
    """As tools and forms have them."""
    yield _closed(city=WORD, unit={"enum": ["celsius", "fahrenheit"]}, days=SMALL)
    yield _closed(name=WORD, email={"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"}, age=SMALL)
    yield _closed(
        answer={"enum": ["A", "B", "C", "D"]}, confidence={"type": "number", "minimum": 0.0, "maximum": 1.0},
        reasons={"type": "array", "items": SHORT, "minItems": 1, "maxItems": 3},
    )  # fmt: skip
    yield _closed(
        order=_closed(id={"type": "string", "format": "uuid"}, at={"type": "string", "format": "date-time"}),
        items={"type": "array", "minItems": 1, "maxItems": 2,
               "items": _closed(sku={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, count=SMALL)},
    )  # fmt: skip
    yield _closed(
        thought=SHORT,
        call={"anyOf": [
            _closed(tool={"const": "search"}, query=SHORT), _closed(tool={"const": "open"}, page=SMALL),
        ]},
    )  # fmt: skip
    yield _closed(entities={"type": "array", "maxItems": 3, "items": _closed(
        text=SHORT, label={"enum": ["PERSON", "PLACE", "DATE"]}, start=SMALL, end=SMALL)})  # fmt: skip
    for count in range(2, 13):
        yield _closed(**{f"field_{at}": (SMALL, WORD, {"type": "boolean"}, SHORT)[at % 4] for at in range(count)})
