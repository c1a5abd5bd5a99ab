"""The one codec: messages to bytes and back. Pure.

Three forms of the same messages:

* wire: a version byte, then a msgpack map; token ids packed as u32le. Between services.
* plain: a msgpack map, or JSON, with ids as lists. For bare producers; the leading version byte may be left out.
* frames: a version byte, then a msgpack array of positional arrays `[tag, field...]`. The hot path: one message
  carries one step's frames of many sequences.

Readers accept versions N-1 and N. A request is written in its reader's version; a message with many readers, or one of
unknown version, in N-1. Unknown fields are ignored; an unknown enumeration value, a wrong type, a missing field or a
value out of bounds raises an error that names the field (`sampling.top_p: ...`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgpack

from kvproto import messages as m
from kvproto.errors import CodecError, Unavailable, VersionMismatch
from kvproto.schema import read_map, schema_of, to_map, type_error

VERSION = 1
MIN_VERSION = max(1, VERSION - 1)
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
MAX_BUNDLE_BYTES = 96 * 1024 * 1024  # joined from parts before it is read

T = TypeVar("T")
_pack: Callable[..., bytes] = msgpack.packb


def _unpack(data: bytes | memoryview, *, text_keys: bool = True) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=text_keys)
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"not msgpack: {str(error)[:120] or type(error).__name__}") from None


def _open(data: bytes, limit: int = MAX_MESSAGE_BYTES, *, text_keys: bool = True) -> Any:
    """Version byte checked, rest unpacked."""
    if not data:
        raise CodecError("empty message")
    if len(data) > limit:
        raise CodecError(f"at most {limit} bytes, got {len(data)}")
    if data[0] in b"{[":
        raise CodecError("looks like JSON: send the header Content-Type: application/json with it")
    if not MIN_VERSION <= data[0] <= VERSION:
        raise VersionMismatch(f"version {data[0]}, this reader accepts {MIN_VERSION} to {VERSION}")
    return _unpack(memoryview(data)[1:], text_keys=text_keys)


def encode(message: Any, version: int | None = None) -> bytes:
    """Wire form of one message in `version` (see `common_version`); None: the version that all readers accept."""
    return bytes((version or MIN_VERSION,)) + _pack(to_map(message))


def decode(kind: type[T], data: bytes, *, limit: int = MAX_MESSAGE_BYTES) -> T:
    """Read one message in wire form. Raises CodecError (field named), VersionMismatch or UnknownEnumValue."""
    return read_map(kind, _open(data, limit))


def open_map(data: bytes) -> dict[str, Any]:
    """The unchecked fields of one message in wire form. Raises CodecError."""
    value = _open(data)
    if not isinstance(value, dict):
        raise type_error("message", "map", value)
    return value


def common_version(versions: tuple[int, ...]) -> int:
    """The version to write to a member that carries `[min, max]`. Raises VersionMismatch if there is none."""
    low, high = (versions[0], versions[-1]) if versions else (1, 1)
    version = min(VERSION, high)
    if version < max(MIN_VERSION, low):
        raise VersionMismatch(f"the member speaks {low} to {high}, this process {MIN_VERSION} to {VERSION}")
    return version


def version_of_offer(worker: m.WorkerRecord, request: m.GenerateRequest) -> int:
    """The version to write a request to a worker in. Raises VersionMismatch, and Unavailable for a worker that would
    ignore a part of it."""
    said = request.sampling
    if request.chat is not None and not worker.chats:
        raise Unavailable(f"worker {worker.id} renders no chats", field="messages")
    if said.grammar is not None and not worker.grammars:
        raise Unavailable(f"worker {worker.id} follows no grammars", field=said.grammar.said)
    if (said.prompt_logprobs is not None or not said.max_tokens) and not worker.scores:
        raise Unavailable(f"worker {worker.id} scores no prompts", field="prompt_logprobs")
    if said.beams is not None and not worker.beams:
        raise Unavailable(f"worker {worker.id} searches no beams", field="use_beam_search")
    return common_version(worker.versions)


def supported_versions() -> tuple[int, int]:
    return MIN_VERSION, VERSION


def is_map_marker(first: int) -> bool:
    """Whether a msgpack document that starts with this byte is a map."""
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def decode_plain(kind: type[T], data: bytes, *, as_json: bool) -> T:
    """Read a bare producer's message: JSON, or a msgpack map with or without the version byte. Token ids as keys may be
    integers in msgpack."""
    if as_json:
        return read_map(kind, _parse_json(data))
    if data and is_map_marker(data[0]) and len(data) <= MAX_MESSAGE_BYTES:
        return read_map(kind, _unpack(data, text_keys=False))
    return read_map(kind, _open(data, text_keys=False))


def encode_plain(message: Any, *, as_json: bool) -> bytes:
    """Inverse of `decode_plain`."""
    value = to_map(message, packed=False)
    if as_json:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return _pack(value)


def _parse_json(data: bytes) -> Any:
    def no_constant(name: str) -> Any:
        raise CodecError(f"{name} is not JSON")

    if len(data) > MAX_MESSAGE_BYTES:
        raise CodecError(f"at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    try:
        text = data.decode("utf-8")  # json.loads would guess at UTF-16 and let surrogates in
        value = json.loads(text, parse_constant=no_constant)
        if "\\u" in text:  # an escaped lone surrogate is legal JSON and no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON: {str(error)[:120]}") from None
    return value


def encode_plain_frame(frame: m.Frame, *, as_json: bool) -> bytes:
    """One frame as a map with its `type`, ids as a list."""
    if (
        isinstance(frame, m.Tokens | m.PromptScores) and frame.logprobs
    ):  # JSON knows no infinity, and maps are read with finite numbers only
        frame = replace(frame, logprobs=tuple(map(floored, frame.logprobs)))
    value = {"type": _TYPES[type(frame)], **to_map(frame, packed=False)}
    if as_json:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return _pack(value, unicode_errors="replace")


def decode_plain_frame(data: bytes, *, as_json: bool) -> m.Frame:
    """Inverse of `encode_plain_frame`."""
    value = _parse_json(data) if as_json else _unpack(data)
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _BY_TYPE:
        raise CodecError("not a frame", field="type")
    frame: m.Frame = read_map(_BY_TYPE[kind], value)
    return frame


# A frame's tag is its place here.
_FRAMES = (
    m.Accepted, m.Started, m.Tokens, m.Finished, m.Failed, m.Moved, m.Progress, m.ChoiceFinished, m.PromptScores,
)  # fmt: skip
_TAGS: dict[int, type[Any]] = dict(enumerate(_FRAMES))
_TAG_OF = {kind: tag for tag, kind in _TAGS.items()}
_TYPES = {kind: kind.__name__.lower() for kind in _TAGS.values()}
_BY_TYPE = {name: kind for kind, name in _TYPES.items()}
_TOKENS, _SCORES = 2, 8


def _frame_values(frame: m.Frame) -> list[Any]:
    row: list[Any]
    if type(frame) is m.Tokens:
        row = [_TOKENS, frame.request, frame.attempt, frame.choice, frame.index, frame.ids, frame.text]
        if frame.logprobs or frame.deltas:
            row.append(logprob_rows(frame.logprobs))
        if frame.deltas:
            row.append([to_map(delta) for delta in frame.deltas])
        return row
    if type(frame) is m.PromptScores:
        return [_SCORES, frame.request, frame.attempt, frame.index, logprob_rows(frame.logprobs)]
    row = [_TAG_OF[type(frame)]]
    for f in schema_of(type(frame)):
        value = getattr(frame, f.name)
        row.append(f.write(value, True) if f.write else value)
    return row


def encode_frames(frames: Iterable[m.Frame], version: int | None = None) -> bytes:
    """One message with many frames, of one or many sequences."""
    return bytes((version or MIN_VERSION,)) + _pack([_frame_values(f) for f in frames], unicode_errors="replace")


def decode_frames(data: bytes) -> list[m.Frame]:
    """Inverse of `encode_frames`. Raises CodecError; frames of a kind this version does not know are left out."""
    rows = _open(data)
    if not isinstance(rows, list):
        raise type_error("frames", "list", rows)
    out: list[m.Frame] = []
    for row in rows:
        if not isinstance(row, list) or not row or type(row[0]) is not int:
            raise type_error("frame", "[tag, field...]", row)
        if row[0] == _TOKENS:
            out.append(_read_tokens(row))
        elif row[0] == _SCORES:
            out.append(_read_scores(row))
        elif row[0] in _TAGS:
            out.append(_read_row(_TAGS[row[0]], row))
    return out


def _read_tokens(row: list[Any]) -> m.Tokens:
    """Unrolled: this is a fleet's hottest reader."""
    try:
        _, request, attempt, choice, index, ids, text = row[:7]
    except ValueError:
        raise CodecError("missing", field="tokens") from None
    if not (type(request) is str and type(attempt) is type(choice) is type(index) is int):
        raise CodecError("wrong type", field="tokens")
    if type(ids) is not list or type(text) is not list or len(ids) != len(text) or index < 0 or attempt < 0:
        raise CodecError("wrong type or length", field="tokens.ids")
    for one, piece in zip(ids, text, strict=True):
        if type(one) is not int or type(piece) is not str:
            raise CodecError("wrong type", field="tokens.ids")
    logprobs = read_logprobs(row[7], len(ids), "tokens.logprobs") if len(row) > 7 else ()
    deltas = _read_deltas(row[8], len(ids)) if len(row) > 8 else ()
    return m.Tokens(request, attempt, choice, index, tuple(ids), tuple(text), logprobs, deltas)


def _read_deltas(rows: Any, tokens: int) -> tuple[m.AssistantDelta, ...]:
    if type(rows) is not list or len(rows) not in (0, tokens):
        raise CodecError("wrong type or length", field="tokens.deltas")
    return tuple(read_map(m.AssistantDelta, row, f"tokens.deltas[{at}]") for at, row in enumerate(rows))


def _read_scores(row: list[Any]) -> m.PromptScores:
    try:
        _, request, attempt, index, rows = row[:5]
    except ValueError:
        raise CodecError("missing", field="promptscores") from None
    if not (type(request) is str and type(attempt) is type(index) is int and attempt >= 0 and index >= 0):
        raise CodecError("wrong type or value", field="promptscores")
    return m.PromptScores(request, attempt, index, read_logprobs(rows, None, "promptscores.logprobs"))


def _read_row(kind: type[Any], row: list[Any]) -> m.Frame:
    out: dict[str, Any] = {}
    name = kind.__name__.lower()
    for position, f in enumerate(schema_of(kind), start=1):
        if position < len(row):
            out[f.name] = f.read(row[position], f"{name}.{f.name}")
        elif f.required:
            raise CodecError("missing", field=f"{name}.{f.name}")
    frame: m.Frame = kind(**out)
    return frame


#
# Positional, `[logprob, [id...], [logprob...], rank]` per token, without a rank of 0. Minus infinity travels as -9999,
# as OpenAI writes it.

FLOOR = -9999.0


def floored(logprobs: m.TokenLogprobs) -> m.TokenLogprobs:
    """With no value below the floor; NaN becomes the floor."""
    tops = tuple(max(FLOOR, value) for value in logprobs.top_logprobs)
    return m.TokenLogprobs(max(FLOOR, logprobs.logprob), logprobs.top_ids, tops, logprobs.rank)


def logprob_rows(logprobs: Sequence[m.TokenLogprobs]) -> list[Any]:
    """One row per token; values as in `floored`."""
    return [
        [max(FLOOR, one.logprob), one.top_ids, [max(FLOOR, value) for value in one.top_logprobs]]
        + ([one.rank] if one.rank else [])
        for one in logprobs
    ]


def read_logprobs(rows: Any, tokens: int | None, field: str) -> tuple[m.TokenLogprobs, ...]:
    """Inverse of `logprob_rows`: none at all, or one per token (None: any number). Raises CodecError."""
    if type(rows) is not list or (tokens is not None and len(rows) not in (0, tokens)):
        raise CodecError("wrong type or length", field=field)
    return tuple(_read(row, field) for row in rows)


def _read(row: Any, field: str) -> m.TokenLogprobs:
    if type(row) is not list or len(row) < 3:
        raise CodecError("wrong shape", field=field)
    logprob, ids, values = row[:3]
    if type(ids) is not list or type(values) is not list or len(ids) != len(values):
        raise CodecError("wrong type or length", field=field)
    rank = row[3] if len(row) > 3 else 0
    if type(rank) is not int or rank < 0 or any(type(token) is not int for token in ids):
        raise CodecError("wrong type", field=field)
    return m.TokenLogprobs(_number(logprob, field), tuple(ids), tuple(_number(value, field) for value in values), rank)


def _number(value: Any, field: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise CodecError("must be a finite number", field=field)
    return float(value)


def encode_events(events: m.KvEvents, version: int | None = None) -> bytes:
    """`version, [epoch, seq, [[tier, removed, [[parent, [hash...]]...]]...]]`."""
    changes = [[c.tier.value, c.removed, [[r.parent, r.hashes] for r in c.runs]] for c in events.changes]
    return bytes((version or MIN_VERSION,)) + _pack([events.epoch, events.seq, changes])


def open_events(data: bytes) -> tuple[str, int, list[Any]]:
    """Epoch, number and undecoded changes of an event (see `encode_events`), for hot readers. Raises CodecError."""
    row = _open(data)
    try:
        epoch, seq, changes = row[:3]
    except (TypeError, ValueError):
        raise CodecError("wrong shape", field="events") from None
    if type(epoch) is not str or type(seq) is not int or seq < 0 or type(changes) is not list:
        raise CodecError("wrong type", field="events.seq")
    return epoch, seq, changes
