"""Objects are closed where that takes nothing from what a schema asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvproto.closed_schema import close
from tests.support.json_schemas import schemas

WORD = {"type": "string"}
OPEN = {"type": "object", "properties": {"a": WORD}}
CLOSED = OPEN | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("said", "closed"),
    [
        (OPEN, CLOSED),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        (OPEN | {"required": ["a"]}, CLOSED | {"required": ["a"]}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [OPEN, WORD]}, {"prefixItems": [CLOSED, WORD]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"type": "object", "additionalProperties": OPEN}, {"type": "object", "additionalProperties": CLOSED}),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, {"$ref": "#/$defs/x", "$defs": {"x": CLOSED}}),
        ({"properties": {"not": OPEN, "allOf": True}, "additionalProperties": {}},
         {"properties": {"not": CLOSED, "allOf": True}, "additionalProperties": {}}),
    ],
)  # fmt: skip
def test_closed(said: dict[str, Any], closed: dict[str, Any]) -> None:
    assert close(said) == closed


@pytest.mark.parametrize(
    "said",
    [
        {"type": "object"},
        OPEN | {"additionalProperties": True},
        OPEN | {"patternProperties": {"^b": WORD}},
        OPEN | {"propertyNames": {"maxLength": 3}},
        OPEN | {"minProperties": 2},
        OPEN | {"required": ["b"]},
        OPEN | {"required": "a"},
        {"properties": "a"},
        {"allOf": [OPEN, {"properties": {"b": WORD}}]},
        {"oneOf": [OPEN, {"properties": {"b": WORD}}]},
        {"type": "object", "properties": {"a": OPEN, "b": {"not": OPEN}}},
        OPEN | {"anyOf": [{"required": ["a"]}, {"properties": {"b": WORD}}]},
        OPEN | {"$ref": "#/$defs/x", "$defs": {"x": OPEN}},
        {"anyOf": [OPEN], "$ref": "#/$defs/x", "$defs": {"x": OPEN}},
        {"enum": [{"properties": {}}]},
        {"default": OPEN, "examples": [OPEN]},
    ],
)
def test_left_as_it_is(said: dict[str, Any]) -> None:
    assert close(said) == said


def test_what_is_nested_too_deep_is_left_to_whoever_compiles_it() -> None:
    said: dict[str, Any] = OPEN
    for _ in range(5000):
        said = {"items": said}
    assert close(said) is said


def test_the_schemas_that_are_tried_on_engines_are_of_both_kinds() -> None:
    changed = [name for name, one in schemas().items() if close(one) != one]
    assert any(name.startswith("open-") for name in changed)
    assert len(changed) < len(schemas())
