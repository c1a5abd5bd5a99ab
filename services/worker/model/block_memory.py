"""Whole blocks of a KvPool as bytes, host memory for them, and what a GPU's copies wait for. Adapter.

See `kvfleet.worker.model.base.BlockMemory`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from kvfleet.worker.model.base import host_memory
from kvfleet.worker.model.kv_pool import KvPool
from kvproto.dataplane.block import kv_format

log = logging.getLogger(__name__)

REGISTER_PORTABLE = 1  # for all contexts of the process
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


class CopyStream:
    """Copies of blocks beside the steps of a GPU. They may be made on any thread, steps run on one.

    default stream   ── step n ──●── step n + 1 ───────────●──     ●: an event, once the step's last kernel is queued
    copies' stream       waits ──┘ copy                           it does not wait for step n + 1

    Blocks that are copied were written by steps that are over, so a copy waits for the newest event alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._stepped: Any = None

    def stepped(self) -> None:
        """All kernels of a step, or of copies between blocks, are queued: copies from now on come after them."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        with self._lock:
            self._stepped = event

    def wait_for_step(self) -> None:
        """Until what `stepped` was last called after is computed."""
        if (event := self._event()) is not None:
            event.synchronize()

    def copying(self) -> AbstractContextManager[Any]:
        """What is copied within it comes after the last step."""
        if (event := self._event()) is not None:
            self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        """Until this thread's copies are made."""
        self._stream.synchronize()

    def _event(self) -> Any:
        with self._lock:
            return self._stepped


def stream_of(device: torch.device) -> CopyStream | None:
    """None where blocks are copied as any memory is."""
    return None if device.type == "cpu" else CopyStream(device)


def _cuda_register(address: int, size: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_PORTABLE))  # type: ignore[no-untyped-call]


def pinned_memory(size: int, register: Callable[[int, int], int] = _cuda_register) -> memoryview:
    """So many bytes that a GPU copies from and to by itself, and no more: torch's own pinned memory is rounded up to a
    power of two. Where the driver refuses, copies are slower, and right."""
    memory = host_memory(size)
    error = register(np.frombuffer(memory, dtype=np.uint8).ctypes.data, len(memory))
    if error:
        log.warning("%d bytes of host memory cannot be pinned (CUDA error %d): copies are slower", size, error)
    return memory
