"""What the kernels are given of a step and of the memory that it works on. Plain values.

`[T]` is all tokens of all sequences of a step, one after the other, `[S]` the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, SCALE_BYTES

Ints = NDArray[np.int64]

# torch's names of the numbers that kernels know: all, and those that products and fused operations take.
STORED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MULTIPLIED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer computes: softmax(cap(scaling * QK^T))V over the last `window` tokens, the token itself included.

    `cap(x) = softcap * tanh(x / softcap)` where there is a `softcap` (Gemma 2); no `window` means all tokens. `sinks`
    (gpt-oss) are learned scores, fp32 `[heads]`: one beside those of the tokens that each head sees, without a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Ints  # [T]
    slots: Ints  # [T], block * block_size + offset: where K and V of the token go
    first: Ints  # [S], where each sequence begins in the flat arrays
    starts: Ints  # [S], position of its first token
    counts: Ints  # [S], how many tokens it has
    offsets: Ints  # [S], where its block table begins in `tables`
    tables: Ints  # blocks of all sequences, up to that of the last token of each


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the model stores per token. `quantized`: as int8 with one fp32 scale per (token, head), else in `dtype`.
    `latent`: values are not stored, they are the first `latent` numbers of keys."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    quantized: bool = False
    latent: int = 0

    @property
    def parts(self) -> int:
        """K and V, or K alone."""
        return 1 if self.latent else 2

    @property
    def value_dim(self) -> int:
        return self.latent or self.head_dim

    def bytes_per_run(self, block_size: int) -> int:
        """Of K or V of one block, layer and head: numbers, then scales."""
        if self.quantized:
            return block_size * (self.head_dim + SCALE_BYTES)
        return block_size * self.head_dim * self.dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        return self.layers * self.parts * self.kv_heads * self.bytes_per_run(block_size)


class Pool(Protocol):
    shape: KvShape
    data: Tensor  # [blocks, layers, parts, kv_heads, block_size, head_dim], contiguous
    block_size: int
    run_bytes: int  # of K or V of one block, layer and head
