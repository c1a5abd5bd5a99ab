"""Whole blocks through the codecs: what comes back, what is refused, and that threads do not disturb each other."""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kvfleet.worker.blocks.block_codec import (
    LOSSLESS_DB,
    SNR_GATE_DB,
    BlockShape,
    Encoded,
    NotEncodable,
    choose,
    decode,
    encode,
    encoded_bytes,
    warm_up,
)
from kvproto.dataplane.block import BlockCodec
from kvproto.errors import CodecError

RAW, INT8 = BlockCodec.RAW, BlockCodec.INT8
DTYPES = ("float32", "bfloat16", "float16")
TINY = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)
ROUNDING = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}  # relative, to nearest; bfloat16 with some room
SMALLEST = {"float32": 2**-149, "bfloat16": 2**-133, "float16": 2**-24}  # subnormal numbers lie so far apart

Floats = NDArray[np.float32]


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    warm_up()


def stored(floats: Floats, dtype: str) -> bytes:
    """As the pool holds them; what is too large for float16 becomes its largest number."""
    if dtype == "float32":
        return floats.tobytes()
    if dtype == "float16":
        most = float(np.finfo(np.float16).max)
        return np.where(np.isfinite(floats), np.clip(floats, -most, most), floats).astype(np.float16).tobytes()
    bits = floats.view(np.uint32)
    return (bits >> 16).astype(np.uint16).tobytes()  # cut off: any bfloat16 will do


def floats_of(raw: bytes | bytearray, dtype: str, shape: BlockShape) -> Floats:
    size = (shape.runs, shape.head_dim)
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(size)
    return np.frombuffer(raw, dtype).astype(np.float32).reshape(size)


def encoded(raw: bytes, shape: BlockShape) -> tuple[bytearray, Encoded]:
    small = bytearray(b"\xa5" * encoded_bytes(INT8, shape))
    return small, encode(INT8, shape, memoryview(raw), memoryview(small))


def decoded(small: bytes | bytearray, shape: BlockShape) -> bytearray:
    raw = bytearray(b"\xa5" * shape.raw_bytes)
    decode(INT8, shape, memoryview(small), memoryview(raw))
    return raw


def parts(small: bytearray, shape: BlockShape) -> tuple[NDArray[np.int8], Floats]:
    numbers = np.frombuffer(small, np.int8, shape.numbers).reshape(shape.runs, shape.head_dim)
    return numbers, np.frombuffer(bytes(small[shape.numbers :]), np.float32)


def gaussian(dtype: str, runs: int = 64, head_dim: int = 64, seed: int = 1) -> tuple[BlockShape, bytes]:
    floats = np.random.default_rng(seed).standard_normal((runs, head_dim), dtype=np.float32)
    return BlockShape(runs, head_dim, dtype), stored(floats, dtype)


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
few = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 0.5, 127.0, 126.5, TINY, -TINY, 2**-149, 2**-133, LARGEST, -LARGEST, 65504]
)
blocks = st.tuples(st.integers(1, 5), st.integers(1, 70)).flatmap(
    lambda size: arrays(np.float32, size, elements=st.one_of(numbers, few), fill=few)
)


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", DTYPES)
@given(floats=blocks)
@example(floats=np.full((1, 1), 2**-149, np.float32))
@example(floats=np.full((2, 33), LARGEST, np.float32))
@example(floats=np.array([[LARGEST, 1.0, -LARGEST], [TINY, 2**-149, -TINY / 2]], np.float32))
@example(floats=np.array([[127.0, 0.5, 1.5, -0.5, -2.5]], np.float32))
def test_every_number_comes_back_within_half_a_level(dtype: str, floats: Floats) -> None:
    shape = BlockShape(*floats.shape, dtype)
    raw = stored(floats, dtype)
    before = floats_of(raw, dtype, shape)
    small, result = encoded(raw, shape)
    after = floats_of(decoded(small, shape), dtype, shape)
    levels, scales = parts(small, shape)
    assert result == Encoded(INT8, len(small), result.snr_db)
    assert np.isfinite(after).all()
    half = scales.astype(np.float64)[:, None] / 2
    exact, back = before.astype(np.float64), after.astype(np.float64)
    # levels: the division by the scale rounds twice; the pool's numbers: to nearest
    allowed = half * (1 + 2**-15) + np.abs(exact) * ROUNDING[dtype] + SMALLEST[dtype]
    assert (np.abs(exact - back) <= allowed).all()
    assert (np.abs(levels.astype(int)) <= 127).all()
    assert (after[before == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(floats=blocks)
def test_a_scale_is_the_largest_number_by_127(dtype: str, floats: Floats) -> None:
    shape = BlockShape(*floats.shape, dtype)
    raw = stored(floats, dtype)
    largest = np.abs(floats_of(raw, dtype, shape)).max(axis=1)
    _, scales = parts(encoded(raw, shape)[0], shape)
    wanted = largest / np.float32(127)
    usual = (wanted >= TINY) & (largest < LARGEST / 2)
    assert (scales[usual] == wanted[usual]).all()
    assert (scales[largest == 0] == 0).all()
    tiny = (wanted < TINY) & (largest > 0)
    assert (scales[tiny] == np.float32(TINY)).all(), "its inverse must be a number"
    assert (np.abs(scales.astype(np.float64) - wanted) <= np.maximum(wanted * 1e-6, TINY)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(floats=blocks)
def test_a_second_round_trip_changes_no_level(dtype: str, floats: Floats) -> None:
    """Nor a bit of what a 16-bit pool holds; in fp32 a scale may move by its last bit."""
    shape = BlockShape(*floats.shape, dtype)
    first, _ = encoded(stored(floats, dtype), shape)
    back = decoded(first, shape)
    second, _ = encoded(bytes(back), shape)
    (levels, scales), (again, scales_again) = parts(first, shape), parts(second, shape)
    usual = scales > TINY  # below, a level is as coarse as the pool's own numbers
    assert (levels[usual] == again[usual]).all()
    assert (np.abs(scales - scales_again)[usual] <= scales[usual] * 2**-23).all()
    if dtype != "float32":
        assert decoded(second, shape) == back


@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 31, 64, 80, 96, 128, 129, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_and_partial_vectors_agree(dtype: str, head_dim: int) -> None:
    """The bytes are those that plain arithmetic gives."""
    shape, raw = gaussian(dtype, 9, head_dim)
    small, _ = encoded(raw, shape)
    floats = floats_of(raw, dtype, shape)
    scales = np.abs(floats).max(axis=1) / np.float32(127)
    levels = np.rint(floats * (np.float32(1) / scales)[:, None]).astype(np.int8)
    assert small == levels.tobytes() + scales.tobytes()
    if dtype == "float32":
        assert decoded(small, shape) == (levels * scales[:, None]).astype(np.float32).tobytes()


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even() -> None:
    shape = BlockShape(1, 4, "bfloat16")
    for scale, wanted in ((1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (1 + 2**-8 + 2**-20, 0x3F81)):
        small = np.array([1, -1, 0, 2], np.int8).tobytes() + np.float32(scale).tobytes()
        found = np.frombuffer(decoded(small, shape), np.uint16)
        assert list(found) == [wanted, wanted | 0x8000, 0, wanted + 0x80]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("head_dim", [1, 16, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_refused_wherever_it_stands(dtype: str, head_dim: int, bad: float) -> None:
    chance = random.Random(head_dim)
    for _ in range(8):
        floats = np.ones((7, head_dim), np.float32)
        floats[chance.randrange(7), chance.randrange(head_dim)] = bad
        shape, raw = BlockShape(7, head_dim, dtype), stored(floats, dtype)
        with pytest.raises(NotEncodable):
            encoded(raw, shape)
        small = memoryview(bytearray(encoded_bytes(INT8, shape)))
        assert choose(INT8, shape, memoryview(raw), small) == Encoded(RAW, len(raw), 0.0)


@pytest.mark.parametrize("scale", [np.nan, -np.nan, np.inf, -1.0, -0.0, 1e38])
def test_scales_that_no_block_has_are_refused(scale: float) -> None:
    shape = BlockShape(3, 20, "bfloat16")
    small = bytes(60) + np.array([1.0, scale, 0.0], np.float32).tobytes()
    with pytest.raises(CodecError):
        decoded(small, shape)


@given(junk=st.binary(min_size=2 * 24, max_size=2 * 24))
def test_junk_is_refused_or_becomes_numbers(junk: bytes) -> None:
    shape = BlockShape(2, 20, "float32")
    try:
        found = floats_of(decoded(junk, shape), "float32", shape)
    except CodecError:
        return
    assert (np.isfinite(found) | (np.frombuffer(junk, np.int8, 40).reshape(2, 20) == -128)).all()


# ---------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "wanted"), [(64, 44.5), (128, 43.8), (256, 43.1)])
def test_gaussian_numbers_keep_about_44_db(dtype: str, head_dim: int, wanted: float) -> None:
    shape, raw = gaussian(dtype, 512, head_dim)
    small, result = encoded(raw, shape)
    before = floats_of(raw, dtype, shape).astype(np.float64)
    after = floats_of(decoded(small, shape), dtype, shape)
    measured = 10 * np.log10((before**2).sum() / ((before - after) ** 2).sum())
    assert result.snr_db == pytest.approx(wanted, abs=0.3)
    assert result.snr_db == pytest.approx(measured, abs=0.4 if dtype == "bfloat16" else 0.02)


@pytest.mark.parametrize("factor", [2**-100, 2**-60, 1.0, 2**60, 2**120])
def test_the_ratio_does_not_hang_on_the_size_of_numbers(factor: float) -> None:
    shape, raw = gaussian("float32")
    scaled = (np.frombuffer(raw, np.float32) * np.float32(factor)).tobytes()
    assert encoded(scaled, shape)[1].snr_db == pytest.approx(encoded(raw, shape)[1].snr_db, abs=0.01)


def test_of_levels_nothing_is_lost() -> None:
    floats = np.arange(-127, 128, dtype=np.float32).reshape(1, 255)
    shape = BlockShape(1, 255, "float32")
    small, result = encoded(floats.tobytes(), shape)
    assert result.snr_db == LOSSLESS_DB
    assert decoded(small, shape) == floats.tobytes()
    assert encoded(bytes(4 * 255), shape)[1].snr_db == LOSSLESS_DB


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_the_gate_a_block_stays_raw(dtype: str) -> None:
    """One large number in each group; all others lie half-way between two levels."""
    floats = np.full((8, 256), 1.5, np.float32)
    floats[:, 0] = 127.0
    shape = BlockShape(8, 256, dtype)
    raw, small = stored(floats, dtype), memoryview(bytearray(encoded_bytes(INT8, shape)))
    poor = encode(INT8, shape, memoryview(raw), small)
    assert 10 < poor.snr_db < SNR_GATE_DB
    assert choose(INT8, shape, memoryview(raw), small) == Encoded(RAW, len(raw), 0.0)


def test_the_usual_block_is_chosen_to_be_int8() -> None:
    for dtype in DTYPES:
        shape, raw = gaussian(dtype)
        small = memoryview(bytearray(encoded_bytes(INT8, shape)))
        assert choose(INT8, shape, memoryview(raw), small).codec is INT8
        assert decoded(bytes(small), shape) != raw
        assert choose(RAW, shape, memoryview(raw), small) == Encoded(RAW, len(raw), 0.0)


# ---------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_raw_bytes_are_the_same_bytes(dtype: str) -> None:
    shape = BlockShape(6, 20, dtype)
    raw = random.Random(1).randbytes(shape.raw_bytes)
    assert encoded_bytes(RAW, shape) == len(raw)
    there, back = bytearray(len(raw)), bytearray(len(raw))
    assert encode(RAW, shape, memoryview(raw), memoryview(there)) == Encoded(RAW, len(raw), 0.0)
    decode(RAW, shape, memoryview(there), memoryview(back))
    assert raw == there == back


def test_a_pool_of_int8_stays_as_it_is() -> None:
    shape = BlockShape(6, 20, "int8")
    assert shape.raw_bytes == 6 * 24
    raw, nothing = memoryview(bytes(shape.raw_bytes)), memoryview(bytearray())
    assert choose(INT8, shape, raw, nothing) == Encoded(RAW, shape.raw_bytes, 0.0)
    for refused in (
        lambda: encoded_bytes(INT8, shape),
        lambda: encode(INT8, shape, raw, memoryview(bytearray(raw))),
        lambda: decode(INT8, shape, raw, memoryview(bytearray(raw))),
    ):
        with pytest.raises(ValueError, match="int8 in the pool"):
            refused()


@pytest.mark.parametrize(("runs", "head_dim", "dtype"), [(0, 64, "float32"), (4, 0, "float32"), (4, -1, "float32")])
def test_shapes_of_nothing(runs: int, head_dim: int, dtype: str) -> None:
    with pytest.raises(ValueError, match="no block"):
        BlockShape(runs, head_dim, dtype)


@pytest.mark.parametrize("dtype", ["float64", "", "torch.float32", "fp8"])
def test_dtypes_that_no_pool_has(dtype: str) -> None:
    with pytest.raises(ValueError, match="no codec"):
        BlockShape(1, 1, dtype)


def test_it_is_3_7_times_smaller_than_fp32() -> None:
    for head_dim in (64, 128):
        shape = BlockShape(32, head_dim, "float32")
        assert shape.raw_bytes >= 3.7 * encoded_bytes(INT8, shape)


@pytest.mark.parametrize("codec", [RAW, INT8])
def test_buffers_of_another_size_are_refused_and_nothing_is_written(codec: BlockCodec) -> None:
    shape, raw = gaussian("float32", 4, 17)
    right = encoded_bytes(codec, shape)
    for size in (0, 1, right - 1, right + 1, 2 * right):
        target = bytearray(size)
        with pytest.raises(ValueError, match="target"):
            encode(codec, shape, memoryview(raw), memoryview(target))
        assert not any(target)
        with pytest.raises(ValueError, match="source"):
            decode(codec, shape, memoryview(bytes(size)), memoryview(bytearray(shape.raw_bytes)))
    for size in (0, shape.raw_bytes - 4, shape.raw_bytes + 4):
        with pytest.raises(ValueError, match="source"):
            encode(codec, shape, memoryview(bytes(size)), memoryview(bytearray(right)))
        target = bytearray(size)
        with pytest.raises(ValueError, match="target"):
            decode(codec, shape, memoryview(bytes(right)), memoryview(target))
        assert not any(target)


@pytest.mark.parametrize("codec", [RAW, INT8])
def test_buffers_that_cannot_be_written_or_have_gaps_are_refused(codec: BlockCodec) -> None:
    shape, raw = gaussian("float32", 4, 16)
    size = encoded_bytes(codec, shape)
    with pytest.raises(ValueError, match="target"):
        encode(codec, shape, memoryview(raw), memoryview(bytes(size)))
    with pytest.raises(ValueError, match="target"):
        encode(codec, shape, memoryview(raw), memoryview(bytearray(2 * size))[::2])
    with pytest.raises(ValueError, match="source"):
        encode(codec, shape, memoryview(raw + raw)[::2], memoryview(bytearray(size)))
    with pytest.raises(ValueError, match="target"):
        decode(codec, shape, memoryview(bytes(size)), memoryview(raw))


@pytest.mark.parametrize("codec", [RAW, INT8])
def test_buffers_of_any_element_and_alignment(codec: BlockCodec) -> None:
    """A block lies anywhere in a receive buffer, or is a tensor of six dimensions."""
    shape, raw = gaussian("float32", 12, 20)
    size = encoded_bytes(codec, shape)
    plain = bytearray(size)
    encode(codec, shape, memoryview(raw), memoryview(plain))
    tensor = np.frombuffer(raw, np.float32).reshape(1, 3, 2, 2, 1, 20)
    odd, back = bytearray(size + 3), np.zeros_like(tensor)
    encode(codec, shape, memoryview(tensor), memoryview(odd)[3:])
    assert odd[3:] == plain
    decode(codec, shape, memoryview(odd)[3:], memoryview(back))
    shifted = bytearray(len(raw) + 1)
    decode(codec, shape, memoryview(plain), memoryview(shifted)[1:])
    assert back.tobytes() == shifted[1:]


def test_nothing_beside_the_target_is_written() -> None:
    for dtype in DTYPES:
        shape, raw = gaussian(dtype, 5, 17)
        size = encoded_bytes(INT8, shape)
        around = bytearray(b"\xa5" * (size + 200))
        encode(INT8, shape, memoryview(raw), memoryview(around)[100:-100])
        back = bytearray(b"\xa5" * (len(raw) + 200))
        decode(INT8, shape, memoryview(around)[100:-100], memoryview(back)[100:-100])
        for buffer in (around, back):
            assert buffer[:100] == buffer[-100:] == b"\xa5" * 100


def test_threads_give_the_same_bytes() -> None:
    """Four threads on two cores, blocks of all kinds between each other."""
    works = [gaussian(dtype, 96, 64 + seed % 3, seed) for seed in range(40) for dtype in DTYPES]

    def round_trip(work: tuple[BlockShape, bytes]) -> tuple[bytes, bytes, float]:
        shape, raw = work
        small, result = encoded(raw, shape)
        return bytes(small), bytes(decoded(small, shape)), result.snr_db

    alone = [round_trip(work) for work in works]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(round_trip, works)) == alone


def test_the_interpreter_is_free_meanwhile() -> None:
    """Nobody is asked to give it up here, so another thread moves only when a call lets go of it."""
    shape = BlockShape(1 << 17, 64, "float32")
    raw, small = memoryview(bytearray(shape.raw_bytes)), memoryview(bytearray(encoded_bytes(INT8, shape)))
    moved, stop = [0], threading.Event()

    def move() -> None:
        while not stop.is_set():
            moved[0] += 1
            time.sleep(0)

    before = sys.getswitchinterval()
    mover = threading.Thread(target=move)
    mover.start()
    sys.setswitchinterval(60)
    try:
        for call in (partial(encode, INT8, shape, raw, small), partial(decode, INT8, shape, small, raw)):
            for _ in range(50):
                at = moved[0]
                call()
                if moved[0] > at:
                    break
            else:
                raise AssertionError("no other thread moved")
    finally:
        sys.setswitchinterval(before)
        stop.set()
        mover.join()
