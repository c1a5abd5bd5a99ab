"""Layers that follow one another as one compiled call, in steps of few tokens.

The first of them computes all; each of the others, if it is called with just what the one before it returned, has its
result already. Called in another order, a layer computes its own result anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvcpu.attention import attention_call as a
from kvcpu.attention.backend import CpuBackend, CpuStep
from kvcpu.fused import fused_call as f
from kvcpu.linear import linear_call as c
from kvcpu.vector.program import Program
from kvfleet.worker.model.fused.layer import Buffers, FusedLayer, Rotation

MOST_TOKENS = 64  # beyond, Python does not show, and results of all layers take memory


class LayerChain:
    """Layers of one make and one workspace, in the order of the model: their `Together`. Called from one thread."""

    most_tokens = MOST_TOKENS

    def __init__(self, layers: Sequence[FusedLayer], threads: int) -> None:
        self._layers = layers
        self._threads = threads
        count = len(layers)
        self._blocks = np.zeros((count, *layers[0].blocks.shape), dtype=np.int64)
        self._attention = np.zeros((count, a.FIELDS), dtype=np.int64)
        self._floats = np.array([[one.form.scaling, one.form.softcap or 0.0] for one in layers], dtype=np.float32)
        self._indices = np.array([one.index for one in layers])
        self._windows = np.array([one.form.window or 0 for one in layers])
        width = self._attention.strides[0]
        self._attention_at = self._attention.ctypes.data + width * np.arange(count)
        self._floats_at = self._floats.ctypes.data + self._floats.strides[0] * np.arange(count)
        self._program: tuple[CpuBackend, Program] | None = None
        self._buffers: Buffers | None = None
        self._step: CpuStep | None = None
        self._rotation: Rotation = None
        self._results: tuple[Tensor, ...] = ()

    def result(self, place: int, x: Tensor, rotation: Rotation, step: CpuStep) -> Tensor | None:
        """Of the layer at `place`, called with `x` `[1, T, hidden]`; None if it has to compute that itself."""
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
        if buffers is not self._buffers:
            self._lay_out(buffers)
        step.lay_out(first.index, *first.heads, first.form)
        attention = self._attention
        attention[:] = step.backend.block
        attention[:, a.SELF], attention[:, a.FLOATS] = self._attention_at, self._floats_at
        attention[:, a.LAYER], attention[:, a.WINDOW] = self._indices, self._windows
        count, blocks = len(self._layers), self._blocks
        results = torch.empty((count, *x.shape), dtype=x.dtype)
        outputs = results.data_ptr() + x.nbytes * np.arange(count)
        inputs = outputs - x.nbytes
        inputs[0] = x.data_ptr()
        blocks[:, :, c.SEAT : c.TICKET + 1] = 0
        blocks[:, 0, f.X] = blocks[:, -4, c.RESIDUAL] = inputs
        blocks[:, -1, c.OUT] = outputs
        if rotation is not None and first.rotates:
            cosines, sines = (part.contiguous() for part in rotation)
            blocks[:, 2, f.COSINES], blocks[:, 2, f.SINES] = cosines.data_ptr(), sines.data_ptr()
        self._with(step.backend).run()
        self._step, self._rotation, self._results = step, rotation, results.unbind(0)

    def _lay_out(self, buffers: Buffers) -> None:
        size = self._blocks.strides[1]
        for at, layer in enumerate(self._layers):
            layer.lay_out(buffers)
            blocks = self._blocks[at]
            blocks[:] = layer.blocks
            blocks[:, c.SELF] = blocks.ctypes.data + size * np.arange(len(blocks))
        self._buffers = buffers

    def _with(self, backend: CpuBackend) -> Program:
        if self._program is None or self._program[0] is not backend:
            operations = []
            size = self._blocks.strides[1]
            for layer, blocks, attention in zip(self._layers, self._blocks, self._attention_at.tolist(), strict=True):
                at = [blocks.ctypes.data + size * row for row in range(len(blocks))]
                own = list(zip(layer.entries, at, strict=True))
                attending = [(entry, attention) for entry, _ in backend.operations]
                operations += [*own[:-4], *attending, *own[-4:]]
            self._program = backend, Program(operations, self._threads)
        return self._program[1]
