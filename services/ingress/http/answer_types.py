"""Types of answers: dataclasses that are sent as JSON and described in OpenAPI from one set of fields. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema as core

from kvservice.fields import Schema

Natural = Annotated[int, Field(ge=0)]


@dataclass_transform()
class Described:
    """Subclasses are dataclasses. A field that has a default may be absent."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)


Told = TypeVar("Told", bound=Described)


def told(kind: type[Told], source: object, **others: Any) -> Told:
    """An answer with the fields of `source` and `others`."""
    own = {one.name: getattr(source, one.name) for one in fields(kind) if one.name not in others}  # type: ignore[arg-type]
    return kind(**own, **others)


class _Closed(GenerateJsonSchema):
    """Allows no undescribed fields, so that tests find them."""

    def dataclass_schema(self, schema: core.DataclassSchema) -> Schema:
        return super().dataclass_schema(schema) | {"additionalProperties": False}

    def default_schema(self, schema: core.WithDefaultSchema) -> Schema:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def described(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Schema]]:
    """`value` with schemas in place of types, and the components that they refer to."""
    kinds: dict[type, None] = {}
    _with(kinds.setdefault, value)
    schemas, shared = TypeAdapter.json_schemas(
        [(kind, "serialization", TypeAdapter(kind)) for kind in kinds],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Closed,
    )
    return _with(lambda kind: schemas[kind, "serialization"], value), shared["$defs"]


def _with(schema_of: Callable[[type], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with(schema_of, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with(schema_of, one) for one in value]
    return schema_of(value) if isinstance(value, type) else value
