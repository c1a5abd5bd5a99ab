"""Whole blocks of a KvPool as bytes, and host memory for them. See `kvfleet.worker.model.base.BlockMemory`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvfleet.worker.model.base import host_memory
from kvfleet.worker.model.copy_stream import CopyStream, pinned_memory
from kvfleet.worker.model.kv_pool import KvPool
from kvproto.dataplane.block import kv_format

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PoolMemory:
    """With a `stream`, as a GPU has, copies run on it, and the caller waits for its own."""

    def __init__(self, pool: KvPool, stream: CopyStream | None) -> None:
        shape = pool.shape
        name = "int8" if shape.quantized else DTYPES[shape.dtype]
        self.block_bytes = shape.bytes_per_block(pool.block_size)
        self.kv_format = kv_format(shape.layers, shape.kv_heads, shape.head_dim, pool.block_size, name)
        self.rows = (shape.layers * 2 * shape.kv_heads * pool.block_size, shape.head_dim, name)
        self._pool = pool
        self._bytes = pool.data.view(pool.num_blocks, -1).view(torch.uint8)
        self._array = self._bytes.numpy() if stream is None else None
        self._stream = stream

    def host_memory(self, size: int) -> memoryview:
        """Pinned where a GPU copies from and to it."""
        return host_memory(size) if self._stream is None else pinned_memory(size)

    def view(self, block: int) -> memoryview | None:
        return None if self._array is None else memoryview(self._array[block])

    def read(self, block: int, target: memoryview) -> None:
        bytes_of = np.frombuffer(target, dtype=np.uint8)
        if self._array is not None:
            np.copyto(bytes_of, self._array[block])
            return
        assert self._stream is not None
        with self._stream.copying():
            torch.from_numpy(bytes_of).copy_(self._bytes[block], non_blocking=True)
        self._stream.finish()

    def write(self, block: int, source: memoryview) -> None:
        bytes_of = np.frombuffer(source, dtype=np.uint8)
        if self._array is not None:
            np.copyto(self._array[block], bytes_of)
            return
        assert self._stream is not None
        with self._stream.copying():
            self._bytes[block].copy_(torch.from_numpy(bytes_of), non_blocking=True)
        self._stream.finish()

    def landed(self, blocks: Sequence[int]) -> None:
        """The host waited for the copies: what runs next sees them."""
