"""A trace context in a Get or Has: one field more for those who read it, the same bytes as ever without it."""

from __future__ import annotations

import hashlib

import pytest

from kvproto.dataplane import wire
from kvproto.dataplane.errors import ProtocolError
from kvproto.dataplane.wire import Get, Has, Message

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ROOT, HASHES = b"r" * 16, (b"a" * 16, b"b" * 16)


def read(data: bytes) -> Message:
    return wire.unpack(wire.unpack_head(data[: wire.HEAD_BYTES]), data[wire.HEAD_BYTES :])


@pytest.mark.parametrize("kind", [Get, Has])
def test_it_comes_back(kind: type[Get] | type[Has]) -> None:
    assert read(wire.frame(kind(1000, ROOT, HASHES, True, CONTEXT))) == kind(1000, ROOT, HASHES, True, CONTEXT)


def test_without_it_the_bytes_are_those_of_version_1() -> None:
    """Golden: written by the first release."""
    data = wire.frame(Get(1000, ROOT, HASHES, False)) + wire.frame(Has(7, ROOT, (), True))
    assert hashlib.sha256(data).hexdigest() == GOLDEN
    assert read(wire.frame(Get(1000, ROOT, HASHES, False))) == Get(1000, ROOT, HASHES, False, "")


@pytest.mark.parametrize("value", [5, b"bytes", ["list"], "x" * 129])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="traceparent"):
        read(wire.frame(Get(1000, ROOT, HASHES, False, value)))  # type: ignore[arg-type]


def test_text_that_is_no_context_is_for_others_to_ignore() -> None:
    assert read(wire.frame(Has(1000, ROOT, HASHES, False, "garbage"))) == Has(1000, ROOT, HASHES, False, "garbage")


GOLDEN = "3ae97719e79e14528021b656799e34cb11373c91a89689e2fa083f2f9bd9dd54"
