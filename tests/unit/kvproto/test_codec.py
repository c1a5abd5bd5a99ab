"""The codec: every message there and back, and nothing but named errors for bytes that are none."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from enum import StrEnum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto import codec
from kvproto import messages as m
from kvproto.errors import CodecError, InvalidRequest, Unavailable, UnknownEnumValue, VersionMismatch
from kvproto.messages.vocabulary import Ids, Range
from kvproto.schema import read_map
from tests.support.kv_events import decode_events

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
u32 = st.integers(0, 2**32 - 1)
hashes = st.binary(min_size=16, max_size=16)
logprob = st.floats(-9999.0, 0.0)
logprobs = st.builds(
    lambda own, top, rank: m.TokenLogprobs(own, tuple(i for i, _ in top), tuple(v for _, v in top), rank),
    logprob,
    st.lists(st.tuples(u32, logprob), max_size=3),
    st.integers(0, 2**32),
)


def values(hint: Any, bounds: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values that the annotation allows, its bounds included."""
    if get_origin(hint) is Annotated:
        hint, *extra = get_args(hint)
        return values(hint, tuple(extra))
    limits = {type(bound): bound for bound in bounds}
    if Ids in limits:
        return st.lists(u32, max_size=5).map(tuple)
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [arg for arg in get_args(hint) if arg is not type(None)]
        return st.none() | values(inner)
    if get_origin(hint) is tuple:
        return st.lists(values(get_args(hint)[0]), max_size=3).map(tuple)
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        return st.dictionaries(u32 if key is int else text, values(item), max_size=3)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return logprobs if hint is m.TokenLogprobs else instances(hint)
    numbers = limits.get(Range, Range(-(2**63), 2**64 - 1))
    if hint is int:
        return st.integers(int(numbers.low), int(numbers.high))
    if hint is float:
        low, high = (numbers.low, numbers.high) if Range in limits else (None, None)
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    if hint is bytes:
        return st.binary(max_size=40)
    if hint is Any:
        return st.sampled_from((None, True, "ü", [], ["a", [None, False]]))
    assert hint is str, hint
    return text


def instances(kind: Any) -> st.SearchStrategy[Any]:
    if kind is m.Tokens:
        pieces = st.lists(st.tuples(u32, text, logprobs), max_size=5)
        return st.builds(
            lambda request, attempt, choice, index, pieces, scored: m.Tokens(
                request, attempt, choice, index, tuple(i for i, *_ in pieces), tuple(t for _, t, _ in pieces),
                tuple(scores for *_, scores in pieces) if scored else (),
            ),
            text, st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**40), pieces, st.booleans(),
        )  # fmt: skip
    if kind is m.BlockRun:
        return st.builds(m.BlockRun, hashes, st.lists(hashes, max_size=4).map(tuple))
    if kind is m.KvEvents:
        changes = st.lists(instances(m.TierEvents), max_size=3).map(tuple)
        return st.builds(m.KvEvents, text, st.integers(0, 2**63 - 1), changes)
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: values(hints[field.name]) for field in dataclasses.fields(kind)})


def has_default(field: Any) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


MESSAGES = [
    kind
    for kind in vars(m).values()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__.startswith(f"{m.__name__}.")
]
EVENT_PARTS = {m.BlockRun, m.TierEvents, m.KvEvents}
MAPPED = [kind for kind in MESSAGES if kind not in EVENT_PARTS]
FRAMES = list(get_args(m.Frame))
frames = st.one_of([instances(kind) for kind in FRAMES])

by_name = pytest.mark.parametrize("kind", MAPPED, ids=lambda kind: kind.__name__)


def test_messages_are_frozen_and_slotted() -> None:
    for kind in MESSAGES:
        assert kind.__dataclass_params__.frozen, kind
        assert hasattr(kind, "__slots__"), kind


# ---------------------------------------------------------------------------------------------- there and back


@by_name
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    assert codec.decode(kind, codec.encode(message)) == message
    assert read_map(kind, codec.to_map(message)) == message
    assert read_map(kind, codec.to_map(message, packed=False)) == message


@given(st.lists(frames, max_size=8))
def test_frames_round_trip(sent: list[m.Frame]) -> None:
    assert codec.decode_frames(codec.encode_frames(sent)) == sent


@given(frames, st.booleans())
def test_plain_frames_round_trip(frame: m.Frame, as_json: bool) -> None:
    data = codec.encode_plain_frame(frame, as_json=as_json)
    assert codec.decode_plain_frame(data, as_json=as_json) == frame
    plain = json.loads(data) if as_json else msgpack.unpackb(data)
    assert plain["type"] == type(frame).__name__.lower()
    if isinstance(frame, m.Tokens):
        assert plain["ids"] == list(frame.ids)


@given(instances(m.KvEvents))
def test_events_round_trip(events: m.KvEvents) -> None:
    assert decode_events(codec.encode_events(events)) == events


@given(instances(m.ProducerRequest))
def test_producers_may_write_json_or_msgpack_with_or_without_the_version(request: m.ProducerRequest) -> None:
    plain = codec.to_map(request, packed=False)
    in_json = json.dumps(plain).encode()
    in_msgpack = msgpack.packb(plain)
    assert codec.decode_plain(m.ProducerRequest, in_json, as_json=True) == request
    assert codec.decode_plain(m.ProducerRequest, in_msgpack, as_json=False) == request
    assert codec.decode_plain(m.ProducerRequest, bytes((codec.VERSION,)) + in_msgpack, as_json=False) == request


# ---------------------------------------------------------------------------------------------- bytes that are none

READERS = {
    **{kind.__name__: (lambda data, kind=kind: codec.decode(kind, data)) for kind in MAPPED},
    "frames": codec.decode_frames,
    "events": decode_events,
    "plain msgpack": lambda data: codec.decode_plain(m.ProducerRequest, data, as_json=False),
    "plain json": lambda data: codec.decode_plain(m.ProducerRequest, data, as_json=True),
}
every_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


def read_or_refuse(reader: Any, data: bytes) -> CodecError | None:
    """The refusal, if it was refused; any other exception is the test's failure."""
    try:
        reader(data)
    except CodecError as error:
        return error
    return None


msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.binary(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@every_reader
@settings(max_examples=25, deadline=None)
@given(noise=st.binary(max_size=80), shape=msgpack_values, versioned=st.booleans())
def test_noise_gives_only_codec_errors(reader: Any, noise: bytes, shape: Any, versioned: bool) -> None:
    prefix = bytes((codec.VERSION,)) if versioned else b""
    read_or_refuse(reader, prefix + noise)
    read_or_refuse(reader, prefix + msgpack.packb(shape))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_give_only_codec_errors(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(MAPPED))
    damaged = bytearray(codec.encode(data.draw(instances(kind))))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(READERS[kind.__name__], bytes(damaged))
    read_or_refuse(READERS[kind.__name__], bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_field_of_any_other_value_is_read_or_named(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(MAPPED))
    plain = codec.to_map(data.draw(instances(kind)))
    field = data.draw(st.sampled_from([field.name for field in dataclasses.fields(kind)]))
    plain[field] = data.draw(msgpack_values)
    refusal = read_or_refuse(READERS[kind.__name__], bytes((codec.VERSION,)) + msgpack.packb(plain))
    if refusal is not None:
        assert refusal.field is not None
        assert re.split(r"[.\[ ]", refusal.field)[0] == field


@given(st.lists(msgpack_values, max_size=8), st.integers(0, 7))
def test_rows_of_any_shape_are_frames_or_refused(values: list[Any], tag: int) -> None:
    data = bytes((codec.VERSION,)) + msgpack.packb([[tag, *values]])
    read_or_refuse(codec.decode_frames, data)


@given(st.binary(max_size=60) | msgpack_values.map(msgpack.packb), st.booleans())
def test_an_unreadable_plain_frame_is_a_codec_error(noise: bytes, as_json: bool) -> None:
    read_or_refuse(lambda data: codec.decode_plain_frame(data, as_json=as_json), noise)


# ---------------------------------------------------------------------------------------------- other versions


@by_name
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_unknown_fields_are_ignored(kind: type, data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    plain = codec.to_map(message) | {"field_of_a_later_version": {"a": [1, None]}}
    assert codec.decode(kind, bytes((codec.VERSION,)) + msgpack.packb(plain)) == message


@by_name
def test_missing_fields_are_named_or_take_their_default(kind: type) -> None:
    required = [field.name for field in dataclasses.fields(kind) if not has_default(field)]
    if not required:
        assert read_map(kind, {}) == kind()
        return
    with pytest.raises(CodecError) as caught:
        read_map(kind, {})
    assert caught.value.field == required[0]


@given(st.lists(frames, min_size=1, max_size=3), st.integers(9, 255))
def test_frames_of_a_later_kind_are_left_out(known: list[m.Frame], tag: int) -> None:
    rows = msgpack.unpackb(codec.encode_frames(known)[1:])
    later = bytes((codec.VERSION,)) + msgpack.packb([[tag, "x"], *rows, [tag]])
    assert codec.decode_frames(later) == known


@given(st.sampled_from([kind for kind in FRAMES if kind is not m.Tokens]).flatmap(instances))
def test_longer_and_shorter_rows_are_read(frame: m.Frame) -> None:
    """A later version appends fields; an earlier one stopped before those that have a default."""
    (row,) = msgpack.unpackb(codec.encode_frames([frame])[1:])
    longer = bytes((codec.VERSION,)) + msgpack.packb([[*row, "of a later version"]])
    assert codec.decode_frames(longer) == [frame]
    optional = [field for field in dataclasses.fields(frame) if has_default(field)]
    shorter = bytes((codec.VERSION,)) + msgpack.packb([row[: len(row) - len(optional)]])
    (read,) = codec.decode_frames(shorter)
    for field in dataclasses.fields(frame):
        if field not in optional:
            assert getattr(read, field.name) == getattr(frame, field.name)


@pytest.mark.parametrize("version", [0, codec.VERSION + 1, 255])
def test_other_versions_are_named(version: int) -> None:
    data = bytes((version,)) + codec.encode(m.CancelRequest("r"))[1:]
    with pytest.raises(VersionMismatch, match=f"version {version}, this reader accepts"):
        codec.decode(m.CancelRequest, data)


@given(st.integers(0, 9), st.integers(0, 9))
def test_common_version_is_the_lower_of_the_highest(low: int, high: int) -> None:
    mine = codec.supported_versions()
    overlap = range(max(low, mine[0]), min(high, mine[1]) + 1)
    if overlap:
        assert codec.common_version((low, high)) == overlap[-1]
    elif low <= high:
        with pytest.raises(VersionMismatch):
            codec.common_version((low, high))


def test_unknown_enum_value_is_named_with_its_choices() -> None:
    plain = codec.to_map(m.Heartbeat("w", "e", m.State.READY)) | {"state": "asleep"}
    with pytest.raises(UnknownEnumValue, match=r"state: 'asleep' is none of starting, ready, draining, dead") as caught:
        read_map(m.Heartbeat, plain)
    assert caught.value.field == "state"


# ---------------------------------------------------------------------------------------------- bounds


def producer(**fields: Any) -> m.ProducerRequest:
    return codec.decode_plain(m.ProducerRequest, json.dumps(fields).encode(), as_json=True)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", r"must be within \[1, 16777216\], got 0"),
        ({"max_tokens": 2**30}, "max_tokens", "must be within"),
        ({"max_tokens": 1.5}, "max_tokens", "expected int, got float"),
        ({"max_tokens": True}, "max_tokens", "expected int, got bool"),
        ({"temperature": -0.1}, "temperature", r"must be within \[0.0, 100.0\], got -0.1"),
        ({"temperature": "hot"}, "temperature", "expected float, got str"),
        ({"top_p": 1.01}, "top_p", "must be within"),
        ({"top_k": -1}, "top_k", "must be within"),
        ({"prompt": 7}, "prompt", "expected str, got int"),
        ({"prompt_ids": "abc"}, "prompt_ids", "expected token ids, got str"),
        ({"prompt_ids": [1, -1]}, "prompt_ids[1]", "must be an integer within"),
        ({"prompt_ids": [2**32]}, "prompt_ids[0]", "must be an integer within"),
        ({"prompt_ids": [None]}, "prompt_ids[0]", "must be an integer within"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items, got 17"),
        ({"stop": ["x" * 1025]}, "stop[0]", "at most 1024 characters, got 1025"),
        ({"stop": "x"}, "stop", "expected list, got str"),
        ({"session": "s" * 257}, "session", "at most 256 characters"),
        ({"deadline_ms": -1}, "deadline_ms", "must be within"),
        ({"priority": 101}, "priority", "must be within"),
        ({"ignore_eos": 1}, "ignore_eos", "expected bool, got int"),
        ({"n": 0}, "n", r"must be within \[1, 128\], got 0"),
        ({"n": 129}, "n", "must be within"),
        ({"min_p": 1.5}, "min_p", "must be within"),
        ({"presence_penalty": "x"}, "presence_penalty", "expected float, got str"),
        ({"frequency_penalty": 1000}, "frequency_penalty", "must be within"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be within"),
        ({"logit_bias": [5]}, "logit_bias", "expected map, got list"),
        ({"logit_bias": {"-5": 1}}, "logit_bias.-5", "keys must be integers in decimal, at least 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "keys must be integers"),
        ({"logit_bias": {"5": None}}, "logit_bias.5", "expected float, got NoneType"),
        ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias", "at most 4096 entries, got 4097"),
        ({"logprobs": -1}, "logprobs", "must be within"),
        ({"logprobs": True}, "logprobs", "expected int, got bool"),
        ({"min_tokens": -1}, "min_tokens", "must be within"),
        ({"context_overflow": "cut"}, "context_overflow", "'cut' is none of error, truncate_left"),
    ],
)  # fmt: skip
def test_bounds_name_the_field_and_the_limit(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        producer(**fields)
    assert caught.value.field == field
    assert caught.value.http_status == 400


def test_token_ids_that_are_keys_may_be_integers_in_a_producers_msgpack() -> None:
    for key in (5, "5"):
        for version in (b"", b"\x01"):
            data = version + msgpack.packb({"prompt": "x", "logit_bias": {key: -1}})
            assert codec.decode_plain(m.ProducerRequest, data, as_json=False).logit_bias == {5: -1.0}
    with pytest.raises(CodecError) as caught:
        codec.decode_plain(m.ProducerRequest, msgpack.packb({"prompt": "x", "logit_bias": {-5: 1}}), as_json=False)
    assert caught.value.field == "logit_bias.-5"
    data = b"\x01" + msgpack.packb({"max_tokens": 1, "logit_bias": {5: 1.0}})
    with pytest.raises(CodecError):
        codec.decode(m.Sampling, data)


TOKENS = m.Tokens("r", 0, 1, 4, (5, 6), ("a", ""))


def test_log_probabilities_cost_nothing_where_there_are_none() -> None:
    """A reader of an earlier version takes the first seven elements and never sees them."""
    (row,) = msgpack.unpackb(codec.encode_frames([TOKENS])[1:])
    assert len(row) == 7
    scored = dataclasses.replace(TOKENS, logprobs=(m.TokenLogprobs(-0.5, (5, 9), (-0.5, -2.0)), m.TokenLogprobs(-1.0)))
    (longer,) = msgpack.unpackb(codec.encode_frames([scored])[1:])
    assert longer[:7] == row
    assert longer[7:] == [[[-0.5, [5, 9], [-0.5, -2.0]], [-1.0, [], []]]]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_log_probabilities_are_finite_on_the_wire(value: float) -> None:
    scored = dataclasses.replace(TOKENS, logprobs=(m.TokenLogprobs(value, (5,), (value,)),) * 2)
    expected = dataclasses.replace(TOKENS, logprobs=(m.TokenLogprobs(-9999.0, (5,), (-9999.0,)),) * 2)
    assert codec.decode_frames(codec.encode_frames([scored])) == [expected]
    for as_json in (True, False):
        data = codec.encode_plain_frame(scored, as_json=as_json)
        assert codec.decode_plain_frame(data, as_json=as_json) == expected


@pytest.mark.parametrize(
    "scores",
    [None, {}, 5, [[-1.0, [], []]], [[-1.0]] * 2, [[-1.0, [1], []]] * 2, [["x", [], []]] * 2, [[math.inf, [], []]] * 2,
     [[-1.0, ["x"], [-1.0]]] * 2, [[-1.0, [1], [None]]] * 2, [{}] * 2, [[-1.0, [], [], -1]] * 2,
     [[-1.0, [], [], 1.5]] * 2],
)  # fmt: skip
def test_malformed_log_probabilities_are_refused(scores: Any) -> None:
    row = [2, "r", 0, 0, 4, [5, 6], ["a", ""], scores]
    with pytest.raises(CodecError) as caught:
        codec.decode_frames(b"\x01" + msgpack.packb([row]))
    assert caught.value.field == "tokens.logprobs"


@pytest.mark.parametrize(
    "row",
    [[8], [8, "r", 0, 1], [8, "r", 0, -1, []], [8, "r", -1, 1, []], [8, 5, 0, 1, []], [8, "r", 0, 1.0, []],
     [8, "r", 0, 1, 5]],
)  # fmt: skip
def test_malformed_scores_of_a_prompt_are_refused(row: list[Any]) -> None:
    with pytest.raises(CodecError) as caught:
        codec.decode_frames(b"\x01" + msgpack.packb([row]))
    assert str(caught.value.field).startswith("promptscores")


def test_the_scores_of_a_prompt_are_asked_of_workers_that_know_them() -> None:
    record = m.WorkerRecord("w", "e", "l", m.State.READY, "m", "a", "h", 1, (1, 1))
    for sampling in (m.Sampling(1, prompt_logprobs=0), m.Sampling(0)):
        asked = m.GenerateRequest("r", 0, "m", sampling, "_i")
        with pytest.raises(Unavailable) as caught:
            codec.version_of_offer(record, asked)
        assert (caught.value.field, caught.value.retryable) == ("prompt_logprobs", True)
        assert codec.version_of_offer(dataclasses.replace(record, scores=True), asked) == 1
    assert codec.version_of_offer(record, m.GenerateRequest("r", 0, "m", m.Sampling(1), "_i")) == 1


def test_beams_are_asked_of_workers_that_search_them() -> None:
    record = m.WorkerRecord("w", "e", "l", m.State.READY, "m", "a", "h", 1, (1, 1))
    asked = m.GenerateRequest("r", 0, "m", m.Sampling(1, beams=m.Beams(2)), "_i")
    with pytest.raises(Unavailable) as caught:
        codec.version_of_offer(record, asked)
    assert (caught.value.field, caught.value.retryable) == ("use_beam_search", True)
    assert codec.version_of_offer(dataclasses.replace(record, beams=True), asked) == 1


def test_one_choice_is_written_as_it_always_was() -> None:
    """A worker of an earlier version reads it."""
    request = m.GenerateRequest("r", 1, "m", m.Sampling(5), "_ing.i.r", (1, 2), output_ids=(7,), text_sent=3)
    assert set(codec.to_map(request)) == {
        "request", "attempt", "model", "sampling", "inbox", "prompt_ids", "output_ids", "text_sent"
    }  # fmt: skip
    assert codec.to_map(request.sampling) == {"max_tokens": 5}
    assert request.continuation(0) == m.Continuation((7,), 3)
    several = dataclasses.replace(request, sampling=m.Sampling(5, n=3), continuations=(m.Continuation((8,), 1),))
    assert [several.continuation(choice).output_ids for choice in range(3)] == [(8,), (), ()]


def test_nested_fields_are_named_by_their_path() -> None:
    plain = codec.to_map(m.GenerateRequest("r", 0, "m", m.Sampling(1), "_ing.i.r"))
    with pytest.raises(CodecError) as caught:
        read_map(m.GenerateRequest, plain | {"sampling": {"max_tokens": 1, "top_p": 2.0}})
    assert str(caught.value).startswith("sampling.top_p: must be within")
    with pytest.raises(CodecError) as caught:
        read_map(m.GenerateRequest, plain | {"sampling": [1]})
    assert caught.value.field == "sampling"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value: float) -> None:
    required = {"request": "r", "worker": "w", "attempt": 0, "prompt_tokens": 1, "cached": {}}
    for kind, field in ((m.ProducerRequest, "temperature"), (m.Placement, "expected_ttft_s"), (m.Started, "queue_s")):
        with pytest.raises(CodecError) as caught:
            read_map(kind, required | {field: value})
        assert caught.value.field == field
    for constant in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(CodecError, match="is not JSON"):
            codec.decode_plain(m.ProducerRequest, b'{"temperature": %s}' % constant, as_json=True)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"prompt": "\\ud800"}', id="escaped"),
        pytest.param('{"prompt": "\\ud800"}'.encode("utf-16"), id="utf-16"),
        pytest.param(b'{"prompt": "\xed\xa0\x80"}', id="raw"),
        pytest.param(b'{"prompt": "\xff"}', id="invalid"),
    ],
)
def test_json_text_is_text(data: bytes) -> None:
    """A lone surrogate is no text: it could not be written into the next message."""
    with pytest.raises(CodecError):
        codec.decode_plain(m.ProducerRequest, data, as_json=True)


def test_oversize_is_refused_before_it_is_read() -> None:
    limit = codec.MAX_MESSAGE_BYTES
    for data in (bytes((codec.VERSION,)) * (limit + 1), b"\x80" * (limit + 1), b" " * (limit + 1)):
        for reader in (READERS["plain json"], READERS["plain msgpack"], codec.decode_frames, decode_events):
            with pytest.raises(CodecError, match=f"at most {limit} bytes"):
                reader(data)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CodecError):
        codec.decode_plain(m.ProducerRequest, b"[" * 100_000, as_json=True)
    with pytest.raises(CodecError):
        codec.decode(m.CancelRequest, b"\x01" + b"\x91" * 100_000)


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x01\xc1", b"\x01\x80\x80"])
def test_truncated_or_overlong_messages_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        codec.decode(m.CancelRequest, data)


@pytest.mark.parametrize(
    "row",
    [
        ["e", -1, []],
        ["e", 0, [["device", 0, []]]],
        ["e", 0, [["attic", False, []]]],
        ["e", 0, [["device", False, [[b"x", [b"short"]]]]]],
        ["e", 0, [["device", False, [["text", []]]]]],
        ["e", 0, [["device", False]]],
        ["e", 0],
        {},
    ],
)
def test_malformed_events_are_refused(row: Any) -> None:
    with pytest.raises(CodecError):
        decode_events(b"\x01" + msgpack.packb(row))


def test_json_without_its_header_is_told_so() -> None:
    """The likeliest mistake of a producer that has just begun."""
    with pytest.raises(CodecError, match="looks like JSON: send the header Content-Type"):
        codec.decode_plain(m.ProducerRequest, b'{"prompt": "x"}', as_json=False)
