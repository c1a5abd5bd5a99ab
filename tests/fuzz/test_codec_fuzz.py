"""Lists of frames and events with damage, and messages that claim to be more than they are."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.placement.index.changes import read_changes
from kvproto import codec
from kvproto import messages as m
from kvproto.errors import CodecError
from tests.fuzz.damage import damaged, some
from tests.support.kv_events import decode_events
from tests.unit.kvproto.test_codec import READERS, frames, instances, read_or_refuse

VERSION = bytes((codec.VERSION,))
MOST_PER_BYTE, MOST = 200, 1_000_000  # of memory, for a message of so many bytes; and for any
LIMIT_S = 5.0  # however busy the machine: what is not bounded takes for ever


@some
@given(st.lists(frames, min_size=1, max_size=4).map(codec.encode_frames).flatmap(damaged))
def test_damaged_frames(data: bytes) -> None:
    read_or_refuse(codec.decode_frames, data)


@some
@given(instances(m.KvEvents).map(codec.encode_events).flatmap(damaged))
def test_damaged_events_are_the_same_to_both_their_readers(data: bytes) -> None:
    """Placement has a quicker one, which finds the same; it refuses no more than peers' blocks, which nobody tells."""
    try:
        events = decode_events(data)
    except CodecError:
        read_or_refuse(read_changes, data)
        return
    if any(change.tier is m.Tier.PEER for change in events.changes):
        assert read_or_refuse(read_changes, data) is not None
        return
    changes = read_changes(data)
    assert (changes.epoch, changes.seq) == (events.epoch, events.seq)
    expected = [
        (change.removed, b"".join(one for run in change.runs for one in run.hashes)) for change in events.changes
    ]
    assert [(change.removed, change.hashes.tobytes()) for change in changes.changes] == expected


@some
@given(frames, st.booleans(), st.data())
def test_damaged_plain_frames(frame: m.Frame, as_json: bool, data: st.DataObject) -> None:
    found = data.draw(damaged(codec.encode_plain_frame(frame, as_json=as_json)))
    read_or_refuse(lambda read: codec.decode_plain_frame(read, as_json=as_json), found)


@some
@given(instances(m.ProducerRequest), st.booleans(), st.data())
def test_damaged_requests_of_producers(request: m.ProducerRequest, as_json: bool, data: st.DataObject) -> None:
    plain = codec.to_map(request, packed=False)
    found = data.draw(damaged(json.dumps(plain).encode() if as_json else msgpack.packb(plain)))
    read_or_refuse(lambda read: codec.decode_plain(m.ProducerRequest, read, as_json=as_json), found)


NAME = msgpack.packb("request")
CLAIMS: dict[str, bytes] = {
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "bytes of four gigabytes": b"\xc6\xff\xff\xff\xff",
    "text of four gigabytes": b"\xdb\xff\xff\xff\xff",
    "an extension of four gigabytes": b"\xc9\xff\xff\xff\xff\x01",
    "a field that is such an array": b"\x81" + NAME + b"\xdd\xff\xff\xff\xff",
    "arrays in arrays": b"\x91" * 200_000,
    "maps in maps": (b"\x81" + NAME) * 100_000,
    "arrays that all claim much": b"\xdd\x00\x01\xff\xff" * 20_000,
    "a row of nothing, often": b"\xdd\x00\x00\x4e\x20" + b"\x90" * 20_000,
    "nothing, often": b"\xdd\x00\x00\x4e\x20" + b"\xc0" * 20_000,
    "JSON: arrays in arrays": b"[" * 200_000,
    "JSON: objects in objects": b'{"prompt":' * 100_000,
    "JSON: a number of many digits": b'{"max_tokens":' + b"9" * 200_000 + b"}",
    "JSON: a fraction of many digits": b'{"temperature":0.' + b"3" * 200_000 + b"}",
    "JSON: infinity": b'{"temperature":1e999}',
    "JSON: a surrogate": b'{"prompt":"\\ud800"}',
    "JSON: the same key, often": b"{" + b'"prompt":"x",' * 20_000 + b'"prompt":"x"}',
    "JSON: ids that are no ids": b'{"prompt_ids":[' + b"-1," * 50_000 + b"-1]}",
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_cost_no_more_than_the_bytes_they_come_in(claim: str) -> None:
    kinds = "GenerateRequest", "Heartbeat", "Milestones", "frames", "events", "plain msgpack", "plain json"
    readers: dict[str, Callable[[bytes], Any]] = {
        **{kind: READERS[kind] for kind in kinds},
        "frame msgpack": lambda data: codec.decode_plain_frame(data, as_json=False),
        "frame json": lambda data: codec.decode_plain_frame(data, as_json=True),
        "changes": read_changes,
    }
    for name, reader in readers.items():
        for data in (CLAIMS[claim], VERSION + CLAIMS[claim], VERSION + b"\x92" + CLAIMS[claim]):
            began = time.monotonic()
            tracemalloc.start()
            try:
                read_or_refuse(reader, data)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak <= MOST + MOST_PER_BYTE * len(data), name
            assert time.monotonic() - began < LIMIT_S, name
