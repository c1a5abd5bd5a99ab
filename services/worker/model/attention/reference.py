"""Attention with plain torch operators on any device: the oracle for the other backends, not a fast one.

A prompt chunk gathers its sequence's blocks and calls scaled_dot_product_attention; decodes of similar length share one
call. Only blocks within the window are gathered, as earlier ones may be gone (-1). Slots of a gathered block that hold
no token in reach are cut off or set to zero: a masked NaN would still spoil a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvcpu.blocks import AttentionForm, Ints
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice

PADDING = 1.25  # a group of decodes gathers at most this many times the blocks it needs
GATHERED_TOKENS = 65_536  # of a group at most, to bound the copy


class ReferenceBackend:
    name: ClassVar[str] = "reference"

    def prepare(self, batch: RaggedBatch, pool: KvPool) -> ReferenceStep:
        return ReferenceStep(batch, pool)


@dataclass(frozen=True, slots=True)
class _Reach:
    """What the tokens of one slice see: tokens [low, end) of their sequence.

    blocks:  |..........|..........|..........|
             ^- skip -^ low              end ^      seen = skip + end - low
    """

    first: int  # flat index of the slice's first token
    part: Slice
    low: int
    skip: int
    seen: int
    blocks: list[int]

    @classmethod
    def of(cls, first: int, part: Slice, window: int | None, block_size: int) -> _Reach:
        low = 0 if window is None else max(0, part.start + 1 - window)
        lowest = low // block_size
        skip = low - lowest * block_size
        blocks = list(part.blocks[lowest : -(-part.end // block_size)])
        return cls(first, part, low, skip, skip + part.end - low, blocks)


class ReferenceStep:
    """Index tensors of one step, made once for each window; layers differ by an offset into the pool's rows."""

    def __init__(self, batch: RaggedBatch, pool: KvPool) -> None:
        self._pool = pool
        self._layer_runs = pool.shape.parts * pool.shape.kv_heads
        shape, size, slots = pool.shape, pool.block_size, batch.slots[:, None, None]
        parts, heads = np.arange(shape.parts)[:, None], np.arange(shape.kv_heads)
        runs = (slots // size * shape.layers * shape.parts + parts) * shape.kv_heads + heads
        self._write = self.move((runs * size + slots % size).reshape(-1))  # of `KvPool.store`, [T, part, kv_head]
        self._slices = list(zip(batch.first.tolist(), batch.slices, strict=True))
        self._longest = max((part.end for part in batch.slices), default=0)
        self._parts: dict[int | None, list[_Chunk | _Decodes]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        size, shape = self._pool.block_size, self._pool.shape
        rows = key if shape.latent else torch.stack((key, value), dim=1)
        self._pool.store(self._write + layer * self._layer_runs * size, rows.reshape(-1, key.shape[-1]))
        out = query.new_empty(*query.shape[:2], shape.value_dim)
        for part in self._parts_within(form.window):
            part.attend(self, layer, query, out, form)
        return out

    def gather(self, rows: Tensor, layer: int, sequences: int) -> Tensor:
        """The parts `[parts, sequences, kv_heads, tokens, head_dim]` of the runs in `rows`, copied."""
        shape = self._pool.shape
        runs = self._pool.gather(rows + layer * self._layer_runs)
        return runs.view(shape.parts, sequences, shape.kv_heads, -1, shape.head_dim)

    def key_and_value(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., head_dim]` each, of `[parts, ..., head_dim]`."""
        return parts[0], parts[-1, ..., : self._pool.shape.value_dim]

    def run_rows(self, tables: Sequence[Sequence[int]]) -> Tensor:
        """Rows of `KvPool.gather` in layer 0 for equally long block tables, by [part, sequence, kv_head, block]."""
        shape = self._pool.shape
        table = np.array(tables, dtype=np.int64)[:, None, :]
        parts = np.arange(shape.parts).reshape(-1, 1, 1, 1)
        rows = (table * shape.layers * shape.parts + parts) * shape.kv_heads + np.arange(shape.kv_heads)[:, None]
        return self.move(rows.reshape(-1))

    def move(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._pool.device)

    def _parts_within(self, window: int | None) -> list[_Chunk | _Decodes]:
        if window is not None and window >= self._longest:
            window = None
        if window not in self._parts:
            reaches = [_Reach.of(first, part, window, self._pool.block_size) for first, part in self._slices]
            chunks = [_Chunk(reach, window, self) for reach in reaches if len(reach.part.ids) > 1]
            decodes = self._groups([reach for reach in reaches if len(reach.part.ids) == 1])
            self._parts[window] = [*chunks, *(_Decodes(group, self) for group in decodes)]
        return self._parts[window]

    def _groups(self, decodes: list[_Reach]) -> list[list[_Reach]]:
        """Decodes that see similarly much together, the most first."""
        groups: list[list[_Reach]] = []
        needed = 0
        for reach in sorted(decodes, key=lambda decode: -decode.seen):
            blocks = len(reach.blocks)
            if groups:
                gathered = len(groups[-1][0].blocks) * (len(groups[-1]) + 1)
                if gathered <= PADDING * (needed + blocks) and gathered * self._pool.block_size <= GATHERED_TOKENS:
                    groups[-1].append(reach)
                    needed += blocks
                    continue
            groups.append([reach])
            needed = blocks
        return groups


class _Chunk:
    """Several tokens of one sequence, after `start` cached ones."""

    def __init__(self, reach: _Reach, window: int | None, step: ReferenceStep) -> None:
        part = reach.part
        self._rows = step.run_rows([reach.blocks])
        self._tokens = slice(reach.first, reach.first + len(part.ids))
        self._slots = slice(reach.skip, reach.seen)
        keys = torch.arange(reach.low, part.end, device=self._rows.device)[None, :]
        queries = torch.arange(part.start, part.end, device=self._rows.device)[:, None]
        self._causal = window is None and part.start == 0
        self._mask = keys <= queries
        if window is not None:
            self._mask &= keys > queries - window

    def attend(self, step: ReferenceStep, layer: int, query: Tensor, out: Tensor, form: AttentionForm) -> None:
        key, value = step.key_and_value(step.gather(self._rows, layer, 1)[:, 0, :, self._slots])
        heads, kv_heads = query.shape[1], len(key)  # of which each has `[tokens, head_dim]`
        chunk = query[self._tokens].transpose(0, 1)
        grouped = chunk.reshape(kv_heads, heads // kv_heads, *chunk.shape[1:])
        if form.softcap is None and form.sinks is None:
            keys, values = (one.unsqueeze(1).expand(-1, heads // kv_heads, -1, -1) for one in (key, value))
            mask = None if self._causal else self._mask
            done = scaled_dot_product_attention(
                grouped, keys, values, attn_mask=mask, is_causal=self._causal, scale=form.scaling
            )
        else:  # one KV head at a time, to bound the scores
            sinks = [None] * kv_heads if form.sinks is None else form.sinks.view(kv_heads, -1, 1, 1)
            each = zip(grouped, key, value, sinks, strict=True)
            done = torch.stack([_written_out(g, k, v, self._mask, form, own) for g, k, v, own in each])
        out[self._tokens] = done.flatten(0, 1).transpose(0, 1)


class _Decodes:
    """One token each of several sequences that see similarly much, padded to the one that sees most."""

    def __init__(self, group: list[_Reach], step: ReferenceStep) -> None:
        most = len(group[0].blocks)
        self._rows = step.run_rows([r.blocks + [r.blocks[-1]] * (most - len(r.blocks)) for r in group])
        self._tokens = step.move(np.array([r.first for r in group], dtype=np.int64))
        self._seen = group[0].seen
        skips, seen = step.move(np.array([[r.skip for r in group], [r.seen for r in group]], dtype=np.int64))
        slots = torch.arange(self._seen, device=seen.device)[None, :]
        valid = (slots >= skips[:, None]) & (slots < seen[:, None])
        self._mask: Tensor | None = None
        if any(r.skip or r.seen != self._seen for r in group):
            self._mask = valid[:, None, None, :]
            self._masked = (~valid).nonzero(as_tuple=True)

    def attend(self, step: ReferenceStep, layer: int, query: Tensor, out: Tensor, form: AttentionForm) -> None:
        count = len(self._tokens)
        kv = step.gather(self._rows, layer, count)[:, :, :, : self._seen]
        if self._mask is not None:
            sequences, slots = self._masked
            kv.permute(1, 3, 0, 2, 4)[sequences, slots] = 0
        key, value = step.key_and_value(kv)
        kv_heads = key.shape[1]
        grouped = query[self._tokens].view(count, kv_heads, -1, query.shape[-1])
        if form.softcap is None and form.sinks is None:
            done = scaled_dot_product_attention(grouped, key, value, attn_mask=self._mask, scale=form.scaling)
        else:
            sinks = None if form.sinks is None else form.sinks.view(kv_heads, -1, 1)
            done = _written_out(grouped, key, value, self._mask, form, sinks)
        out[self._tokens] = done.flatten(1, 2)


def _written_out(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, form: AttentionForm, sinks: Tensor | None
) -> Tensor:
    """What scaled_dot_product_attention lacks: soft-capped scores, and sinks, as `[..., heads, 1]` or
    `[heads, 1, 1]`. Scores and weights are fp32."""
    scores = (query.float() @ keys.float().transpose(-2, -1)).mul_(form.scaling)
    if form.softcap is not None:
        scores = scores.div_(form.softcap).tanh_().mul_(form.softcap)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return (scores.softmax(dim=-1)[..., : keys.shape[-2]] @ values.float()).to(values.dtype)
