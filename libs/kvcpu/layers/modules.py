"""Norms, gated MLPs and rotary embeddings as one compiled call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kvcpu.blocks import MULTIPLIED, Ints
from kvcpu.layers import layer_call as c
from kvcpu.layers.packed import PackedLinear
from kvcpu.vector import team
from kvcpu.vector.compiled import entry
from kvcpu.vector.numbers import LANES

SERIAL_NUMBERS = 32_768  # up to here one thread is done before a team is awake
ROTATED = 2 * LANES  # heads are multiples of this, whose halves are turned into one another


class FusedNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension; RMS norm where not `centered`."""

    def __init__(self, threads: int, weight: Tensor, bias: Tensor | None, eps: float, *, centered: bool) -> None:
        super().__init__()
        self.entry = entry("kvcpu.layers.layer_kernels", "norm_share")
        self._threads = threads
        self.size = len(weight)
        self._weight = weight.detach().float().contiguous()
        self._bias = torch.zeros(self.size) if bias is None else bias.detach().float().contiguous()
        self._epsilon = np.array([eps], dtype=np.float32)
        self._scratch = np.empty(threads * self.size, dtype=np.float32)
        block = self.block = np.zeros(c.FIELDS, dtype=np.int64)
        self._address = block.ctypes.data
        block[c.SELF], block[c.SIZE], block[c.CENTERED] = self._address, self.size, centered
        block[c.WEIGHT], block[c.BIAS] = self._weight.data_ptr(), self._bias.data_ptr()
        block[c.EPSILON] = self._epsilon.ctypes.data
        block[c.SCRATCH], block[c.SCRATCH_BYTES] = self._scratch.ctypes.data, 4 * self.size

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.size)
        if flat.stride(-1) != 1:
            flat = flat.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        block = self.block
        block[c.SEAT] = block[c.TICKET] = 0
        block[c.ROWS], block[c.KIND] = flat.shape[0], MULTIPLIED[x.dtype]
        block[c.X], block[c.OUT] = flat.data_ptr(), out.data_ptr()
        block[c.X_BYTES] = flat.stride(0) * x.dtype.itemsize
        team.run(self.entry.address, self._address, 1 if x.numel() <= SERIAL_NUMBERS else self._threads)
        return out


class FusedMlp(nn.Module):
    """`down(up(x))`, the activation and the gate being part of `up`."""

    def __init__(self, up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.up = up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


class Rotary:
    """`apply_rotary_pos_emb` of transformers for one flat row of tokens: turns query and key in place."""

    def __init__(self, threads: int) -> None:
        self.entry = entry("kvcpu.layers.layer_kernels", "rotate_share")
        self._threads = threads
        self._scratch: dict[int, npt.NDArray[np.float32]] = {}  # by size: call blocks point into it for good
        self.block = np.zeros(c.FIELDS, dtype=np.int64)
        self.block[c.SELF] = self._address = self.block.ctypes.data

    def __call__(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """`query` and `key` `[1, heads, T, size]`, the others `[1, T, size]`."""
        cosines, sines = cosines.contiguous(), sines.contiguous()
        block = self.block
        self.lay_out(block, query, key)
        block[c.SEAT] = block[c.TICKET] = 0
        block[c.COSINES], block[c.SINES] = cosines.data_ptr(), sines.data_ptr()
        few = query.numel() + key.numel() <= SERIAL_NUMBERS
        team.run(self.entry.address, self._address, 1 if few else self._threads)
        return query, key

    def lay_out(self, block: Ints, query: Tensor, key: Tensor) -> None:
        """Point a call block at these."""
        size = query.shape[-1]
        if size not in self._scratch:
            self._scratch[size] = np.empty(3 * size * self._threads, dtype=np.float32)
        block[c.ROWS], block[c.SIZE], block[c.KIND] = query.shape[2], size, MULTIPLIED[query.dtype]
        block[c.X], block[c.OTHER] = query.data_ptr(), key.data_ptr()
        block[c.HEADS], block[c.TOKEN_STRIDE], block[c.HEAD_STRIDE] = query.shape[1], query.stride(2), query.stride(1)
        block[c.OTHER_HEADS] = key.shape[1]
        block[c.OTHER_TOKEN_STRIDE], block[c.OTHER_HEAD_STRIDE] = key.stride(2), key.stride(1)
        block[c.SCRATCH], block[c.SCRATCH_BYTES] = self._scratch[size].ctypes.data, 12 * size


def fits(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> bool:
    """Whether the kernel rotates these: whole heads, of numbers of one kind, one row of tokens."""
    return (
        query.dtype is key.dtype is cosines.dtype is sines.dtype
        and query.dtype in MULTIPLIED
        and query.dim() == key.dim() == 4
        and cosines.shape == sines.shape == (1, query.shape[2], query.shape[3])
        and key.shape[2:] == query.shape[2:]
        and query.shape[0] == key.shape[0] == 1
        and query.shape[3] % ROTATED == 0
        and query.stride(3) == key.stride(3) == 1
    )


def bound(rotary: Rotary, theirs: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rotary` where it fits, else the function that it stands for: models call that with shapes of their own."""

    def rotated(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, *others: Any, **more: Any) -> Any:
        if others or more or not fits(query, key, cosines, sines):
            return theirs(query, key, cosines, sines, *others, **more)
        return rotary(query, key, cosines, sines)

    return rotated
