"""The tensor that holds K and V of all blocks, and how large it may be. Owns layout and bytes, not who uses a block.

Block-major, `[blocks, layers, 2, kv_heads, block_size, head_dim]`: one block is one contiguous piece, so moving it is
one memcpy, one checksum, one socket write. Kernels want rows instead, so two flat views of the same bytes are offered:
runs of one (block, layer, K or V, head), and single tokens of such a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvproto.errors import OutOfMemory
from services.worker.model.vector.memory import huge_pages

_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory", "CUDA out of memory")


@dataclass(frozen=True, slots=True)
class KvShape:
    """What the model stores per token."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        return self.layers * 2 * self.kv_heads * block_size * self.head_dim * self.dtype.itemsize


class KvPool:
    """`data` is zero at first, so that no slot ever holds anything but numbers a model wrote.

    Raises OutOfMemory if the device cannot hold it.
    """

    def __init__(self, shape: KvShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.kind = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}[shape.dtype]
        size = (num_blocks, shape.layers, 2, shape.kv_heads, block_size, shape.head_dim)
        try:
            self.data = _zeros(size, shape.dtype, device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            total = num_blocks * shape.bytes_per_block(block_size)
            raise OutOfMemory(f"a KV pool of {num_blocks} blocks ({total / 2**30:.2f} GiB): {error}") from error

    kind = 0

    @property
    def run_bytes(self):
        return self.block_size * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def runs(self) -> Tensor:
        """`[blocks * layers * 2 * kv_heads, block_size * head_dim]`, a view."""
        return self.data.view(-1, self.block_size * self.shape.head_dim)

    @property
    def tokens(self) -> Tensor:
        """`[blocks * layers * 2 * kv_heads * block_size, head_dim]`, a view."""
        return self.data.view(-1, self.shape.head_dim)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target), one after the other: a target may be a later source."""
        for source, target in copies:
            if source != target:
                self.data[target].copy_(self.data[source])

    def read(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V `[tokens, kv_heads, head_dim]` of one layer, copied to the host."""
        table = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        kv = self.data[table, layer].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens].cpu()
        return kv[0].contiguous(), kv[1].contiguous()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch tells for CUDA by type, for the host only in words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU pages that the system zeroes when they are first touched, so gigabytes cost nothing at start."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return huge_pages(math.prod(size) * dtype.itemsize).view(dtype).view(size)


def free_bytes(device: torch.device) -> int:
    """Memory that may still be allocated: of the GPU, or of the host within this process's cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    cgroup = Path("/sys/fs/cgroup")
    limit, used = _lines(cgroup / "memory.max"), _lines(cgroup / "memory.current")
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return max(free, 0)


def blocks_that_fit(shape: KvShape, block_size: int, device: torch.device, fraction: float) -> int:
    """How many blocks `fraction` of the free memory holds. Raises OutOfMemory if that is none."""
    free = free_bytes(device)
    blocks = int(free * fraction) // shape.bytes_per_block(block_size)
    if blocks < 1:
        raise OutOfMemory(f"{fraction:.0%} of {free / 2**30:.2f} GiB free memory holds no KV block")
    return blocks


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
