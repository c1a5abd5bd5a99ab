"""Fields of a JSON body: pydantic reads them into frozen dataclasses, and describes them. Pure.

Ours, since pydantic lacks it: a limit of nesting; `null` counts as absent; one fault is reported, under the caller's
name of the field; unserved fields are accepted with their default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import orjson
from pydantic import GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema as core

from kvproto.errors import InvalidRequest
from kvproto.schema import MAX_DEPTH, is_too_deep

Body = dict[str, Any]
Schema = dict[str, Any]
T = TypeVar("T")

_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}
_BE = "Input should be"  # how pydantic begins most of its messages
_KINDS = dict.fromkeys(("dataclass_type", "dict_type"), f"{_BE} an object") | {"tuple_type": f"{_BE} a list"}


def parse_body(data: bytes) -> Body:
    """Raises InvalidRequest for anything but a JSON object of valid UTF-8, and for one that is nested too deep."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"must be a JSON object, got {_kind_of(value)}", field="body")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        for name, inner in value.items():
            if is_too_deep(inner):
                raise InvalidRequest(f"at most {MAX_DEPTH} lists and objects in one another", field=name[:80])
    return value


def _kind_of(value: object) -> str:
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]


@dataclass(frozen=True)
class Whole:
    """An integer within these bounds; JSON's 7.0 is one."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core.CoreSchema:
        integer = core.int_schema(strict=True, ge=self.low, le=self.high)
        return core.no_info_before_validator_function(_whole, integer)


@dataclass(frozen=True)
class Made:
    """A value that `by` makes of the body's, which is of type `said`."""

    said: Any
    by: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core.CoreSchema:
        return core.no_info_after_validator_function(self.by, handler.generate_schema(self.said))


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < 2**63 else value


class BodyForm(Generic[T]):
    """A route's body: the fields of the dataclass `kind` and of its parts, the dataclasses in it. `others` are known
    fields that are not read, with the values that they may have, None for any. `schema` describes it; the types that
    it refers to are `components` of the OpenAPI document."""

    def __init__(self, kind: type[T], others: Mapping[str, tuple[Any, ...] | None]) -> None:
        self._adapter = TypeAdapter(kind)
        self._others = others
        hints: dict[str, type] = get_type_hints(kind)
        self._parts = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
        said = self._adapter.json_schema(ref_template="#/components/schemas/{model}", schema_generator=_BodySchema)
        self.components: dict[str, Schema] = said.pop("$defs", {})
        own: dict[str, Schema] = said["properties"]
        fields: dict[str, Schema] = {}
        self._part_of: dict[str, str] = {}
        for part, its in self._parts.items():
            del own[part]
            fields |= self.components.pop(its.__name__)["properties"]
            self._part_of |= dict.fromkeys(fields.keys() - self._part_of.keys(), part)
        self._part_of |= dict.fromkeys(own, "")
        fields |= own | {name: {} if taken is None else {"enum": [*taken, None]} for name, taken in others.items()}
        self.schema: Schema = {
            "type": "object",
            "required": [name for name in said.get("required", ()) if name not in self._parts],
            "properties": dict(sorted(fields.items())),
            "additionalProperties": {"type": "null"},
        }

    def read(self, body: Body) -> T:
        """Raises InvalidRequest naming the field."""
        parts: dict[str, Body] = {name: {} for name in self._parts}
        own: Body = {**parts}
        parts[""] = own
        for name, value in body.items():
            if value is None:
                continue
            part = self._part_of.get(name)
            if part is not None:
                parts[part][name] = value
            elif name not in self._others:
                raise InvalidRequest("unrecognized request argument", field=name[:80])
            elif not _is_taken(value, self._others[name]):
                raise InvalidRequest("not supported by this server", field=name)
        try:
            return self._adapter.validate_python(own)
        except ValidationError as error:
            raise _refusal(error, body, self._parts) from None


class _BodySchema(GenerateJsonSchema):
    """Null counts as absent, keys match their pattern, and titles, which repeat names, are left out."""

    def default_schema(self, schema: core.WithDefaultSchema) -> Schema:
        return self.get_flattened_anyof([self.generate_inner(schema["schema"]), {"type": "null"}])

    def dict_schema(self, schema: core.DictSchema) -> Schema:
        said = super().dict_schema(schema)
        return said | {"additionalProperties": False} if "patternProperties" in said else said

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _is_taken(value: Any, taken: tuple[Any, ...] | None) -> bool:
    """0 and 0.0 are one value, but False is not 0."""
    return taken is None or any(value == one and (type(value) is bool) == (type(one) is bool) for one in taken)


def _refusal(error: ValidationError, body: Body, parts: Collection[str]) -> InvalidRequest:
    """The deepest fault: of a union's it is nearest to what the caller meant."""
    fault = max(error.errors(include_url=False, include_context=False), key=lambda one: len(one["loc"]))
    text, said = _KINDS.get(fault["type"], fault["msg"]), fault["input"]
    if fault["type"] == "enum" and isinstance(said, str):
        text = f"must be one of {text.removeprefix(_BE).strip()}, got {said[:40]!r}"
    elif text.startswith(_BE):
        got = said if type(said) in (int, float) else _kind_of(said)
        text = f"must be{text.removeprefix(_BE)}, got {got}"
    steps = fault["loc"]
    return InvalidRequest(text, field=_name(steps[1:] if steps[0] in parts else steps, body))


def _name(steps: tuple[int | str, ...], said: Any) -> str:
    """Without steps that pydantic adds for unions, and without keys of a field's own."""
    name = ""
    for step in steps[:-2] if steps[-1] == "[key]" else steps:
        if isinstance(step, int):
            if type(said) is list:
                name, said = f"{name}[{step}]", said[step] if step < len(said) else None
        elif type(said) is dict and step.isidentifier() and (step in said or step == steps[-1]):
            name, said = f"{name}.{step}" if name else step, said.get(step)
    return name
