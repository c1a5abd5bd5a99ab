"""Adapter: copies of blocks beside the steps of a GPU: what they wait for, and memory of the host that they can reach.

    default stream   ── step n ──●── step n + 1 ───────────●──     ●: an event, once the step's last kernel is queued
    copies' stream       waits ──┘ copy                           it does not wait for step n + 1

Blocks that are copied were written by steps that are over, so a copy waits for the newest event alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from kvfleet.worker.model.base import host_memory

log = logging.getLogger(__name__)

REGISTER_PORTABLE = 1  # for all contexts of the process


class CopyStream(Protocol):
    """Copies may be made on any thread, steps run on one."""

    def stepped(self) -> None:
        """All kernels of a step, or of copies between blocks, are queued: copies from now on come after them."""

    def wait_for_step(self) -> None:
        """Until what `stepped` was last called after is computed."""

    def copying(self) -> AbstractContextManager[Any]:
        """What is copied within it comes after the last step."""

    def finish(self) -> None:
        """Until this thread's copies are made."""


class CudaCopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._stepped: Any = None

    def stepped(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        with self._lock:
            self._stepped = event

    def wait_for_step(self) -> None:
        if (event := self._event()) is not None:
            event.synchronize()

    def copying(self) -> AbstractContextManager[Any]:
        if (event := self._event()) is not None:
            self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def _event(self) -> Any:
        with self._lock:
            return self._stepped


def stream_of(device: torch.device) -> CopyStream | None:
    """None where blocks are copied as any memory is."""
    return None if device.type == "cpu" else CudaCopyStream(device)


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
