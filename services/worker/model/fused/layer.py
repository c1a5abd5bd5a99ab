"""A whole decoder layer as one compiled call: norms, products, rotation, attention and residual sums in a row.

    x -> norm -> query, key, value -> rotation -> attention -> product + x = y -> norm -> up -> down + y

Called module by module, the Python between them takes as long as a sixth of a decode step's arithmetic. Attention that
is no program's operation (another backend's) is called between two programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from services.worker.model.attention.base import AttentionForm
from services.worker.model.attention.cpu.backend import CpuBackend, CpuStep
from services.worker.model.attention.interface import current_step
from services.worker.model.fused import call as f
from services.worker.model.fused.modules import FusedMlp, FusedNorm, Rotary
from services.worker.model.linear import call as c
from services.worker.model.linear.packed import PackedLinear
from services.worker.model.vector.program import Program

WIDTH = max(c.FIELDS, f.NORM_FIELDS, f.ROTATION_FIELDS)


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers per token between the operations."""

    hidden: int
    queries: int  # heads * head_dim
    keys: int  # kv_heads * head_dim
    middle: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Buffers:
    """Activations of `rows` tokens, `[rows, width]` each."""

    normed: Tensor
    attending: Tensor  # queries, keys and values next to one another
    attended: Tensor
    residual: Tensor
    middle: Tensor

    def heads(self, widths: Widths) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and what is attended, `[rows, heads, head_dim]`."""
        sizes = [widths.queries, widths.keys, widths.keys]
        parts = [*torch.split(self.attending, sizes, dim=1), self.attended]
        query, key, value, out = (part.view(len(part), -1, widths.head_dim) for part in parts)
        return query, key, value, out


class Workspace:
    """Memory for the activations, which layers of the same widths use in turn; as much as the largest step needed."""

    def __init__(self, widths: Widths) -> None:
        self.widths = widths
        self._whole: list[Tensor] = []
        self._rows = 0
        self._buffers: Buffers | None = None

    def of(self, rows: int) -> Buffers:
        """The same object for as many rows as in the call before."""
        if self._buffers is None or rows != self._rows:
            widths = self.widths
            if not self._whole or rows > len(self._whole[0]):
                sizes = (
                    widths.hidden,
                    widths.queries + 2 * widths.keys,
                    widths.queries,
                    widths.hidden,
                    widths.middle,
                )
                self._whole = [torch.empty((rows, size), dtype=widths.dtype) for size in sizes]
            self._buffers, self._rows = Buffers(*(whole[:rows] for whole in self._whole)), rows
        return self._buffers


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer consists of. `attending` computes queries, keys and values next to one another."""

    first_norm: FusedNorm
    attending: PackedLinear
    rotary: Rotary | None
    form: AttentionForm
    layer: int
    out: PackedLinear
    second_norm: FusedNorm
    mlp: FusedMlp


class FusedLayer(nn.Module):
    """Stands for a decoder layer: hidden states `[1, T, hidden]` to hidden states. Called from one thread."""

    def __init__(self, parts: Parts, workspace: Workspace, threads: int) -> None:
        super().__init__()
        self._parts = parts
        self._workspace = workspace
        self._threads = threads
        self._operations: list[FusedNorm | PackedLinear | Rotary] = [
            parts.first_norm,
            parts.attending,
            *([parts.rotary] if parts.rotary else []),
            parts.out,
            parts.second_norm,
            parts.mlp.up,
            parts.mlp.down,
        ]
        blocks = self._blocks = np.zeros((len(self._operations), WIDTH), dtype=np.int64)
        for block, one in zip(blocks, self._operations, strict=True):
            if not isinstance(one, Rotary):
                block[: len(one.block)] = one.block
            block[c.SELF] = block.ctypes.data
        self._first, self._attending = blocks[0], blocks[1]
        self._rotation = blocks[2] if parts.rotary else None
        self._out, self._second, self._up, self._down = blocks[-4:]
        entries = [(one.entry, int(block[c.SELF])) for one, block in zip(self._operations, blocks, strict=True)]
        self._entries = entries[:-4], entries[-4:]
        self._halves = tuple(Program(half, threads) for half in self._entries)
        self._whole: tuple[CpuBackend, Program] | None = None
        self._laid_out: Buffers | None = None
        self._heads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> Tensor:
        widths, parts = self._workspace.widths, self._parts
        x = hidden_states.contiguous()
        if x.dtype is not widths.dtype or x.shape[-1] != widths.hidden or x.shape[0] != 1:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} given to a layer of {widths}")
        buffers = self._workspace.of(x.shape[1])
        if buffers is not self._laid_out:
            self._lay_out(buffers)
        assert self._heads is not None
        query, key, value, attended = self._heads
        self._blocks[:, c.SEAT : c.TICKET + 1] = 0
        if self._rotation is not None:
            assert position_embeddings is not None
            cosines, sines = (part.contiguous() for part in position_embeddings)
            if cosines.dtype is not widths.dtype or cosines.shape != (1, x.shape[1], widths.head_dim):
                raise ValueError(f"a rotation by {cosines.dtype} {tuple(cosines.shape)} given to a layer of {widths}")
            self._rotation[f.COSINES], self._rotation[f.SINES] = cosines.data_ptr(), sines.data_ptr()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._first[f.X] = self._out[c.RESIDUAL] = x.data_ptr()
        self._down[c.OUT] = out.data_ptr()
        step = current_step()
        if isinstance(step, CpuStep) and step.keeps(widths.dtype):
            step.lay_out(parts.layer, query, key, value, attended, parts.form)
            self._with(step.backend).run()
        else:
            self._halves[0].run()
            attended.copy_(step.attend(parts.layer, query, key, value, parts.form))
            self._halves[1].run()
        return out

    def _with(self, backend: CpuBackend) -> Program:
        if self._whole is None or self._whole[0] is not backend:
            before, after = self._entries
            self._whole = backend, Program([*before, *backend.operations, *after], self._threads)
        return self._whole[1]

    def _lay_out(self, buffers: Buffers) -> None:
        """Have the operations hand one another these buffers."""
        parts, item = self._parts, buffers.normed.dtype.itemsize
        rows = len(buffers.normed)
        for norm in (self._first, self._second):
            norm[f.ROWS], norm[f.X_BYTES] = rows, self._workspace.widths.hidden * item
            norm[f.KIND], norm[f.OUT] = self._attending[c.KIND], buffers.normed.data_ptr()
        self._second[f.X] = buffers.residual.data_ptr()
        for block, layer, source, target in (
            (self._attending, parts.attending, buffers.normed, buffers.attending),
            (self._out, parts.out, buffers.attended, buffers.residual),
            (self._up, parts.mlp.up, buffers.normed, buffers.middle),
            (self._down, parts.mlp.down, buffers.middle, None),
        ):
            layer.lay_out(block, rows)
            block[c.X] = source.data_ptr()
            if target is not None:
                block[c.OUT] = target.data_ptr()
        self._down[c.RESIDUAL] = buffers.residual.data_ptr()
        self._heads = query, key, *_ = buffers.heads(self._workspace.widths)
        if self._rotation is not None and parts.rotary is not None:
            parts.rotary.lay_out(self._rotation, *(heads.transpose(0, 1).unsqueeze(0) for heads in (query, key)))
        self._laid_out = buffers
