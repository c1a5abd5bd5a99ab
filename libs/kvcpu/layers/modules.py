"""Modules that run as one compiled call each: packed linear layers, norms, MLPs and rotary embeddings.

Packing drops the plain weight; a tied output head is packed from the embedding, which stays for lookups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvcpu.blocks import MULTIPLIED, Ints
from kvcpu.layers import layer_call as c
from kvcpu.vector import team
from kvcpu.vector.compiled import entry
from kvcpu.vector.memory import huge_pages
from kvcpu.vector.numbers import LANES

Layer: TypeAlias = nn.Linear | Conv1D
SHARES = 8  # items per thread that a product of few rows is cut into
ROWS_PER_ITEM = 256  # of many
SERIAL_NUMBERS = 32_768  # up to here one thread is done before a team is awake


class Multiplier:
    """The compiled product, its threads and their scratch memory. One per model; called from one thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.entry = entry("kvcpu.layers.layer_kernels", "multiply_share")
        self.scratch = np.zeros(threads * c.SCRATCH_FLOATS, dtype=np.float32)


class PackedLinear(nn.Module):
    """`act(x @ weight.T + bias)`, `weight` `[out, in]`, or with a `gate`: `act(x @ gate.T) * (x @ weight.T)`."""

    def __init__(
        self,
        multiplier: Multiplier,
        weight: Tensor,
        bias: Tensor | None,
        gate: Tensor | None = None,
        act: int = c.PLAIN,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._multiplier = multiplier  # owns the scratch memory
        self.entry = multiplier.entry
        panels = [_panels(weight)] if gate is None else [_panels(gate), _panels(weight)]
        self._packed = _interleaved(panels)
        self._gated = gate is not None
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(len(panels[0]) * c.PANEL)
            self._bias[: self.out_features] = bias.float()
        self._few_panels = max(1, -(-self.out_features // c.PANEL) // (multiplier.threads * SHARES))
        block = self.block = np.zeros(c.FIELDS, dtype=np.int64)
        block[c.SELF] = self._address = block.ctypes.data
        block[c.COLUMNS], block[c.DEPTH] = self.out_features, self.in_features
        block[c.WEIGHT] = self._packed.data_ptr()
        block[c.OUT_BYTES] = self.out_features * weight.dtype.itemsize
        block[c.X_BYTES] = self.in_features * weight.dtype.itemsize
        block[c.KIND], block[c.ACT] = MULTIPLIED[weight.dtype], act
        block[c.BIAS] = 0 if self._bias is None else self._bias.data_ptr()
        block[c.SCRATCH] = multiplier.scratch.ctypes.data

    @classmethod
    def joined(cls, multiplier: Multiplier, layers: list[Layer]) -> PackedLinear:
        """Several layers of the same inputs as one, whose outputs lie next to one another."""
        weights = [plain_weight(one) for one in layers]
        bias = None
        if any(one.bias is not None for one in layers):
            pairs = zip(layers, weights, strict=True)
            bias = torch.cat([weight.new_zeros(len(weight)) if one.bias is None else one.bias for one, weight in pairs])
        return cls(multiplier, torch.cat(weights), bias)

    @property
    def weight(self) -> Tensor:
        """The plain matrix, unpacked anew each time, for code that looks at it."""
        own = self._packed[1::2] if self._gated else self._packed
        return own.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        *outer, depth = x.shape
        if x.dtype is not self.dtype or depth != self.in_features:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} given to a layer of {self.dtype} [{self.in_features}]")
        x = x.contiguous()
        out = torch.empty((*outer, self.out_features), dtype=self.dtype)
        rows = x.numel() // depth
        if not rows:
            return out
        self.lay_out(self.block, rows)
        self.block[c.SEAT] = self.block[c.TICKET] = 0
        self.block[c.X], self.block[c.OUT] = x.data_ptr(), out.data_ptr()
        team.run(self.entry.address, self._address, self._multiplier.threads)
        return out

    def lay_out(self, block: Ints, rows: int) -> None:
        """Set the row count in a call block, this layer's or a copy of it."""
        few = rows <= c.ROWS_AT_ONCE
        block[c.ROWS] = rows
        block[c.PANELS_PER_ITEM] = self._few_panels if few else 1
        block[c.ROWS_PER_ITEM] = rows if few else ROWS_PER_ITEM


def _panels(weight: Tensor) -> Tensor:
    """`[out, in]` as `[panels, in, PANEL]`, in pairs along the input for bfloat16; the last panel filled with zeros."""
    rows, depth = weight.shape
    whole = -(-rows // c.PANEL) * c.PANEL
    if whole != rows:
        weight = torch.cat([weight, weight.new_zeros((whole - rows, depth))])
    steps = (depth,) if weight.dtype is torch.float32 else (depth // 2, 2)
    return weight.reshape(-1, c.PANEL, *steps).transpose(1, 2)


def _interleaved(panels: list[Tensor]) -> Tensor:
    """A panel of each matrix in turn, in memory of their own."""
    first = panels[0]
    memory = huge_pages(len(panels) * first.numel() * first.dtype.itemsize)
    packed = memory.view(first.dtype).view(len(first), len(panels), *first.shape[1:])
    for at, part in enumerate(panels):
        packed[:, at].copy_(part)
    return packed.view(-1, *first.shape[1:])


def plain_weight(layer: Layer) -> Tensor:
    """`[out, in]`; a Conv1D holds it transposed."""
    weight: Tensor = layer.weight
    return weight.t() if isinstance(layer, Conv1D) else weight


def can_pack(module: Any) -> TypeGuard[Layer]:
    """Whether this is a linear layer on numbers that the kernels multiply."""
    if type(module) not in (nn.Linear, Conv1D):
        return False
    weight = plain_weight(module)
    fits_pairs = weight.numel() > 0 and weight.shape[1] % 2 == 0
    return fits_pairs and weight.device.type == "cpu" and weight.dtype in MULTIPLIED


def pack(model: Any, multiplier: Multiplier) -> int:
    """Replace the model's linear layers by packed ones, the output head included. Returns how many."""
    names = [name for name, module in model.named_modules() if can_pack(module)]
    for name in names:
        layer = model.get_submodule(name)
        model.set_submodule(name, PackedLinear(multiplier, plain_weight(layer), layer.bias))
    return len(names)


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

    SIZES = 2 * LANES  # heads are multiples of this, whose halves are turned into one another

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

    def instead_of(self, theirs: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Where these arguments do not fit, as some models' own shapes, calls `theirs`."""
        if len(given) == 4 and not more and self.fits(*given):
            return self(*given)
        return theirs(*given, **more)

    def lay_out(self, block: Ints, query: Tensor, key: Tensor) -> None:
        size = query.shape[-1]
        if size not in self._scratch:
            self._scratch[size] = np.empty(3 * size * self._threads, dtype=np.float32)
        block[c.ROWS], block[c.SIZE], block[c.KIND] = query.shape[2], size, MULTIPLIED[query.dtype]
        block[c.X], block[c.OTHER] = query.data_ptr(), key.data_ptr()
        block[c.HEADS], block[c.TOKEN_STRIDE], block[c.HEAD_STRIDE] = query.shape[1], query.stride(2), query.stride(1)
        block[c.OTHER_HEADS] = key.shape[1]
        block[c.OTHER_TOKEN_STRIDE], block[c.OTHER_HEAD_STRIDE] = key.stride(2), key.stride(1)
        block[c.SCRATCH], block[c.SCRATCH_BYTES] = self._scratch[size].ctypes.data, 12 * size

    @staticmethod
    def fits(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> bool:
        """Whether the kernel rotates these: whole heads, of numbers of one kind, one row of tokens."""
        return (
            query.dtype is key.dtype is cosines.dtype is sines.dtype
            and query.dtype in MULTIPLIED
            and query.dim() == key.dim() == 4
            and cosines.shape == sines.shape == (1, query.shape[2], query.shape[3])
            and key.shape[2:] == query.shape[2:]
            and query.shape[0] == key.shape[0] == 1
            and query.shape[3] % Rotary.SIZES == 0
            and query.stride(3) == key.stride(3) == 1
        )
