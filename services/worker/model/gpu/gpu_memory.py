"""Copies of blocks between a pool on a GPU and the host, in batches, beside steps. Adapter.

    host end pinned                pool ◀──────────────────────▶ slots      a copy for each run of neighbours
    pinned or not, small blocks    pool ◀─▶ staged ◀─▶ ring ◀─▶ slots       a kernel and a copy for each piece
    not pinned                     pool ◀────────────▶ ring ◀─▶ slots       a copy for each run of neighbours

A block is one contiguous piece, so the link takes it as it lies, and nothing is gained by gathering it first. A call
that queues a copy costs the host 5 to 10 us, in which its thread copies 50 to 100 kB: small blocks go together.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvfleet.worker.model.base import Copies, host_memory
from kvfleet.worker.model.kv_pool import KvPool, PoolMemory
from kvsampling.changes import moved

log = logging.getLogger(__name__)

SMALL = 64 * 1024  # bytes of a block below which the call costs more than the host's own copy
BATCH_BYTES = 16 * 2**20  # 0.3 ms of a link of 55 GB/s, which two batches under way keep busy
UNDER_WAY = 2  # batches of one caller: the next is queued while the first is copied
PIECE_BYTES = 4 * 2**20  # of the ring; it holds one block at least
PIECES = 4
REGISTER_PORTABLE = 1  # for all contexts of the process

Rows = npt.NDArray[np.uint8]  # [blocks, bytes]


class Mark(Protocol):
    def synchronize(self) -> None:
        """Block until what was queued before is done."""


class CopyStream:
    """Copies of blocks, on any thread, beside the steps of a GPU.

    default stream   ── step n ──●── step n + 1 ───────────●──     ●: an event, once the step's last kernel is queued
    copies' stream       waits ──┘ copies                         they do not wait for step n + 1

    Earlier steps wrote the blocks, so copies wait for the event that is the newest when they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._stepped: Any = None

    def stepped(self) -> None:
        """A step's kernels, or copies between blocks, are queued: later copies come after them."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(self._device))
        with self._lock:
            self._stepped = event

    def wait_for_step(self) -> None:
        """Block until the kernels before the last `stepped` are done."""
        with self._lock:
            event = self._stepped
        if event is not None:
            event.synchronize()

    def copying(self) -> AbstractContextManager[Any]:
        """What this thread queues within runs on the copies' stream."""
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        event: Mark = self._stream.record_event()
        return event

    def pin(self, address: int, size: int) -> int:
        """CUDA's error, or 0."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, REGISTER_PORTABLE))  # type: ignore[no-untyped-call]
        if error:
            with suppress(RuntimeError):  # CUDA keeps the error for the next one who asks, a step
                torch.ones(1, device=self._device)
        return error

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def stream_of(device: torch.device) -> CopyStream | None:
    """None where blocks are copied as any memory is."""
    return None if device.type == "cpu" else CopyStream(device)


def memory_of(pool: KvPool, stream: CopyStream | None) -> PoolMemory:
    return PoolMemory(pool) if stream is None else GpuMemory(pool, stream)


@dataclass(slots=True)
class _Batch:
    blocks: Sequence[int]
    slots: Sequence[int]
    piece: Rows | None = None  # of the ring
    mark: Mark | None = None


class GpuMemory(PoolMemory):
    """Any thread copies; each waits for its own copies. The ring's pieces are lent to one batch at a time."""

    def __init__(self, pool: KvPool, stream: CopyStream) -> None:
        super().__init__(pool)
        self._device, self._stream = pool.device, stream
        self._is_small = self.block_bytes < SMALL
        self._words = self._bytes if self.block_bytes % 8 else self._bytes.view(torch.int64)
        self._pinned: list[tuple[int, int]] = []  # addresses
        self._piece_blocks = max(1, PIECE_BYTES // self.block_bytes)
        self._ring: queue.SimpleQueue[Rows] = queue.SimpleQueue()
        ring = self.host_memory(PIECES * self._piece_blocks * self.block_bytes)
        for piece in np.frombuffer(ring, dtype=np.uint8).reshape(PIECES, self._piece_blocks, self.block_bytes):
            self._ring.put(piece)

    def host_memory(self, size: int) -> memoryview:
        """Pinned, as much as asked for, as long as this object lives; torch would round it up to a power of two.
        Where the driver refuses to pin it, copies go through the ring."""
        memory = host_memory(size)
        self.pin(memory)
        return memory

    def pin(self, memory: memoryview) -> None:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        if error := self._stream.pin(address, len(memory)):
            size = len(memory)
            log.warning("%d bytes of host memory cannot be pinned (CUDA error %d): copies are slower", size, error)
            return
        self._pinned.append((address, address + len(memory)))
        weakref.finalize(self, _unpin, self._stream, address, memory).atexit = False

    def view(self, block: int) -> memoryview | None:
        return None

    def read(self, block: int, target: memoryview) -> None:
        deque(self.read_blocks([block], target, [0]), maxlen=0)

    def write(self, block: int, source: memoryview) -> None:
        deque(self.write_blocks([block], source, [0]), maxlen=0)

    def read_blocks(self, blocks: Sequence[int], host: memoryview, slots: Sequence[int]) -> Copies:
        return self._copies(blocks, host, slots, to_host=True)

    def write_blocks(self, blocks: Sequence[int], host: memoryview, slots: Sequence[int]) -> Copies:
        return self._copies(blocks, host, slots, to_host=False)

    def _copies(self, blocks: Sequence[int], host: memoryview, slots: Sequence[int], *, to_host: bool) -> Copies:
        if not blocks:
            return
        rows = np.frombuffer(host, dtype=np.uint8, count=len(host) // self.block_bytes * self.block_bytes)
        rows = rows.reshape(-1, self.block_bytes)
        _check(blocks, slots, len(self._bytes), len(rows), slots if to_host else blocks)
        direct = not self._is_small and self._is_pinned(rows)
        at_once = max(1, BATCH_BYTES // self.block_bytes) if direct else self._piece_blocks
        self._stream.wait_for_step()
        yield 0
        under_way: deque[_Batch] = deque()
        try:
            for at in range(0, len(blocks), at_once):
                if len(under_way) == UNDER_WAY:
                    yield self._finish(under_way, rows, to_host=to_host)
                batch = _Batch(blocks[at : at + at_once], slots[at : at + at_once])
                while not direct and not self._lend_piece(batch, wait=not under_way):
                    yield self._finish(under_way, rows, to_host=to_host)  # callers that wait hold none
                under_way.append(batch)
                self._begin(batch, rows, to_host=to_host)
            while under_way:
                yield self._finish(under_way, rows, to_host=to_host)
        except BaseException:  # failed, or closed: what is queued is still copied
            self._stream.mark().synchronize()
            raise
        finally:
            for batch in under_way:
                self._return_piece(batch)

    def _begin(self, batch: _Batch, rows: Rows, *, to_host: bool) -> None:
        """Queue the batch's copies."""
        if batch.piece is None:
            outside, places = torch.from_numpy(rows), batch.slots
        else:
            outside, places = torch.from_numpy(batch.piece), range(len(batch.slots))
            for place, slot, count in () if to_host else runs(places, batch.slots):
                batch.piece[place : place + count] = rows[slot : slot + count]
        with self._stream.copying():
            if self._is_small:
                self._begin_staged(batch.blocks, outside[: len(places)].view(self._words.dtype), to_host=to_host)
            else:
                for block, place, count in runs(batch.blocks, places):
                    inside, beyond = self._bytes[block : block + count], outside[place : place + count]
                    into, out_of = (beyond, inside) if to_host else (inside, beyond)
                    into.copy_(out_of, non_blocking=True)
        batch.mark = self._stream.mark()

    def _begin_staged(self, blocks: Sequence[int], outside: Tensor, *, to_host: bool) -> None:
        chosen = moved(np.array(blocks, dtype=np.int64), self._device)
        if to_host:
            outside.copy_(self._words.index_select(0, chosen), non_blocking=True)
        else:
            self._words.index_copy_(0, chosen, outside.to(self._device, non_blocking=True))

    def _finish(self, under_way: deque[_Batch], rows: Rows, *, to_host: bool) -> int:
        """Wait for the oldest batch. Returns its blocks."""
        batch = under_way[0]
        assert batch.mark is not None
        batch.mark.synchronize()
        if to_host and batch.piece is not None:
            for place, slot, count in runs(range(len(batch.slots)), batch.slots):
                rows[slot : slot + count] = batch.piece[place : place + count]
        self._return_piece(under_way.popleft())
        return len(batch.blocks)

    def _lend_piece(self, batch: _Batch, *, wait: bool) -> bool:
        with suppress(queue.Empty):
            batch.piece = self._ring.get(block=wait)
        return batch.piece is not None

    def _return_piece(self, batch: _Batch) -> None:
        if batch.piece is not None:
            self._ring.put(batch.piece)

    def _is_pinned(self, rows: Rows) -> bool:
        first = rows.ctypes.data
        return any(start <= first and first + rows.nbytes <= end for start, end in self._pinned)


def runs(blocks: Sequence[int], slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First block, first slot and length of each run of neighbours on both sides."""
    first = 0
    for at in range(1, len(blocks) + 1):
        if at == len(blocks) or blocks[at] - blocks[at - 1] != 1 or slots[at] - slots[at - 1] != 1:
            yield blocks[first], slots[first], at - first
            first = at


def _check(blocks: Sequence[int], slots: Sequence[int], known: int, room: int, targets: Sequence[int]) -> None:
    """Raises IndexError, ValueError: torch would copy less, or in any order, without a word."""
    if len(blocks) != len(slots) or len(set(targets)) != len(targets):
        raise ValueError(f"not a slot for each block, or a target twice: {blocks}, {slots}")
    if not (0 <= min(blocks) <= max(blocks) < known and 0 <= min(slots) <= max(slots) < room):
        raise IndexError(f"beyond {known} blocks or {room} slots: {blocks}, {slots}")


def _unpin(stream: CopyStream, address: int, memory: memoryview) -> None:
    """The memory lives until it is no longer pinned."""
    stream.unpin(address)
