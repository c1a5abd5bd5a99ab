"""A whole decoder layer as one compiled call: norms, products, rotation, attention and residual sums in a row.

    x -> norm -> query, key, value -> rotation -> attention -> product + x = y -> norm -> up -> down + y

Called module by module, the Python between them takes as long as a sixth of a decode step's arithmetic. Another
backend's attention is called between two programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvcpu.attention import attention_call as a
from kvcpu.attention.backend import CpuBackend, CpuStep, address_of
from kvcpu.blocks import AttentionForm, Ints
from kvcpu.layers import layer_call as c
from kvcpu.layers.modules import FusedMlp, FusedNorm, PackedLinear, Rotary
from kvcpu.vector.compiled import CompiledEntry
from kvcpu.vector.team import Program
from kvfleet.worker.model.attention.interface import current_step

Rotation = tuple[Tensor, Tensor] | None
Operations = list[tuple[CompiledEntry, int]]  # with the addresses of their call blocks
MOST_TOKENS = 64  # of a chain: beyond, Python takes no noticeable time, and results of all layers take memory


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
        """Query, key, value and attention's result, `[rows, heads, head_dim]`."""
        sizes = [widths.queries, widths.keys, widths.keys]
        parts = [*torch.split(self.attending, sizes, dim=1), self.attended]
        query, key, value, out = (part.view(len(part), -1, widths.head_dim) for part in parts)
        return query, key, value, out


@dataclass(eq=False, slots=True)
class Workspace:
    """Memory for the activations, shared by layers of the same widths; as much as the largest step needed."""

    widths: Widths
    _whole: list[Tensor] = field(default_factory=list)
    _rows: int = 0
    _buffers: Buffers | None = None

    def of(self, rows: int) -> Buffers:
        """The same object for as many rows as in the call before."""
        if self._buffers is None or rows != self._rows:
            widths = self.widths
            if not self._whole or rows > len(self._whole[0]):
                attending = widths.queries + 2 * widths.keys
                sizes = (widths.hidden, attending, widths.queries, widths.hidden, widths.middle)
                self._whole = [torch.empty((rows, size), dtype=widths.dtype) for size in sizes]
            self._buffers, self._rows = Buffers(*(whole[:rows] for whole in self._whole)), rows
        return self._buffers


@dataclass(frozen=True, slots=True)
class Parts:
    first_norm: FusedNorm
    attending: PackedLinear  # to queries, keys and values next to one another
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
        self.parts, self.workspace = parts, workspace
        self.chain: LayerChain | None = None
        self.place = 0  # in the chain
        self._threads = threads
        operations: list[FusedNorm | PackedLinear | Rotary] = [parts.first_norm, parts.attending]
        operations += [parts.rotary] if parts.rotary else []
        operations += [parts.out, parts.second_norm, parts.mlp.up, parts.mlp.down]
        self._entries = [one.entry for one in operations]
        self.place_blocks(np.array([one.block for one in operations]))
        self.heads: tuple[Tensor, Tensor, Tensor, Tensor] = 4 * (torch.empty(0),)

    def place_blocks(self, blocks: Ints) -> None:
        """Move the operations' call blocks, `[operations, FIELDS]`, here."""
        blocks[:, c.SELF] = blocks.ctypes.data + blocks.strides[0] * np.arange(len(blocks))
        self.blocks = blocks
        self._first, self._attending = blocks[0], blocks[1]
        self._rotation = blocks[2] if self.parts.rotary else None
        self._out, self._second, self._up, self._down = blocks[-4:]
        own = list(zip(self._entries, blocks[:, c.SELF].tolist(), strict=True))
        self._before, self._after = own[:-4], own[-4:]
        self._halves: tuple[Program, Program] | None = None
        self._whole: tuple[CpuBackend, Program] | None = None
        self._laid_out: Buffers | None = None

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: Rotation = None, **__: Any) -> Tensor:
        asked = current_step()
        step = asked if isinstance(asked, CpuStep) and asked.pool.shape.dtype is self.workspace.widths.dtype else None
        if self.chain is not None and step is not None and hidden_states.shape[1] <= MOST_TOKENS:
            if self.place == 0:
                self._check(hidden_states, position_embeddings)
                hidden_states = hidden_states.contiguous()
            found = self.chain.result(self.place, hidden_states, position_embeddings, step)
            if found is not None:
                return found
        self._check(hidden_states, position_embeddings)
        x = hidden_states.contiguous()
        self.lay_out(self.workspace.of(x.shape[1]))
        query, key, value, attended = self.heads
        self.blocks[:, c.SEAT : c.TICKET + 1] = 0
        if self._rotation is not None and position_embeddings is not None:
            cosines, sines = (part.contiguous() for part in position_embeddings)
            self._rotation[c.COSINES], self._rotation[c.SINES] = cosines.data_ptr(), sines.data_ptr()
        out = torch.empty(x.shape, dtype=x.dtype)
        self._first[c.X] = self._out[c.RESIDUAL] = x.data_ptr()
        self._down[c.OUT] = out.data_ptr()
        parts = self.parts
        if step is not None:
            step.lay_out(parts.layer, query, key, value, attended, parts.form)
            if self._whole is None or self._whole[0] is not step.backend:
                self._whole = step.backend, Program(self.around(step.backend.operations), self._threads)
            self._whole[1].run()
        else:
            if self._halves is None:
                self._halves = Program(self._before, self._threads), Program(self._after, self._threads)
            self._halves[0].run()
            attended.copy_(asked.attend(parts.layer, query, key, value, parts.form))
            self._halves[1].run()
        return out

    def around(self, attending: Operations) -> Operations:
        return [*self._before, *attending, *self._after]

    def lay_out(self, buffers: Buffers) -> None:
        """Connect the operations by these buffers."""
        if buffers is self._laid_out:
            return
        parts, item = self.parts, buffers.normed.dtype.itemsize
        rows = len(buffers.normed)
        for norm in (self._first, self._second):
            norm[c.ROWS], norm[c.X_BYTES] = rows, self.workspace.widths.hidden * item
            norm[c.KIND], norm[c.OUT] = self._attending[c.KIND], buffers.normed.data_ptr()
        self._second[c.X] = buffers.residual.data_ptr()
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
        self.heads = query, key, *_ = buffers.heads(self.workspace.widths)
        if self._rotation is not None and parts.rotary is not None:
            parts.rotary.lay_out(self._rotation, *(heads.transpose(0, 1).unsqueeze(0) for heads in (query, key)))
        self._laid_out = buffers

    def _check(self, x: Tensor, rotation: Rotation) -> None:
        widths = self.workspace.widths
        if x.dtype is not widths.dtype or x.shape[-1] != widths.hidden or x.shape[0] != 1:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} given to a layer of {widths}")
        if self.parts.rotary is None:
            return
        if rotation is None:
            raise ValueError(f"no rotation given to a layer of {widths}")
        for part in rotation:
            if part.dtype is not widths.dtype or part.shape != (1, x.shape[1], widths.head_dim):
                raise ValueError(f"a rotation by {part.dtype} {tuple(part.shape)} given to a layer of {widths}")


class LayerChain:
    """Layers of one workspace, in the order of the model, as one call in steps of few tokens.

    The first one computes all; each other one, if called with what the one before it returned, has its result already,
    and else computes it anew. Called from one thread.
    """

    def __init__(self, layers: Sequence[FusedLayer], threads: int) -> None:
        self._layers = layers
        self._threads = threads
        count = len(layers)
        self._blocks = np.array([layer.blocks for layer in layers])
        for place, layer in enumerate(layers):
            layer.chain, layer.place = self, place
            layer.place_blocks(self._blocks[place])
        self._attention = np.zeros((count, a.FIELDS), dtype=np.int64)
        forms = [one.parts.form for one in layers]
        self._floats = np.array([[form.scaling, form.softcap or 0.0] for form in forms], dtype=np.float32)
        self._windows = np.array([form.window or 0 for form in forms])
        self._sinks = np.array([address_of(form.sinks) for form in forms])
        self._indices = np.array([one.parts.layer for one in layers])
        self._attention_at = self._attention.ctypes.data + self._attention.strides[0] * np.arange(count)
        self._floats_at = self._floats.ctypes.data + self._floats.strides[0] * np.arange(count)
        self._program: tuple[CpuBackend, Program] | None = None
        self._step: CpuStep | None = None
        self._rotation: Rotation = None
        self._results: tuple[Tensor, ...] = ()

    def result(self, place: int, x: Tensor, rotation: Rotation, step: CpuStep) -> Tensor | None:
        """Of the layer at `place`, called with `x` `[1, T, hidden]`; None if the layer must compute it itself."""
        if place == 0:
            self._run(x, rotation, step)
        elif self._step is not step or self._rotation is not rotation or self._results[place - 1] is not x:
            return None
        found = self._results[place]
        if place == len(self._layers) - 1:
            self._step, self._rotation, self._results = None, None, ()
        return found

    def _run(self, x: Tensor, rotation: Rotation, step: CpuStep) -> None:
        first = self._layers[0]
        buffers = first.workspace.of(x.shape[1])
        for layer in self._layers:
            layer.lay_out(buffers)
        step.lay_out(first.parts.layer, *first.heads, first.parts.form)
        attention = self._attention
        attention[:] = step.backend.block
        attention[:, a.SELF], attention[:, a.FLOATS] = self._attention_at, self._floats_at
        attention[:, a.LAYER], attention[:, a.WINDOW] = self._indices, self._windows
        attention[:, a.SINKS] = self._sinks
        count, blocks = len(self._layers), self._blocks
        results = torch.empty((count, *x.shape), dtype=x.dtype)
        outputs = results.data_ptr() + x.nbytes * np.arange(count)
        inputs = outputs - x.nbytes
        inputs[0] = x.data_ptr()
        blocks[:, :, c.SEAT : c.TICKET + 1] = 0
        blocks[:, 0, c.X] = blocks[:, -4, c.RESIDUAL] = inputs
        blocks[:, -1, c.OUT] = outputs
        if rotation is not None and first.parts.rotary is not None:
            cosines, sines = (part.contiguous() for part in rotation)
            blocks[:, 2, c.COSINES], blocks[:, 2, c.SINES] = cosines.data_ptr(), sines.data_ptr()
        if self._program is None or self._program[0] is not step.backend:
            operations: Operations = []
            for layer, at in zip(self._layers, self._attention_at.tolist(), strict=True):
                operations += layer.around([(entry, at) for entry, _ in step.backend.operations])
            self._program = step.backend, Program(operations, self._threads)
        self._program[1].run()
        self._step, self._rotation, self._results = step, rotation, results.unbind(0)
