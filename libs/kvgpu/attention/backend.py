"""The `triton` attention backend: a step's tables in one copy, and two or three launches per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import AttentionForm, Batch, KvShape, Pool
from kvgpu.attention import kernels
from kvgpu.attention.plan import ITEM_FIELDS, MERGE_FIELDS, Table, cut
from kvgpu.triton_language import INTERPRETED

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
        tokens, heads, dim = query.shape
        if self.tables is None or heads != self.heads:
            self.tables, self.heads = self._moved(heads), heads
        on, group = self.tables, heads // shape.kv_heads
        padded, data = on.sums.shape[-1], self.pool.data
        scales = data.view(-1).view(torch.float32) if shape.quantized else data
        run = self.pool.run_bytes // data.element_size()
        layout = layer * 2 * shape.kv_heads * run, shape.layers * 2 * shape.kv_heads * run, run, shape.kv_heads
        sizes = {"DIM": dim, "PADDED": padded}
        block = {"BLOCK": self.pool.block_size, "QUANTIZED": shape.quantized}
        kernels.store[tokens, shape.kv_heads](
            key, value, on.slots, data, scales, *key.stride()[:2], *value.stride()[:2], *layout, **sizes, **block
        )
        out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
        kernels.attend[len(on.items), shape.kv_heads](
            out, query, data, scales, on.items, on.tables, on.sums, on.tops,
            on.tops if form.sinks is None else form.sinks,
            form.scaling, form.softcap or 0.0, form.window or 0, *query.stride()[:2], out.stride(0), *layout,
            ROWS=on.rows, GROUP=group, CAPPED=form.softcap is not None, SINKS=form.sinks is not None,
            WIDENED=INTERPRETED and query.dtype is torch.bfloat16, **sizes, **block, **_launch(on.rows, padded),
        )  # fmt: skip
        if len(on.merges):
            kernels.combine[len(on.merges), shape.kv_heads](
                out, on.merges, on.sums, on.tops, out.stride(0), shape.kv_heads, ROWS=on.rows, GROUP=group, **sizes
            )
        return out.to(wanted)

    def _moved(self, heads: int) -> TablesOnDevice:
        shape, batch = self.pool.shape, self.batch
        if batch is None:
            raise ValueError(f"{heads} heads, where the tables are for {self.heads}")
        tiles = cut(batch, shape.kv_heads, heads // shape.kv_heads, self.backend.multiprocessors)
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
            *partial_results(shape, tiles.partials, tiles.rows, device),
        )  # fmt: skip


def partial_results(shape: KvShape, partials: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`sums` and `tops`: see `kernels.attend`."""
    padded = max(16, 1 << (shape.head_dim - 1).bit_length())
    size = partials * shape.kv_heads, rows
    sums = torch.empty(*size, padded, dtype=torch.float32, device=device)
    return sums, torch.empty(*size, 2, dtype=torch.float32, device=device)


def _ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In the pool's numbers, each row without gaps."""
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch(rows: int, padded: int) -> dict[str, Any]:
    """How a tile of so many rows is computed: what fits into a multiprocessor's registers and shared memory."""
    many = rows >= 64
    keys = 32 if padded > WIDE else 64
    return {"KEYS": keys, "num_warps": 8 if many and padded > WIDE else 4, "num_stages": 2 if many else 3}
