"""The data plane's bytes: everything that is written is read again as it was, and nothing else is read at all."""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.dataplane import handshake_bytes, wire
from kvproto.dataplane.block import MAX_BLOCK_BYTES, BlockCodec, BlockHeader
from kvproto.dataplane.errors import DataPlaneError, HandshakeRefused, PeerGone, PeerTimeout, ProtocolError
from kvproto.dataplane.handshake_bytes import Hello, Reply
from kvproto.dataplane.serving import DataPlaneCounters, Tally
from kvproto.dataplane.wire import (
    MAX_BLOCKS,
    MAX_ECHO_BYTES,
    MAX_META_BYTES,
    Body,
    Echo,
    Echoed,
    End,
    Erase,
    Erased,
    Failure,
    Get,
    Has,
    Held,
    Message,
    Part,
    Put,
    PutStatus,
    Stop,
    Taken,
    Wanted,
)
from kvproto.errors import InvalidRequest, KvfleetError, from_code

SIXTEEN = st.binary(min_size=16, max_size=16)
ROOT = b"r" * 16
TIMEOUTS = st.integers(1, wire.MAX_TIMEOUT_MS)
HASHES = st.lists(SIXTEEN, max_size=20).map(tuple)
STATUSES = st.sampled_from(PutStatus)


def headers(root: st.SearchStrategy[bytes] = SIXTEEN) -> st.SearchStrategy[BlockHeader]:
    return st.builds(
        BlockHeader,
        root,
        SIXTEEN,
        SIXTEEN,
        st.binary(min_size=1, max_size=16).map(lambda data: data * 4),
        SIXTEEN,
        st.sampled_from(BlockCodec),
        st.integers(1, MAX_BLOCK_BYTES),
        st.integers(1, MAX_BLOCK_BYTES),
        st.booleans(),
        st.floats(allow_nan=False),
        st.integers(0, 2**64 - 1),
    )


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Get, TIMEOUTS, SIXTEEN, HASHES, st.booleans()),
    st.builds(Has, TIMEOUTS, SIXTEEN, HASHES, st.booleans()),
    st.builds(Erase, TIMEOUTS, SIXTEEN, HASHES),
    st.builds(Put, TIMEOUTS, st.just(ROOT), st.lists(headers(st.just(ROOT)), max_size=5).map(tuple)),
    st.builds(Echo, TIMEOUTS, st.integers(0, MAX_ECHO_BYTES)),
    st.builds(Stop),
    st.builds(Part, st.lists(st.none() | headers(), max_size=5).map(tuple)),
    st.builds(End),
    st.builds(Wanted, st.lists(st.none() | STATUSES, max_size=20).map(tuple)),
    st.builds(Body),
    st.builds(Taken, st.lists(STATUSES, max_size=20).map(tuple)),
    st.builds(Held, st.lists(st.booleans(), max_size=20).map(tuple)),
    st.builds(Erased, st.integers(0, MAX_BLOCKS)),
    st.builds(Echoed),
    st.builds(Failure, st.text(max_size=40), st.text(max_size=500)),
)


def read(data: bytes) -> tuple[Message, int]:
    head = wire.unpack_head(data[: wire.HEAD_BYTES])
    assert len(data) == wire.HEAD_BYTES + head.meta_length
    return wire.unpack(head, data[wire.HEAD_BYTES :]), head.body_length


@given(MESSAGES)
def test_messages_come_back(message: Message) -> None:
    assert read(wire.frame(message)) == (message, 0)


@given(st.sampled_from([Body(), Echoed(), Part((None,))]), st.integers(0, 2**64 - 1))
def test_bodies_of_any_length(message: Message, length: int) -> None:
    assert read(wire.frame(message, length)) == (message, length)


@given(MESSAGES, st.data())
def test_a_flipped_bit_is_never_another_message(message: Message, data: st.DataObject) -> None:
    whole = bytearray(wire.frame(message))
    at = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[at // 8] ^= 1 << at % 8
    try:
        head = wire.unpack_head(bytes(whole[: wire.HEAD_BYTES]))
        wire.unpack(head, bytes(whole[wire.HEAD_BYTES :])[: head.meta_length])
    except ProtocolError:
        return
    raise AssertionError("it was read")


@given(st.sampled_from(sorted(wire._KINDS)), st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(kind: int, meta: bytes) -> None:
    front = struct.pack("!BBHIQ", handshake_bytes.VERSION, kind, 0, len(meta), 0)
    try:
        read(front + struct.pack("!I", zlib.crc32(meta, zlib.crc32(front))) + meta)
    except ProtocolError:
        pass


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=32),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(st.sampled_from(sorted(wire._KINDS)), PLAIN)
def test_any_msgpack_is_a_message_or_an_error(kind: int, fields: Any) -> None:
    meta = msgpack.packb(fields)
    front = struct.pack("!BBHIQ", handshake_bytes.VERSION, kind, 0, len(meta), 0)
    try:
        message, _ = read(front + struct.pack("!I", zlib.crc32(meta, zlib.crc32(front))) + meta)
    except ProtocolError:
        return
    assert read(wire.frame(message)) == (message, 0)


@given(st.binary(min_size=wire.HEAD_BYTES, max_size=wire.HEAD_BYTES))
def test_no_head_promises_more_than_is_allowed(data: bytes) -> None:
    try:
        assert wire.unpack_head(data).meta_length <= MAX_META_BYTES
    except ProtocolError:
        pass


def test_lengths_are_judged_before_anything_is_allocated() -> None:
    front = struct.pack("!BBHIQ", handshake_bytes.VERSION, 1, 0, MAX_META_BYTES + 1, 0)
    with pytest.raises(ProtocolError) as refused:
        wire.unpack_head(front + bytes(4))
    assert refused.value.reason == "too_large"


def test_a_message_that_fits_no_frame_is_the_callers_fault() -> None:
    long = BlockHeader(ROOT, ROOT, ROOT, bytes(4096), ROOT, BlockCodec.RAW, 1, 1)
    with pytest.raises(InvalidRequest):
        wire.frame(Put(1, ROOT, (long,) * 2000))


def test_the_most_blocks_with_the_usual_tokens_fit_a_frame() -> None:
    usual = BlockHeader(ROOT, ROOT, ROOT, bytes(64), ROOT, BlockCodec.INT8, 2**21, 2**21, True, 44.123, 2**64 - 1)
    message = Put(wire.MAX_TIMEOUT_MS, ROOT, (usual,) * MAX_BLOCKS)
    assert read(wire.frame(message)) == (message, 0)


def test_golden_bytes() -> None:
    """Version 1 as it is spoken: a change here needs another version."""
    message = Has(1000, ROOT, (b"h" * 16,), True)
    assert wire.frame(message).hex() == (
        "01020000000000290000000000000000ac8ac830" + "94cd03e8c410" + "72" * 16 + "c410" + "68" * 16 + "c3"
    )
    assert (handshake_bytes.HELLO_BYTES, handshake_bytes.REPLY_BYTES, wire.HEAD_BYTES) == (197, 134, 20)


# ---------------------------------------------------------------------- handshake

NAMES = st.text(st.characters(min_codepoint=1, codec="utf-8"), min_size=1, max_size=8)


@given(NAMES, NAMES, NAMES, st.binary(min_size=32, max_size=32), st.integers(0, 255))
def test_handshakes_come_back(key: str, identity: str, expect: str, nonce: bytes, version: int) -> None:
    hello = Hello(version, key, identity, expect, nonce)
    assert handshake_bytes.unpack_hello(hello.packed()) == hello
    reply = Reply(version, 3, identity, nonce)
    assert handshake_bytes.unpack_reply(reply.packed() + bytes(32)) == (reply, bytes(32))


@given(st.binary(min_size=handshake_bytes.HELLO_BYTES, max_size=handshake_bytes.HELLO_BYTES))
def test_any_hello_is_one_or_refused(data: bytes) -> None:
    for start in (b"", handshake_bytes.MAGIC):
        with contextlib.suppress(HandshakeRefused):
            assert len(handshake_bytes.unpack_hello((start + data)[: handshake_bytes.HELLO_BYTES]).nonce) == 32


def test_proofs_differ_by_side_key_and_nonces() -> None:
    hello = Hello(1, "k", "w", "v", bytes(32)).packed()
    other = Hello(1, "k", "w", "v", bytes(31) + b"1").packed()
    reply = Reply(1, 0, "v", bytes(32)).packed()
    proofs = {
        proof(secret, asked, answered)
        for proof in (handshake_bytes.server_proof, handshake_bytes.client_proof)
        for secret in (b"a" * 32, b"b" * 32)
        for asked in (hello, other)
        for answered in (reply, reply[:-1] + b"1")
    }
    assert len(proofs) == 16
    assert {len(proof) for proof in proofs} == {handshake_bytes.PROOF_BYTES}


# ---------------------------------------------------------------------- errors, counters


def test_errors_are_of_the_one_tree() -> None:
    for kind in (PeerGone, PeerTimeout):
        assert isinstance(kind("x"), DataPlaneError | KvfleetError)
        assert kind.retryable
    assert HandshakeRefused("x", reason="busy").reason == "busy"
    assert len({kind.code for kind in (DataPlaneError, HandshakeRefused, PeerTimeout, PeerGone, ProtocolError)}) == 5
    assert isinstance(from_code("data_plane_gone", "x"), KvfleetError)


def test_a_tally_reads_as_counters() -> None:
    tally = Tally()
    assert tally.read() == DataPlaneCounters()
    tally.add(connections=1, bytes_in=5)
    tally.add(bytes_in=2)
    tally.refuse("busy")
    tally.refuse("busy")
    assert tally.read() == DataPlaneCounters(connections=1, bytes_in=7, refused={"busy": 2})
