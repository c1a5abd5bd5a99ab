"""Whole blocks of a KvPool as bytes, and host memory for them. See `services.worker.model.base.BlockMemory`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvproto.dataplane.block import kv_format
from services.worker.model.kv_pool import KvPool
from services.worker.tiers.host_memory import host_memory

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class PoolMemory:
    """On a GPU copies run on a stream of their own, and whoever asked for one waits for it."""

    def __init__(self, pool: KvPool) -> None:
        shape = pool.shape
        name = "int8" if shape.quantized else DTYPES[shape.dtype]
        self.block_bytes = shape.bytes_per_block(pool.block_size)
        self.kv_format = kv_format(shape.layers, shape.kv_heads, shape.head_dim, pool.block_size, name)
        self.rows = (shape.layers * 2 * shape.kv_heads * pool.block_size, shape.head_dim, name)
        self._pool = pool
        self._bytes = pool.data.view(pool.num_blocks, -1).view(torch.uint8)
        self._on_host = pool.device.type == "cpu"
        self._array = self._bytes.numpy() if self._on_host else None
        self._stream: Any = None
        if not self._on_host:
            self._stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]

    def host_memory(self, size: int) -> memoryview:
        """Pinned where a GPU copies from and to it."""
        if self._on_host:
            return host_memory(size)
        return memoryview(torch.zeros(size, dtype=torch.uint8, pin_memory=True).numpy())  # type: ignore[arg-type]

    def view(self, block: int) -> memoryview | None:
        return None if self._array is None else memoryview(self._array[block])

    def read(self, block: int, target: memoryview) -> None:
        bytes_of = np.frombuffer(target, dtype=np.uint8)
        if self._array is not None:
            np.copyto(bytes_of, self._array[block])
            return
        with self._after_computing():
            torch.from_numpy(bytes_of).copy_(self._bytes[block], non_blocking=True)
        self._synchronise()

    def write(self, block: int, source: memoryview) -> None:
        bytes_of = np.frombuffer(source, dtype=np.uint8)
        if self._array is not None:
            np.copyto(self._array[block], bytes_of)
            return
        with self._after_computing():
            self._bytes[block].copy_(torch.from_numpy(bytes_of), non_blocking=True)
        self._synchronise()

    def landed(self, blocks: Sequence[int]) -> None:
        """The host waited for the copies: what runs next sees them."""

    def _after_computing(self) -> Any:
        """On the copies' own stream, behind all that steps have begun by now: a step without draws is not waited for,
        and its kernels may still write to the block."""
        self._stream.wait_stream(torch.cuda.default_stream(self._pool.device))
        return torch.cuda.stream(self._stream)

    def _synchronise(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
