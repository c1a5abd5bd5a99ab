"""Both readers of block events say the same of any bytes."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfleet.placement.index import changes
from kvfleet.placement.index.changes import TIERS, Changes, read_changes
from kvproto import codec
from kvproto.block_hash import digest_term
from kvproto.errors import CodecError
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents

HASH = st.binary(min_size=16, max_size=16)
RUN = st.builds(BlockRun, st.one_of(st.just(b""), HASH), st.lists(HASH, max_size=40).map(tuple))
CHANGE = st.builds(TierEvents, st.sampled_from(TIERS), st.booleans(), st.lists(RUN, max_size=18).map(tuple))
EVENT = st.builds(
    KvEvents, st.text(max_size=40), st.integers(0, 2**63 - 1), st.lists(CHANGE, max_size=18).map(tuple)
)  # more changes than the quick reader takes


def plain(read: Changes) -> tuple[Any, ...]:
    rows = [(one.tier, one.removed, one.hashes.tobytes()) for one in read.changes]
    return read.epoch, read.seq, rows, read.digest


def of_any(data: bytes) -> tuple[Any, ...] | None:
    try:
        return plain(changes._read_any(data))
    except CodecError:
        return None


@settings(max_examples=200, deadline=None)
@given(EVENT)
def test_what_is_written_is_read(event: KvEvents) -> None:
    data = codec.encode_events(event)
    read = read_changes(data)
    assert plain(read) == of_any(data)
    digest = 0
    for one in [one for change in event.changes for run in change.runs for one in run.hashes]:
        digest ^= digest_term(one)
    assert (read.epoch, read.seq, read.digest) == (event.epoch, event.seq, digest)
    assert [
        (TIERS[change.tier], change.removed, change.hashes.tobytes()) for change in read.changes
    ] == [
        (change.tier, change.removed, b"".join(one for run in change.runs for one in run.hashes))
        for change in event.changes
    ]  # fmt: skip
    if len(event.changes) <= 16:
        assert changes._read_usual(data) is not None, "our own form is the usual one"


@settings(max_examples=150, deadline=None)
@given(EVENT, st.integers(0, 2**32))
def test_what_is_damaged_is_read_by_both_or_by_none(event: KvEvents, seed: int) -> None:
    chance = random.Random(seed)
    data = bytearray(codec.encode_events(event))
    for _ in range(chance.randint(1, 3)):
        how, at = chance.randrange(3), chance.randrange(len(data) or 1)
        if how == 0 and data:
            # Damage to a marker more often than to a hash.
            at = chance.choice([at, *[spot for spot, one in enumerate(data) if one in b"\x90\x92\x93\xc2\xc3\xc4\xdc"]])
            data[at] = chance.choice(
                [chance.randrange(256), *b"\x00\x90\x92\x93\x94\xa0\xc0\xc3\xc4\xc5\xcf\xd9\xdc\xdd"]
            )
        elif how == 1:
            del data[at:]
        else:
            data[at:at] = chance.randbytes(chance.randint(1, 4))
    agree(bytes(data))


@given(st.binary(max_size=60))
@example(b"")
@example(b"\x01")
@example(b"\x02\x93\xa1e\x01\x90")
def test_any_bytes_are_read_by_both_or_by_none(data: bytes) -> None:
    agree(data)
    agree(b"\x01\x93" + data)
    agree(b"\x01\x93\xa1e\x01" + data)
    agree(b"\x01\x93\xa1e\x01\x91\x93\xa4host\xc2" + data)


def agree(data: bytes) -> None:
    quick = changes._read_usual(data)
    if quick is not None:
        assert plain(quick) == of_any(data)


@pytest.mark.parametrize(
    "rows",
    [
        ["e", 1, [["device", False, [[b"", [b"x" * 16]]]]], "a field of a later version"],
        ["e", 1, [["device", False, [[None, [b"x" * 16]]]]]],
        ["e", 1, [["device", False, [["", [b"x" * 16]]]]]],
        ["e", 2**64 - 1, []],
    ],
)
def test_other_forms_are_read_too(rows: list[Any]) -> None:
    data = b"\x01" + msgpack.packb(rows)
    assert changes._read_usual(data) is None
    assert plain(read_changes(data)) == of_any(data)
    assert of_any(data) is not None


@pytest.mark.parametrize(
    "rows",
    [
        ["e", 1, [["device", False, [[b"", [b"x" * 15]]]]]],
        ["e", 1, [["device", False, [[b"", ["x" * 16]]]]]],
        ["e", 1, [["attic", False, []]]],
        ["e", 1, [["peer", False, [[b"", [b"x" * 16]]]]]],  # nobody holds blocks there
        ["e", 1, [["device", 1, []]]],
        ["e", -1, []],
        [b"e", 1, []],
        ["e", 1],
        [],
        {},
    ],
)
def test_what_makes_no_sense_is_refused(rows: Any) -> None:
    with pytest.raises(CodecError):
        read_changes(b"\x01" + msgpack.packb(rows))


def test_an_epoch_that_is_no_text_is_refused() -> None:
    with pytest.raises(CodecError):
        read_changes(b"\x01\x93\xa1\xff\x01\x90")


def test_a_message_may_be_too_long() -> None:
    runs = (BlockRun(b"", (b"x" * 16,) * (codec.MAX_MESSAGE_BYTES // 18 + 1)),)
    data = codec.encode_events(KvEvents("e", 1, (TierEvents(Tier.DEVICE, False, runs),)))
    with pytest.raises(CodecError, match="at most"):
        read_changes(data)
