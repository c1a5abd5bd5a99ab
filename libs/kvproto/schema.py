"""A message's fields, read from its annotations: how each is checked, read and written. Pure.

Built once per message type. Readers raise CodecError or UnknownEnumValue with the path of the field.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvproto.block_hash import pack_ids, unpack_ids
from kvproto.errors import CodecError, InvalidRequest, UnknownEnumValue
from kvproto.messages.vocabulary import Ids, MaxLength, Range

MAX_DEPTH = 64  # of what may be anything, in lists and maps: less than what any packer takes

T = TypeVar("T")
_Read = Callable[[Any, str], Any]
_Write = Callable[[Any, bool], Any]  # (value, packed ids?) -> msgpack or JSON value


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    read: _Read
    write: _Write | None  # None: the value stands for itself
    default: Any
    factory: Callable[[], Any] | None
    required: bool


def type_error(path: str, expected: str, value: Any) -> CodecError:
    return CodecError(f"expected {expected}, got {type(value).__name__}", field=path or "message")


def _limit(bounds: tuple[Any, ...]) -> int | None:
    return next((bound.limit for bound in bounds if isinstance(bound, MaxLength)), None)


def _scalar(kind: type[Any], bounds: tuple[Any, ...]) -> _Read:
    span = next((bound for bound in bounds if isinstance(bound, Range)), Range(-math.inf, math.inf))
    low, high, limit = span.low, span.high, _limit(bounds)

    def read(value: Any, path: str) -> Any:
        if kind is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise CodecError(f"must be within [{low}, {high}]", field=path) from None
        if type(value) is not kind:
            raise type_error(path, kind.__name__, value)
        if kind in (int, float) and not low <= value <= high:
            raise CodecError(f"must be within [{low}, {high}], got {value}", field=path)
        if kind is float and not math.isfinite(value):
            raise CodecError("must be finite", field=path)
        if limit is not None and len(value) > limit:
            raise CodecError(
                f"at most {limit} {'bytes' if kind is bytes else 'characters'}, got {len(value)}", field=path
            )
        return value

    return read


def _ids(bound: Ids) -> tuple[_Read, _Write]:
    def read(value: Any, path: str) -> tuple[int, ...]:
        if isinstance(value, bytes):
            if len(value) % 4:
                raise CodecError("packed ids must be a multiple of 4 bytes", field=path)
            if len(value) > 4 * bound.max_items:
                raise CodecError(f"at most {bound.max_items} ids", field=path)
            return unpack_ids(value)
        if not isinstance(value, list | tuple):
            raise type_error(path, "token ids", value)
        if len(value) > bound.max_items:
            raise CodecError(f"at most {bound.max_items} ids, got {len(value)}", field=path)
        for i, item in enumerate(value):
            if type(item) is not int or not 0 <= item < 2**32:
                raise CodecError("must be an integer within [0, 4294967295]", field=f"{path}[{i}]")
        return tuple(value)

    return read, lambda value, packed: pack_ids(value) if packed else list(value)


def enum_reader(kind: type[StrEnum]) -> _Read:
    known = {member.value: member for member in kind}

    def read(value: Any, path: str) -> StrEnum:
        if type(value) is not str:
            raise type_error(path, "str", value)
        if value not in known:
            raise UnknownEnumValue(f"{value[:64]!r} is none of {', '.join(known)}", field=path)
        return known[value]

    return read


def _sequence(item: Any, bounds: tuple[Any, ...]) -> tuple[_Read, _Write]:
    read_item, write_item = _compile(item)
    limit = _limit(bounds)

    def read(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise type_error(path, "list", value)
        if limit is not None and len(value) > limit:
            raise CodecError(f"at most {limit} items, got {len(value)}", field=path)
        return tuple(read_item(element, f"{path}[{i}]") for i, element in enumerate(value))

    def write(value: Any, packed: bool) -> list[Any]:
        return [write_item(element, packed) for element in value] if write_item else list(value)

    return read, write


def _mapping(key_kind: Any, item: Any, bounds: tuple[Any, ...]) -> tuple[_Read, _Write]:
    """Keys are text on the wire, as JSON demands; integer keys are written in decimal."""
    read_item, write_item = _compile(item)
    limit = _limit(bounds)

    def read(value: Any, path: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise type_error(path, "map", value)
        if limit is not None and len(value) > limit:
            raise CodecError(f"at most {limit} entries, got {len(value)}", field=path)
        out: dict[Any, Any] = {}
        for key, element in value.items():
            if key_kind is int and type(key) is int:  # a bare producer's msgpack
                key = str(key)
            if type(key) is not str:
                raise type_error(f"{path} key", "str", key)
            if key_kind is int and not (key.isascii() and key.isdigit() and len(key) < 20):
                raise CodecError("keys must be integers in decimal, at least 0", field=f"{path}.{key[:64]}")
            out[key_kind(key)] = read_item(element, f"{path}.{key}")
        return out

    def write(value: Any, packed: bool) -> dict[str, Any]:
        return {str(key): write_item(element, packed) if write_item else element for key, element in value.items()}

    return read, write


def is_too_deep(value: Any) -> bool:
    """Whether it has more than MAX_DEPTH lists and maps in one another."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer) if type(inner) in (list, dict)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def _read_any(value: Any, path: str) -> Any:
    if is_too_deep(value):
        raise InvalidRequest(f"at most {MAX_DEPTH} lists and objects in one another", field=path)
    return value


def _compile(hint: Any) -> tuple[_Read, _Write | None]:
    bounds: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
        bounds = tuple(extra)
        ids = next((b for b in bounds if isinstance(b, Ids)), None)
        if ids is not None:
            return _ids(ids)
        if get_origin(hint) is Annotated:  # a bounded alias, bounded again
            return _compile(hint)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = [arg for arg in get_args(hint) if arg is not type(None)]
        read_inner, write_inner = _compile(inner)
        return (
            lambda value, path: None if value is None else read_inner(value, path),
            (lambda value, packed: None if value is None else write_inner(value, packed)) if write_inner else None,
        )
    if origin is tuple:
        return _sequence(get_args(hint)[0], bounds)
    if origin is dict:
        key_kind, item = get_args(hint)
        return _mapping(key_kind, item, bounds)
    if is_dataclass(hint) and isinstance(hint, type):
        kind = hint
        return lambda value, path: read_map(kind, value, path), lambda value, packed: to_map(value, packed=packed)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return enum_reader(hint), lambda value, packed: value.value
    if hint is Any:
        return _read_any, None
    if hint in (int, float, str, bytes, bool):
        return _scalar(hint, bounds), None
    raise TypeError(f"the codec cannot carry {hint!r}")


_SCHEMAS: dict[type[Any], tuple[Field, ...]] = {}


def schema_of(kind: type[Any]) -> tuple[Field, ...]:
    known = _SCHEMAS.get(kind)
    if known is not None:
        return known
    hints = get_type_hints(kind, include_extras=True)
    out = []
    for f in fields(kind):
        read, write = _compile(hints[f.name])
        factory = None if f.default_factory is MISSING else f.default_factory
        default = None if f.default is MISSING else f.default
        out.append(Field(f.name, read, write, default, factory, f.default is MISSING and factory is None))
    _SCHEMAS[kind] = tuple(out)
    return _SCHEMAS[kind]


def to_map(message: Any, *, packed: bool = True) -> dict[str, Any]:
    """A message as a map of plain values, fields at their default left out. `packed`: token ids as u32le bytes."""
    out: dict[str, Any] = {}
    for f in schema_of(type(message)):
        value = getattr(message, f.name)
        if f.required or value != (f.factory() if f.factory else f.default):
            out[f.name] = f.write(value, packed) if f.write else value
    return out


def read_map(kind: type[T], value: Any, path: str = "") -> T:
    if not isinstance(value, dict):
        raise type_error(path, f"a map ({kind.__name__})", value)
    out: dict[str, Any] = {}
    for f in schema_of(kind):
        name = f"{path}.{f.name}" if path else f.name
        if f.name in value:
            out[f.name] = f.read(value[f.name], name)
        elif f.required:
            raise CodecError("missing", field=name)
    return kind(**out)
