"""How large a block is, as it lies in the pool and as a codec writes it. Pure.

int8: first all numbers, `[runs, head_dim]`, then all scales, `[runs]` fp32 in the machine's byte order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, SCALE_BYTES
from kvproto.dataplane.block import BlockCodec

KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": INT8}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """`runs` groups of `head_dim` numbers, one of each layer, K or V, head and token: layers * 2 * kv_heads *
    block_size. `dtype` is the pool's: float32, bfloat16, float16, or int8 where the pool itself holds scales.
    Raises ValueError.
    """

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
    """Length of every block of this shape. Raises ValueError for what is never written: int8 of int8."""
    if codec is BlockCodec.RAW:
        return shape.raw_bytes
    if shape.kind == INT8:
        raise ValueError("a block that is int8 in the pool is stored as it is")
    return shape.numbers + shape.runs * SCALE_BYTES
