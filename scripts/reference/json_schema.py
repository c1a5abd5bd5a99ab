"""A JSON Schema in words, for one cell of a table. Pure."""

from __future__ import annotations

import json
from typing import Any

Schema = dict[str, Any]

_HIDDEN_ABOVE = 2**53  # such a bound is the number's own


def words(schema: Schema) -> str:
    """What a value may be, such as `integer, 0 to 8`. A reference is a link to the heading of its name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"] if one is not None) or "null"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            told = [words(one) for one in schema[key] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(told)) or "null"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        kind = " or ".join(one for one in kind if one != "null")
    if kind == "array":
        return f"list of {words(schema.get('items', {}))}{_bounds(schema, 'minItems', 'maxItems')}"
    if kind == "object":
        return _object(schema)
    if kind == "string":
        told = "path" if schema.get("format") == "path" else "string"
        return f"{told}{_bounds(schema, 'minLength', 'maxLength', unit=' characters')}"
    return f"{kind}{_bounds(schema, 'minimum', 'maximum')}{_bounds(schema, 'exclusiveMinimum', 'exclusiveMaximum')}"


def _object(schema: Schema) -> str:
    if "properties" in schema:
        return f"{{{', '.join(f'{name}: {words(one)}' for name, one in schema['properties'].items())}}}"
    values = schema.get("additionalProperties")
    return f"object of {words(values)}" if isinstance(values, dict) and values else "object"


def _bounds(schema: Schema, low_key: str, high_key: str, unit: str = "") -> str:
    low, high = schema.get(low_key), schema.get(high_key)
    if isinstance(high, int) and high >= _HIDDEN_ABOVE:
        high = None
    if isinstance(low, int) and low <= -_HIDDEN_ABOVE:
        low = None
    if unit and low in (0, 1):  # that a text may be empty, or not, is told by the answer to it
        low = None
    if low is None and high is None:
        return ""
    exclusive = low_key.startswith("exclusive")
    if high is None:
        return f", above {_number(low)}" if exclusive else f", {_number(low)} or more{unit}"
    if low is None:
        return f", below {_number(high)}" if exclusive else f", at most {_number(high)}{unit}"
    return f", {_number(low)} to {_number(high)}{unit}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
