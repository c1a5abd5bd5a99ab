"""The `cpu` attention backend: a step's tables, made once, and one call into compiled code per layer.

Owns scratch memory and call block, which all steps reuse; the engine's thread alone calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kvcpu.attention import attention_call as c
from kvcpu.attention.attention_call import DECODE_BYTES, DECODE_CHUNK, PREFILL_CHUNK, record_floats, whole_lines
from kvcpu.attention.plan import TILE_ROWS, Items, cut
from kvcpu.blocks import STORED, AttentionForm, Batch, Pool
from kvcpu.vector import team
from kvcpu.vector.compiled import CompiledEntry, entry, multiplies_pairs
from kvcpu.vector.numbers import BFLOAT16, FLOAT32, INT8, LANES

SERIAL_TOKENS = 64  # up to here one thread stores K and V faster than a team is woken


class CpuBackend:
    """Attention by `threads` of torch's threads. Compiles, or loads, its kernels when it is made: seconds at most."""

    name: ClassVar[str] = "cpu"

    def __init__(self, threads: int | None = None) -> None:
        self.pairs = multiplies_pairs()
        self.threads = threads or torch.get_num_threads()
        self.store, self.attend, self.combine = (
            entry("kvcpu.attention.attention_kernels", name) for name in ("store_share", "attend_share", "combine_all")
        )
        self.block = np.zeros(c.FIELDS, dtype=np.int64)
        self.floats = np.zeros(2, dtype=np.float32)
        self.block[c.SELF] = self.address = self.block.ctypes.data
        self.block[c.FLOATS] = self.floats.ctypes.data
        self._scratch = torch.empty(0)
        self._partials = torch.empty(0)

    def prepare(self, batch: Batch, pool: Pool) -> CpuStep:
        return CpuStep(self, batch, pool)

    def reserve(self, group: int, padded: int, items: Items) -> None:
        rows = items.span * group
        record = record_floats(rows, padded)
        decode = record + rows * (padded + DECODE_CHUNK * 3 // 2) + LANES * padded
        rows = -(-max(TILE_ROWS, group) // 4) * 4
        prefill = 2 * whole_lines(rows) + rows * (2 * padded + PREFILL_CHUNK) + padded * (2 * PREFILL_CHUNK + 1)
        each = -(-max(decode, prefill) // 1024) * 1024
        if len(self._scratch) < each * self.threads:
            self._scratch = torch.empty(each * self.threads)  # torch's memory begins a cache line
        if len(self._partials) < items.partials * record:
            self._partials = torch.empty(items.partials * record)
        self.block[c.SCRATCH], self.block[c.SCRATCH_BYTES] = self._scratch.data_ptr(), 4 * each
        self.block[c.PARTIALS], self.block[c.SPAN] = self._partials.data_ptr(), items.span

    @property
    def operations(self) -> list[tuple[CompiledEntry, int]]:
        """What attends once the call block is laid out, in this order, each with the block's address."""
        return [(one, self.address) for one in (self.store, self.attend, self.combine)]


def address_of(sinks: Tensor | None) -> int:
    return 0 if sinks is None else sinks.data_ptr()


@dataclass(eq=False, slots=True)
class CpuStep:
    """See `AttentionStep`. Keeps the step's tables alive; the call block points into them."""

    backend: CpuBackend
    batch: Batch
    pool: Pool
    _heads: int = 0
    _items: Items | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        kept, wanted = self.pool.shape.dtype, query.dtype
        if not query.dtype is key.dtype is value.dtype is kept:
            query, key, value = query.to(kept), key.to(kept), value.to(kept)
        if not query.stride(2) == key.stride(2) == value.stride(2) == 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = query.new_empty(*query.shape[:2], self.pool.shape.value_dim)
        self.lay_out(layer, query, key, value, out, form)
        backend = self.backend
        storing = 1 if query.shape[0] <= SERIAL_TOKENS else backend.threads
        team.run(backend.store.address, backend.address, storing)
        team.run(backend.attend.address, backend.address, backend.threads)
        if backend.block[c.SPLITS]:
            team.run(backend.combine.address, backend.address, 1)
        return out.to(wanted)

    def lay_out(self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, form: AttentionForm) -> None:
        """Point the call block at these tensors, which must live until the operations ran. They have the pool's dtype
        and a contiguous last dimension; `out` is contiguous as a whole."""
        if query.shape[1] != self._heads:
            self._begin(query)
        backend, block = self.backend, self.backend.block
        block[c.STORE_SEAT : c.COMBINE_TICKET + 1] = 0
        block[c.LAYER] = layer
        block[c.WINDOW] = form.window or 0
        backend.floats[0], backend.floats[1] = form.scaling, form.softcap or 0.0
        block[c.SINKS] = address_of(form.sinks)
        of_query = query.data_ptr(), *query.stride()[:2], STORED[query.dtype]
        of_key, of_value = (key.data_ptr(), *key.stride()[:2]), (value.data_ptr(), *value.stride()[:2])
        block[c.QUERY : c.OUT + 1] = *of_query, *of_key, *of_value, out.data_ptr()

    def _begin(self, query: Tensor) -> None:
        """Tables of the step, when the first layer tells how many heads there are."""
        pool, batch, backend = self.pool, self.batch, self.backend
        shape, block = pool.shape, backend.block
        heads, dim = query.shape[1], query.shape[2]
        group = heads // shape.kv_heads
        read = DECODE_CHUNK * pool.run_bytes // pool.block_size  # of one head in a chunk
        items = cut(batch, shape.kv_heads, group, backend.threads, max(1, DECODE_BYTES // read))
        padded = -(-dim // LANES) * LANES
        backend.reserve(group, padded, items)
        kind = INT8 if shape.quantized else STORED[shape.dtype]
        block[c.TOKENS] = len(batch.ids)
        block[c.ITEMS], block[c.ITEM_TABLE] = len(items.items), items.items.ctypes.data
        block[c.SLICES], block[c.TABLES] = items.slices.ctypes.data, batch.tables.ctypes.data
        block[c.SLOTS] = batch.slots.ctypes.data
        block[c.SPLITS], block[c.SPLIT_TABLE] = len(items.splits), items.splits.ctypes.data
        block[c.POOL], block[c.RUN_BYTES] = pool.data.data_ptr(), pool.run_bytes
        block[c.LAYERS], block[c.BLOCK_SIZE], block[c.KV_KIND] = shape.layers, pool.block_size, kind
        size = pool.block_size
        block[c.BLOCK_SHIFT] = size.bit_length() - 1 if size & (size - 1) == 0 else -1
        block[c.TILED] = size % LANES == 0
        block[c.DIRECT] = kind == FLOAT32 and dim == padded and size % LANES == 0
        halves = kind == STORED[query.dtype] == BFLOAT16
        block[c.PAIRS] = backend.pairs and halves and dim % (2 * LANES) == 0 and size % LANES == 0
        block[c.HEADS], block[c.KV_HEADS], block[c.GROUP] = heads, shape.kv_heads, group
        block[c.HEAD_DIM], block[c.PADDED] = dim, padded
        block[c.PARTS], block[c.VALUE_DIM] = shape.parts, shape.value_dim
        self._heads = heads
        self._items = items
