"""Messages come out of any cut of the stream as they went in; what cannot be read is refused."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet_vllm.wire import (
    MAX_FRAME,
    VERSION,
    BlocksErased,
    BlocksRead,
    BlocksSaved,
    BlocksSaving,
    Decoder,
    EngineHello,
    EngineStep,
    EraseBlocks,
    GrantSlots,
    Message,
    Scheduled,
    StateSaving,
    WorkerHello,
    encode,
)

MESSAGES: list[Message] = [
    EngineHello(
        VERSION, "9f", 12, "0.32.0", {"model": "m", "quantization": None, "kv_cache_groups": [{"kind": "Full"}]}
    ),
    Scheduled("r-1", 96, 0),
    EngineStep(0.025, 16, 16, 0, ()),
    EngineStep(0.0, 2, 300, 299, ("r-1", "r-2")),
    EraseBlocks(7, (2**64 - 1, 0, b"\x00" * 32)),
    BlocksErased(7, 3),
    GrantSlots((0, 2**31)),
    BlocksSaving("r-1", 6, (4, 5)),
    StateSaving("r-1", 8, (6,)),
    WorkerHello(VERSION, 1, 2, b"\x9f" * 16, 131072),
    BlocksSaved("r-1", (4, 5)),
    BlocksRead("r-1", 4, 0.25),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=12), st.integers(1, 200))
def test_any_cut_gives_the_same_messages(sent: list[Message], cut: int) -> None:
    data, decoder = encode(sent), Decoder()
    got = [one for at in range(0, len(data), cut) for one in decoder.feed(data[at : at + cut])]
    assert got == sent


def frame(body: Any) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return struct.pack(">I", len(packed)) + packed


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (struct.pack(">I", MAX_FRAME + 1), "more than"),  # before any of it has come
        (frame(b""), "no message"),
        (frame(b"\xc1"), "no message"),
        (frame(b"\x91"), "no message"),
        (frame([]), "no message"),
        (frame(5), "no message"),
        (frame({}), "no message"),
        (frame([1, 2]), "not known"),
        (frame(["Resumed", 1]), "not known"),
        (frame(["BlocksErased", 1]), "another form"),
        (frame(["BlocksErased", 1, 2, 3]), "another form"),
        (frame(["BlocksErased", 1, "2"]), "another form"),
        (frame(["EraseBlocks", 1, ["text"]]), "items of another form"),
        (frame(["EngineStep", 0.0, 1, 1, 0, [1]]), "items of another form"),
        (frame(["GrantSlots", ["4"]]), "items of another form"),
        (frame(["BlocksSaved", "r", 4]), "another form"),
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Decoder().feed(encode(MESSAGES) + data)


@given(st.binary(max_size=64))
def test_no_other_error_leaves_the_decoder(body: bytes) -> None:
    try:
        Decoder().feed(frame(body))
    except ValueError:
        pass


def test_a_message_that_the_other_side_would_refuse_is_not_sent() -> None:
    with pytest.raises(ValueError, match="more than"):
        encode([EraseBlocks(1, (b"x" * MAX_FRAME,))])
