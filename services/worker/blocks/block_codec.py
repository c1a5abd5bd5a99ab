"""Blocks as vaults and peers get them: raw, or as int8. Adapter to the compiled kernels; holds no state.

int8: first all numbers, `[runs, head_dim]`, then all scales, `[runs]` fp32 in the machine's byte order. Thread-safe; a
call releases the interpreter. The caller's buffers must stay as they are until it returns.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvcpu.vector.compiled import entry
from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, SCALE_BYTES
from kvproto.dataplane.block import BlockCodec
from kvproto.errors import CodecError

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": INT8}

SNR_GATE_DB = 35.0
LOSSLESS_DB = 200.0  # of a block that lost nothing

KERNELS = "kvcpu.codec"
_Kernel = Callable[[Any], None]
_Fields, _Sums = ctypes.c_int64 * 7, ctypes.c_double * 3


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`runs` groups of `head_dim` numbers, one of each layer, K or V, head and token: layers * 2 * kv_heads *
    block_size. `dtype` is the pool's: float32, bfloat16, float16, or int8 where the pool itself holds scales. Raises
    ValueError."""

    runs: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.runs < 1 or self.head_dim < 1:
            raise ValueError(f"{self.runs} x {self.head_dim} is no block")
        if self.dtype not in KINDS:
            raise ValueError(f"no codec knows {self.dtype!r}")

    @property
    def kind(self) -> int:
        return KINDS[self.dtype]

    @property
    def numbers(self) -> int:
        return self.runs * self.head_dim

    @property
    def raw_bytes(self) -> int:
        scales = self.runs * SCALE_BYTES if self.kind == INT8 else 0
        return self.numbers * ITEM_BYTES[self.kind] + scales


def encoded_bytes(codec: BlockCodec, shape: BlockShape) -> int:
    """Length of every block of this shape. Raises ValueError for int8 of int8, which is never written."""
    if codec is BlockCodec.RAW:
        return shape.raw_bytes
    if shape.kind == INT8:
        raise ValueError("a block that is int8 in the pool is stored as it is")
    return shape.numbers + shape.runs * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Encoded:
    codec: BlockCodec
    length: int
    snr_db: float


class NotEncodable(ValueError):
    """The block holds a NaN or an infinity, for which int8 has no level."""


def encode(codec: BlockCodec, shape: BlockShape, source: memoryview, target: memoryview) -> Encoded:
    """Write a block to `target`, which must not overlap it. The signal-to-noise ratio is that of rounding to levels;
    bfloat16 loses about 0.3 dB more when it is read back. Raises NotEncodable, and ValueError for buffers of a wrong
    size."""
    length = encoded_bytes(codec, shape)
    _check("source", source, shape.raw_bytes)
    _check("target", target, length, written=True)
    if codec is BlockCodec.RAW:
        target.cast("B")[:] = source.cast("B")
        return Encoded(codec, length, 0.0)
    signal, noise, bad = _call(_kernel("encode"), shape, source, target)
    if bad:
        raise NotEncodable("the block holds what is no number")
    return Encoded(codec, length, snr_db(signal, noise))


def decode(codec: BlockCodec, shape: BlockShape, source: memoryview, target: memoryview) -> None:
    """Inverse of `encode`. Raises ValueError for buffers of a wrong size, and CodecError for impossible scales."""
    _check("source", source, encoded_bytes(codec, shape))
    _check("target", target, shape.raw_bytes, written=True)
    if codec is BlockCodec.RAW:
        target.cast("B")[:] = source.cast("B")
        return
    bad, _, _ = _call(_kernel("decode"), shape, target, source)
    if bad:
        raise CodecError("scales that no block has", field="codec")


def choose(codec: BlockCodec, shape: BlockShape, source: memoryview, target: memoryview) -> Encoded:
    """Encode a block to `target` where it would lose little, else return RAW: `source` itself is to be stored."""
    raw = Encoded(BlockCodec.RAW, shape.raw_bytes, 0.0)
    if codec is BlockCodec.RAW or shape.kind == INT8:
        return raw
    try:
        encoded = encode(codec, shape, source, target)
    except NotEncodable:
        return raw
    return encoded if encoded.snr_db >= SNR_GATE_DB else raw


def snr_db(signal: float, noise: float) -> float:
    if noise <= 0:
        return LOSSLESS_DB
    return min(10 * math.log10(signal / noise), LOSSLESS_DB)


@cache
def warm_up() -> None:
    """Compile, or load what an earlier process compiled, which takes seconds the first time on a machine: not to be
    called in an event loop, but before the worker says that it is ready."""
    for dtype, kind in KINDS.items():
        if kind == INT8:
            continue
        shape = BlockShape(2, 17, dtype)
        raw, small = bytearray(shape.raw_bytes), bytearray(encoded_bytes(BlockCodec.INT8, shape))
        encode(BlockCodec.INT8, shape, memoryview(raw), memoryview(small))
        decode(BlockCodec.INT8, shape, memoryview(small), memoryview(raw))


@cache
def _kernel(name: str) -> _Kernel:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry(KERNELS, name).address)


def _call(kernel: _Kernel, shape: BlockShape, raw: memoryview, small: memoryview) -> tuple[float, float, float]:
    """The order of the fields is that of `KERNELS`."""
    numbers, sums = _address(small), _Sums()
    scales = numbers + shape.numbers
    kernel(_Fields(shape.kind, _address(raw), numbers, scales, shape.runs, shape.head_dim, ctypes.addressof(sums)))
    return sums[0], sums[1], sums[2]


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return address


def _check(name: str, buffer: memoryview, size: int, *, written: bool = False) -> None:
    if not buffer.c_contiguous or buffer.nbytes != size:
        raise ValueError(f"{name}: {size} contiguous bytes are needed, not {buffer.nbytes}")
    if written and buffer.readonly:
        raise ValueError(f"{name}: cannot be written to")
