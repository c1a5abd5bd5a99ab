"""Bytes of blocks of which each rank has a part, on memory of the host that all ranks share.

    block's bytes    │ rank 0: its heads │ rank 1: its heads │ ...     each part as in an unsharded pool of those heads
                              ▲                   ▲
                          the leader        follower 1 copies its part itself, from its own card

So no bytes go through a channel. Peers and vaults cannot mix such blocks with others': `kv_format` tells the ranks.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection

import numpy as np

from kvfleet.worker.model.base import BlockMemory
from kvfleet.worker.model.kv_pool import KvPool, PoolMemory
from kvfleet.worker.model.parallel.group import RankGroup
from kvfleet.worker.model.parallel.messages import Move, Region
from kvproto.dataplane.block import kv_format


def shared_memory(size: int) -> tuple[int, memoryview]:
    """A file descriptor and what it maps to: zero bytes, taken when first touched. Raises MemoryError."""
    file = os.memfd_create("kvfleet-blocks")
    try:
        os.ftruncate(file, size)
        return file, mapped(file, size)
    except (OSError, OverflowError, ValueError) as error:
        os.close(file)
        raise MemoryError(f"{size} bytes: {error}") from error


def mapped(file: int, size: int) -> memoryview:
    pages = mmap.mmap(file, size)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


class GroupMemory(BlockMemory):
    """See `kvfleet.worker.model.base.BlockMemory`. Of any thread; one exchange with the followers at a time."""

    def __init__(self, group: RankGroup, pool: KvPool, own: PoolMemory) -> None:
        self._group, self._own = group, own
        ranks, shape = group.plan.ranks, pool.shape
        rows, head_dim, name = own.rows
        self.block_bytes = own.block_bytes * ranks
        self.rows = rows * ranks, head_dim, name
        self.kv_format = kv_format(shape.layers, shape.kv_heads * ranks, head_dim, pool.block_size, name, ranks)
        self._lock = threading.Lock()
        self._regions: list[tuple[int, memoryview]] = []  # address and bytes
        self._single = self.host_memory(self.block_bytes)  # for bytes that lie elsewhere

    def host_memory(self, size: int) -> memoryview:
        """Shared by the ranks, and pinned where GPUs copy from and to it."""
        size = max(size, 1)
        file, memory = shared_memory(size)
        with self._lock, self._group.watched():
            for follower in self._group.followers:
                follower.blocks.send_bytes(pickle.dumps(Region(size)))
                reduction.send_handle(follower.blocks, file, follower.process.pid)
            self._regions.append((_address(memory), memory))
        os.close(file)
        self._own.pin(memory)
        return memory

    def view(self, block: int) -> memoryview | None:
        """None: it is not in one piece."""
        return None

    def read(self, block: int, target: memoryview) -> None:
        with self._lock:
            if (place := self._place(target)) is None:
                self._move(False, block, 0, 0)
                target[:] = self._single
            else:
                self._move(False, block, *place)

    def write(self, block: int, source: memoryview) -> None:
        with self._lock:
            if (place := self._place(source)) is None:
                self._single[:] = source
                place = 0, 0
            self._move(True, block, *place)

    def landed(self, blocks: Sequence[int]) -> None:
        """Nothing to do: `write` returns when all ranks have made their copies."""

    def _place(self, buffer: memoryview) -> tuple[int, int] | None:
        address = _address(buffer)
        found = ((at, address - start) for at, (start, memory) in enumerate(self._regions)
                 if 0 <= address - start < len(memory))  # fmt: skip
        return next(found, None)

    def _move(self, write: bool, block: int, region: int, offset: int) -> None:
        """A block that is full, or that the writer alone holds, is none of a pass that is under way."""
        message = Move(write, block, region, offset, self._group.done)
        packed = pickle.dumps(message)
        with self._group.watched():
            for follower in self._group.followers:
                follower.blocks.send_bytes(packed)
            move_part(self._own, 0, self._regions[region][1], message)
            for follower in self._group.followers:
                follower.blocks.recv_bytes()


def move_part(memory: PoolMemory, rank: int, region: memoryview, move: Move) -> None:
    begin = move.offset + rank * memory.block_bytes
    part = region[begin : begin + memory.block_bytes]
    if move.write:
        memory.write(move.block, part)
    else:
        memory.read(move.block, part)


def receive_region(channel: Connection, region: Region) -> memoryview:
    file = reduction.recv_handle(channel)
    try:
        return mapped(file, region.size)
    finally:
        os.close(file)


def _address(buffer: memoryview) -> int:
    address: int = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
    return address
