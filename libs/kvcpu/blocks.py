"""What the kernels are given of a step and of the memory that it works on. Plain values and protocols.

`[T]` is all tokens of all sequences of a step, one after the other, `[S]` the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32

Ints = NDArray[np.int64]

# torch's names of the numbers that kernels know: all, and those that products and fused operations take.
STORED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MULTIPLIED = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What a layer computes: softmax(cap(scaling * QK^T))V over the last `window` tokens, the token itself included.

    `cap(x) = softcap * tanh(x / softcap)` where there is a `softcap` (Gemma 2); no `window` means all tokens.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None


class Batch(Protocol):
    """The tokens of one step."""

    @property
    def ids(self) -> Ints:
        """`[T]`."""

    @property
    def slots(self) -> Ints:
        """`[T]`: block * block_size + offset, where K and V of the token go."""

    @property
    def first(self) -> Ints:
        """`[S]`: where each sequence begins in the flat arrays."""

    @property
    def starts(self) -> Ints:
        """`[S]`: the position of its first token."""

    @property
    def counts(self) -> Ints:
        """`[S]`: how many tokens it has."""

    @property
    def offsets(self) -> Ints:
        """`[S]`: where its block table begins in `tables`."""

    @property
    def tables(self) -> Ints:
        """Blocks of all sequences, up to that of the last token of each."""


class Shape(Protocol):
    """What is stored per token; `quantized`: as int8 with one fp32 scale per token and head."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def quantized(self) -> bool: ...


class Pool(Protocol):
    """K and V of all blocks: `data` is `[blocks, layers, 2, kv_heads, block_size, head_dim]`, contiguous. A run is K or
    V of one block, layer and head."""

    @property
    def shape(self) -> Shape: ...
    @property
    def data(self) -> Tensor: ...
    @property
    def block_size(self) -> int: ...
    @property
    def run_bytes(self) -> int: ...
