"""JSON schemas whose objects have the properties that they name, and no others. Pure.

Most schemas say nothing of further properties, which allows any: a model that has not learnt to stop adds them without
end, and what reads the answer drops them. What is valid for the closed schema is valid for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where a value must fit more than one schema, or must not fit one, a closed one is another question.
_COMBINE = frozenset({
    "allOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "unevaluatedProperties", "$dynamicRef",
})  # fmt: skip
_OPEN = frozenset({"additionalProperties", "patternProperties", "propertyNames", "minProperties"})
_OF_OBJECTS = _OPEN | {"properties", "required"}


class _Combines(Exception):
    pass


def close(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema` itself where any part of it combines schemas."""
    try:
        closed: Mapping[str, Any] = _close(schema)
    except (_Combines, RecursionError):
        return schema
    return closed


def _close(said: Any) -> Any:
    if not isinstance(said, Mapping):
        return said  # true or false
    keys = said.keys()
    if keys & _COMBINE or len(keys & {"anyOf", "$ref"}) + bool(keys & _OF_OBJECTS) > 1:
        raise _Combines
    closed = {keyword: _below(keyword, value) for keyword, value in said.items()}
    if not keys & _OPEN and _are_all(said.get("required", []), said.get("properties")):
        closed["additionalProperties"] = False
    return closed


def _are_all(required: Any, known: Any) -> bool:
    return isinstance(known, Mapping) and isinstance(required, list) and all(f"{one}" in known for one in required)


def _below(keyword: str, value: Any) -> Any:
    if keyword in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
        return {name: _close(one) for name, one in value.items()}
    if keyword in ("items", "prefixItems", "anyOf") and isinstance(value, list):
        return [_close(one) for one in value]
    return _close(value) if keyword in ("items", "additionalProperties", "contains") else value
