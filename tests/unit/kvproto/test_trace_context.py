"""The header `traceparent`: what is one is read, what is none is as if it were not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.trace_context import HEADER_BYTES, TraceContext, Trail, headers_of, in_headers, parse, sampled

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"

GARBAGE = [
    "", "x", "00", "null", "00-ab-cd-01", GOOD + "-", GOOD + "-more", GOOD.upper(), f" {GOOD}", f"{GOOD}\n",
    f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-1",
    f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}0-01", f"00-{TRACE[:-1]}g-{SPAN}-01", f"0-{TRACE}-{SPAN}-01",
    "00-" + "٣" * 32 + f"-{SPAN}-01", GOOD * 100,
]  # fmt: skip


def test_a_context_is_read_and_written_as_it_was() -> None:
    assert parse(GOOD) == TraceContext(TRACE, SPAN, sampled=True)
    assert str(parse(GOOD)) == GOOD
    assert str(parse(UNSAMPLED)) == UNSAMPLED


@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_is_no_context(value: str) -> None:
    assert parse(value) is None
    assert sampled(value) is None
    assert Trail(value).placing(0) is None


@given(st.text(max_size=80))
def test_any_text_is_a_context_or_none(value: str) -> None:
    found = parse(value)
    assert found is None or parse(str(found)) == found


def test_later_versions_are_read_as_far_as_this_one_knows_them() -> None:
    assert parse(f"01-{TRACE}-{SPAN}-01-what-is-to-come") == TraceContext(TRACE, SPAN, sampled=True)
    assert parse(f"cc-{TRACE}-{SPAN}-ff") == TraceContext(TRACE, SPAN, sampled=True), "other flags are not ours to read"
    assert sampled(f"01-{TRACE}-{SPAN}-03") == GOOD


def test_only_what_is_sampled_is_carried() -> None:
    assert sampled(GOOD) == GOOD
    assert sampled(UNSAMPLED) is None
    assert sampled(None) is None
    trail = Trail(UNSAMPLED)
    assert (trail.placing(0), trail.attempting("w", 0)) == (None, None)
    trail = Trail(GOOD)
    assert (trail.placing(0), trail.attempting("w", 1)) == (GOOD, GOOD)


def test_headers() -> None:
    assert headers_of(None) is None, "no header at all"
    assert headers_of(GOOD, room=127) is None, "a message that is full already"
    assert len(f"NATS/1.0\r\ntraceparent: {GOOD}\r\n\r\n") < HEADER_BYTES
    assert in_headers(headers_of(GOOD)) == GOOD
    assert in_headers({"Traceparent": f" {GOOD} "}) == GOOD, "whatever the case, and the blanks"
    assert in_headers({"content-type": "application/json"}) is None
    assert in_headers({}) is in_headers(None) is None
