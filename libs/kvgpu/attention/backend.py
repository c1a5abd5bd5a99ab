"""The `triton` attention backend: a step's tables in one copy, and two or three launches per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import AttentionForm, Batch, Pool
from kvgpu.attention import kernels
from kvgpu.attention.plan import ITEM_FIELDS, MERGE_FIELDS, HeadTiles, Table, cut
from kvgpu.triton_language import INTERPRETED, triton

INTERPRETED_MULTIPROCESSORS = 4  # of a dry run: enough that long sequences are cut
WIDE = 128  # numbers of a head from which on a tile has fewer keys


class TritonBackend:
    """Attention on `device`; without a GPU by Triton's interpreter, which takes milliseconds for what a GPU does in
    microseconds."""

    name: ClassVar[str] = "triton"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.multiprocessors = INTERPRETED_MULTIPROCESSORS
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(self, batch: Batch, pool: Pool) -> TritonStep:
        return TritonStep(self, batch, pool)


@dataclass(frozen=True, slots=True)
class TablesOnDevice:
    """A step's tables there. `rows`: of a tile."""

    rows: int
    items: Tensor
    merges: Tensor
    tables: Tensor
    slots: Tensor
    sums: Tensor
    tops: Tensor


@dataclass(eq=False, slots=True)
class TritonStep:
    """See `AttentionStep`. Tables for so many heads may be given; else they are made of the batch."""

    backend: TritonBackend
    batch: Batch | None
    pool: Pool
    tables: TablesOnDevice | None = None
    heads: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        shape, wanted = self.pool.shape, query.dtype
        query, key, value = (_ready(one, shape.dtype) for one in (query, key, value))
        tokens, heads, _ = query.shape
        if self.tables is None or heads != self.heads:
            self.tables, self.heads = self._moved(heads), heads
        on, by, data = self.tables, HeadTiles.of(shape, heads), self.pool.data
        scales = data.view(-1).view(torch.float32) if shape.quantized else data
        run = self.pool.run_bytes // data.element_size()
        of_layer = shape.parts * shape.kv_heads * run
        layout = layer * of_layer, shape.layers * of_layer, run, shape.kv_heads
        sizes, group = {"DIM": shape.value_dim, "PADDED": by.padded}, {"ROWS": on.rows, "GROUP": by.group}
        block = {"BLOCK": self.pool.block_size, "QUANTIZED": shape.quantized, "PARTS": shape.parts}
        kernels.store[tokens, shape.kv_heads](
            key, value, on.slots, data, scales, *key.stride()[:2], *value.stride()[:2], *layout,
            DIM=shape.head_dim, PADDED=triton.next_power_of_2(shape.head_dim), **block,
        )  # fmt: skip
        out = torch.empty(tokens, heads, shape.value_dim, dtype=query.dtype, device=query.device)
        kernels.attend[len(on.items), by.count](
            out, query, data, scales, on.items, on.tables, on.sums, on.tops,
            on.tops if form.sinks is None else form.sinks,
            form.scaling, form.softcap or 0.0, form.window or 0, *query.stride()[:2], out.stride(0), *layout,
            CAPPED=form.softcap is not None, SINKS=form.sinks is not None, SHARE=by.share,
            TAIL=shape.head_dim - shape.value_dim, TAIL_PADDED=by.tail_padded,
            WIDENED=INTERPRETED and query.dtype is torch.bfloat16,
            **group, **sizes, **block, **_launch(on.rows, by.padded, query.element_size()),
        )  # fmt: skip
        if len(on.merges):
            kernels.combine[len(on.merges), by.count](
                out, on.merges, on.sums, on.tops, out.stride(0), by.count, **group, **sizes
            )
        return out.to(wanted)

    def _moved(self, heads: int) -> TablesOnDevice:
        batch, by = self.batch, HeadTiles.of(self.pool.shape, heads)
        if batch is None:
            raise ValueError(f"{heads} heads, where the tables are for {self.heads}")
        tiles = cut(batch, by.count, by.group, self.backend.multiprocessors, by.prefill_rows)
        parts: list[Table] = [
            tiles.items.reshape(-1), tiles.merges.reshape(-1), batch.tables.astype(np.int32),
            batch.slots.astype(np.int32),
        ]  # fmt: skip
        host = torch.from_numpy(np.concatenate(parts))
        device = self.backend.device
        if device.type == "cuda":
            host = host.pin_memory()
        items, merges, tables, slots = host.to(device, non_blocking=True).split_with_sizes([len(one) for one in parts])
        return TablesOnDevice(
            tiles.rows, items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS), tables, slots,
            *partial_results(by, tiles.partials, tiles.rows, device),
        )  # fmt: skip


def partial_results(by: HeadTiles, partials: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`sums` and `tops`: see `kernels.attend`."""
    size = partials * by.count, rows
    sums = torch.empty(*size, by.padded, dtype=torch.float32, device=device)
    return sums, torch.empty(*size, 2, dtype=torch.float32, device=device)


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the pool's numbers, each row without gaps."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch(rows: int, padded: int, number_bytes: int) -> dict[str, Any]:
    """How a tile of so many rows is computed: what fits into a multiprocessor's registers and shared memory."""
    if padded > 2 * WIDE:
        return {"KEYS": 64 // number_bytes, "num_warps": 8, "num_stages": 2}
    many = rows >= 64
    keys = 32 if padded > WIDE else 64
    return {"KEYS": keys, "num_warps": 8 if many and padded > WIDE else 4, "num_stages": 2 if many else 3}
