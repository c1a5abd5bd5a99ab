"""Attention with plain torch operators on any device: the oracle for the other backends, not a fast one.

A prompt chunk gathers its sequence's blocks and calls scaled_dot_product_attention; sequences that decode are grouped
by similar length, gathered together and attended in one call per group. Masked slots are set to zero after gathering:
a masked NaN would still spoil a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.model.attention.base import AttentionForm
from services.worker.model.batch import RaggedBatch
from services.worker.model.kv_pool import KvPool
from services.worker.step_plan import Slice

PADDING = 1.25  # a group of decodes gathers at most this many times the blocks it needs
GATHERED_TOKENS = 65_536  # of a group at most, to bound the copy


class ReferenceBackend:
    name: ClassVar[str] = "reference"

    def prepare(self, batch: RaggedBatch, pool: KvPool) -> ReferenceStep:
        return ReferenceStep(batch, pool)


class ReferenceStep:
    """Index tensors of one step, made once; layers differ by an offset into the pool's rows."""

    def __init__(self, batch: RaggedBatch, pool: KvPool) -> None:
        self._pool = pool
        self._layer_runs = 2 * pool.shape.kv_heads
        self._write = self._token_rows(batch.slots)
        chunks, decodes = [], []
        for first, part in zip(batch.first, batch.slices, strict=True):
            if len(part.ids) > 1:
                chunks.append(_Chunk(first, part, self))
            else:
                decodes.append((first, part))
        self._parts: list[_Chunk | _Decodes] = [*chunks, *(_Decodes(g, self) for g in self._groups(decodes))]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        size = self._pool.block_size
        rows = torch.stack((key, value), dim=1).reshape(-1, key.shape[-1])
        self._pool.store(self._write + layer * self._layer_runs * size, rows)
        out = torch.empty_like(query)
        for part in self._parts:
            part.attend(self, layer, query, out, form)
        return out

    def gather(self, rows: Tensor, layer: int, sequences: int) -> Tensor:
        """K and V `[2, sequences, kv_heads, tokens, head_dim]` of the blocks that `rows` names, a fresh copy."""
        shape = self._pool.shape
        runs = self._pool.gather(rows + layer * self._layer_runs)
        return runs.view(2, sequences, shape.kv_heads, -1, shape.head_dim)

    def run_rows(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Rows of `KvPool.gather` in layer 0 for equally long block tables, ordered [2, sequence, kv_head, block]."""
        shape = self._pool.shape
        table = np.array(tables, dtype=np.int64)
        kv = np.arange(2).reshape(2, 1, 1, 1)
        head = np.arange(shape.kv_heads).reshape(1, 1, -1, 1)
        rows = ((table * shape.layers * 2)[None, :, None, :] + kv) * shape.kv_heads + head
        return self.move(rows.reshape(-1))

    def move(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self._pool.device)

    def blocks_of(self, part: Slice) -> Sequence[int]:
        return part.blocks[: -(-part.end // self._pool.block_size)]

    def _token_rows(self, slots: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        """Rows of `KvPool.store` in layer 0 where K and V of each slot go, ordered [T, 2, kv_head]."""
        shape, size = self._pool.shape, self._pool.block_size
        run = (slots // size * shape.layers * 2)[:, None, None] + np.arange(2)[None, :, None]
        run = run * shape.kv_heads + np.arange(shape.kv_heads)[None, None, :]
        return self.move((run * size + (slots % size)[:, None, None]).reshape(-1))

    def _groups(self, decodes: list[tuple[int, Slice]]) -> list[list[tuple[int, Slice]]]:
        """Decodes of similar length together."""
        groups: list[list[tuple[int, Slice]]] = []
        needed = 0
        for first, part in sorted(decodes, key=lambda decode: -decode[1].end):
            blocks = len(self.blocks_of(part))
            if groups:
                longest = len(self.blocks_of(groups[-1][0][1]))
                gathered = longest * (len(groups[-1]) + 1)
                if gathered <= PADDING * (needed + blocks) and gathered * self._pool.block_size <= GATHERED_TOKENS:
                    groups[-1].append((first, part))
                    needed += blocks
                    continue
            groups.append([(first, part)])
            needed = blocks
        return groups


class _Chunk:
    """Several tokens of one sequence, after `start` cached ones."""

    def __init__(self, first: int, part: Slice, step: ReferenceStep) -> None:
        self._rows = step.run_rows([step.blocks_of(part)])
        self._tokens = slice(first, first + len(part.ids))
        self._end = part.end
        self._mask: Tensor | None = None
        if part.start:
            reach = torch.arange(part.start, part.end, device=self._rows.device)[:, None]
            self._mask = torch.arange(part.end, device=self._rows.device)[None, :] <= reach

    def attend(self, step: ReferenceStep, layer: int, query: Tensor, out: Tensor, form: AttentionForm) -> None:
        kv = step.gather(self._rows, layer, 1)[:, 0, :, : self._end]  # [2, kv_heads, end, head_dim]
        heads, kv_heads = query.shape[1], kv.shape[1]
        chunk = query[self._tokens].transpose(0, 1)
        grouped = chunk.reshape(kv_heads, heads // kv_heads, *chunk.shape[1:])
        keys, values = kv.unsqueeze(2).expand(-1, -1, heads // kv_heads, -1, -1)
        done = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=self._mask, is_causal=self._mask is None, scale=form.scaling
        )
        out[self._tokens] = done.flatten(0, 1).transpose(0, 1)


class _Decodes:
    """One token each of several sequences of similar length, padded to the longest."""

    def __init__(self, group: list[tuple[int, Slice]], step: ReferenceStep) -> None:
        tables = [list(step.blocks_of(part)) for _, part in group]
        longest = len(tables[0])
        self._rows = step.run_rows([table + [table[-1]] * (longest - len(table)) for table in tables])
        self._tokens = step.move(np.array([first for first, _ in group], dtype=np.int64))
        self._longest = group[0][1].end
        lengths = step.move(np.array([part.end for _, part in group], dtype=np.int64))
        valid = torch.arange(self._longest, device=lengths.device)[None, :] < lengths[:, None]
        self._mask: Tensor | None = None
        if any(part.end != self._longest for _, part in group):
            self._mask = valid[:, None, None, :]
            self._masked = (~valid).nonzero(as_tuple=True)

    def attend(self, step: ReferenceStep, layer: int, query: Tensor, out: Tensor, form: AttentionForm) -> None:
        count = len(self._tokens)
        kv = step.gather(self._rows, layer, count)[:, :, :, : self._longest]
        if self._mask is not None:
            sequences, positions = self._masked
            kv.permute(1, 3, 0, 2, 4)[sequences, positions] = 0
        kv_heads = kv.shape[2]
        grouped = query[self._tokens].view(count, kv_heads, -1, query.shape[-1])
        done = scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=self._mask, scale=form.scaling)
        out[self._tokens] = done.flatten(1, 2)
