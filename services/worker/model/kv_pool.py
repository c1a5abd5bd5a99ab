"""The tensor that holds K and V of all blocks: its layout, its size, and its blocks as bytes.

Block-major, `[blocks, layers, parts, kv_heads, block_size, head_dim]`: one block is one contiguous piece, so moving it
is one memcpy, one checksum, one socket write. The parts are K and V, or latents alone. A *run* is one part of one
(block, layer, head). Adapter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import KvShape
from kvcpu.vector.memory import PagesAhead, huge_pages
from kvcpu.vector.numbers import LEVELS
from kvfleet.worker.model.base import BlockMemory, host_memory
from kvproto.dataplane.block import kv_format
from kvproto.errors import OutOfMemory
from kvsampling.sampler import is_out_of_memory
from kvservice.host import free_bytes as host_bytes_free

CPU_SHARE, GPU_SHARE = 0.3, 0.9  # of the free memory, for KV
STATE_SHARE, STATES_PER_SLOT = 1 / 3, 4
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class KvPool:
    """`data` is zero at first. Quantized, its last two dimensions are one of bytes: int8 numbers
    `[block_size, head_dim]`, then fp32 scales `[block_size]`. Raises OutOfMemory if the device cannot hold it."""

    def __init__(self, shape: KvShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.run_bytes, self.block_bytes = shape.bytes_per_run(block_size), shape.bytes_per_block(block_size)
        inner = (self.run_bytes,) if shape.quantized else (block_size, shape.head_dim)
        size = (num_blocks, shape.layers, shape.parts, shape.kv_heads, *inner)
        dtype = torch.int8 if shape.quantized else shape.dtype
        try:
            if device.type == "cpu":  # pages that the system zeroes when they are first touched: gigabytes cost nothing
                self.data = huge_pages(num_blocks * self.block_bytes).view(dtype).view(size)
            else:
                self.data = torch.zeros(size, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            total = num_blocks * self.block_bytes / 2**30
            raise OutOfMemory(f"a KV pool of {num_blocks} blocks ({total:.2f} GiB): {error}") from error
        self._pages = PagesAhead(self.data) if device.type == "cpu" else None

    def reach(self, block: int) -> None:
        """Blocks up to this one are in use, and the next ones will be."""
        if self._pages is not None:
            self._pages.reach((block + 1) * self.block_bytes)

    def store(self, rows: Tensor, values: Tensor) -> None:
        """Write `values` `[n, head_dim]` to rows run * block_size + slot, runs counted in the order of `data`."""
        if not self.shape.quantized:
            self.data.view(-1, self.shape.head_dim).index_copy_(0, rows, values)
            return
        numbers, scales = self._quantized_runs()
        runs, slots = rows // self.block_size, rows % self.block_size
        values = values.float()
        scale = values.abs().amax(dim=-1) / LEVELS
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        numbers[runs, slots] = (values * inverse[:, None]).round().to(torch.int8)
        scales[runs, slots] = scale

    def gather(self, rows: Tensor) -> Tensor:
        """Runs `[n, block_size, head_dim]` in the model's own dtype, copied."""
        if not self.shape.quantized:
            shape = (-1, self.block_size * self.shape.head_dim)
            return self.data.view(shape).index_select(0, rows).view(-1, self.block_size, self.shape.head_dim)
        numbers, scales = self._quantized_runs()
        return (numbers[rows] * scales[rows][:, :, None]).to(self.shape.dtype)

    def _quantized_runs(self) -> tuple[Tensor, Tensor]:
        """Numbers `[runs, block_size, head_dim]` and scales `[runs, block_size]`, views."""
        runs = self.data.view(-1, self.run_bytes)
        border = self.block_size * self.shape.head_dim
        numbers = runs[:, :border].view(-1, self.block_size, self.shape.head_dim)
        return numbers, runs[:, border:].view(torch.float32)

    def difference(self, block: int, other: int) -> float:
        """Largest difference between two blocks' numbers, as a share of the largest; NaN counts as all of it."""
        difference, largest = self.spread(block, other)
        share = difference / largest if largest else 0.0
        return share if math.isfinite(share) else 1.0

    def spread(self, block: int, other: int) -> tuple[float, float]:
        """Largest difference between two blocks' numbers, and the largest number."""
        count = self.shape.layers * self.shape.parts * self.shape.kv_heads
        rows = torch.arange(count, device=self.device)
        one, two = (self.gather(rows + at * count).float() for at in (block, other))
        return float((one - two).abs().max()), float(torch.maximum(one.abs().max(), two.abs().max()))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), one after the other: a target may be a later source."""
        for source, target in copies:
            if source != target:
                self.data[target].copy_(self.data[source])

    def read(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` of one layer, copied to the host, in the model's own dtype; latents
        and their values."""
        shape = self.shape
        table = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        of_layer = torch.arange(shape.parts * shape.kv_heads, device=self.device)
        rows = ((table * shape.layers + layer) * len(of_layer))[:, None] + of_layer
        sizes = len(blocks), shape.parts, shape.kv_heads, self.block_size, shape.head_dim
        runs = self.gather(rows.reshape(-1)).view(sizes)
        kv = runs.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens].cpu()
        return kv[0].contiguous(), kv[-1, ..., : shape.value_dim].contiguous()


def free_bytes(device: torch.device) -> int:
    """Memory that may still be allocated: of the GPU, or of the host within this process's cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return host_bytes_free()


def share_of_free(asked: float | None, device: torch.device, workers_on_host: int) -> float:
    """Of the free memory, for KV. A GPU is one worker's alone; a host's memory is shared."""
    if device.type == "cpu":
        return (CPU_SHARE if asked is None else asked) / workers_on_host
    return GPU_SHARE if asked is None else asked


def blocks_that_fit(shape: KvShape, block_size: int, device: torch.device, share: float, step_bytes: int = 0) -> int:
    """Blocks that fit into `share` of the memory that the largest steps leave free. Raises OutOfMemory if none."""
    free = free_bytes(device)
    blocks = int((free - step_bytes) * share) // shape.bytes_per_block(block_size)
    if blocks < 1:
        step = f", less steps of {step_bytes / 2**30:.2f} GiB," if step_bytes else ""
        raise OutOfMemory(f"{share:.0%} of {free / 2**30:.2f} GiB free memory{step} holds no KV block")
    return blocks


def states_that_fit(state_bytes: int, memory: int, slots: int) -> int:
    """Recurrent states of running sequences and of snapshots, in STATE_SHARE of the memory for KV."""
    return min(STATES_PER_SLOT * slots, max(2, int(memory * STATE_SHARE) // state_bytes))


class PoolMemory(BlockMemory):
    """Of a pool that the host addresses."""

    def __init__(self, pool: KvPool) -> None:
        shape = pool.shape
        name = "int8" if shape.quantized else DTYPES[shape.dtype]
        self.block_bytes = pool.block_bytes
        sizes = shape.layers, shape.kv_heads, shape.head_dim
        self.kv_format = kv_format(*sizes, pool.block_size, name, latent=shape.latent)
        self.rows = (shape.layers * shape.parts * shape.kv_heads * pool.block_size, shape.head_dim, name)
        self._bytes = pool.data.view(pool.num_blocks, -1).view(torch.uint8)
        self._array: Any = self._bytes.numpy() if pool.device.type == "cpu" else None

    def host_memory(self, size: int) -> memoryview:
        return host_memory(size)

    def pin(self, memory: memoryview) -> None:
        """Have copies take the direct way from and to it, if there is one, as long as this object lives."""

    def view(self, block: int) -> memoryview | None:
        return memoryview(self._array[block])

    def read(self, block: int, target: memoryview) -> None:
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._array[block])

    def write(self, block: int, source: memoryview) -> None:
        np.copyto(self._array[block], np.frombuffer(source, dtype=np.uint8))

    def landed(self, blocks: Sequence[int]) -> None:
        """Nothing to do: `write` returns when its copy is made."""
