"""The host tier: a second block pool in host memory, the thread that copies to it and from it, and where fetches land.

The pool has the device pool's rules. The engine's thread owns the tier; the copier owns its own thread (loop).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.model.base import Copies
from kvfleet.worker.tiers.link_speed import CopySpeed
from kvproto.block_hash import Root
from kvproto.dataplane.block import BlockHeader
from kvproto.messages import Tier, TierEvents

log = logging.getLogger(__name__)

# Blocks of the device to or from slots of the host's memory, as `BlockMemory` copies them.
Copy = Callable[[Sequence[int], memoryview, Sequence[int]], Copies]


class HostTier:
    """As many blocks of `block_bytes` as `memory` has room for, which may be none."""

    def __init__(self, memory: memoryview, block_bytes: int, block_size: int) -> None:
        self.blocks = len(memory) // block_bytes
        self.pool = BlockPool(max(1, self.blocks), block_size)  # a pool has one block at least
        self.block_bytes = block_bytes
        self._memory = memory
        self._changes: list[TierEvents] = []

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def allocate(self, count: int) -> list[int]:
        """At most `count` slots, held by the caller."""
        self._note_changes()
        return self.pool.allocate(min(count, self.pool.available, self.blocks))

    def copy_job(self, copy: Copy, blocks: Sequence[int], slots: Sequence[int], on_end: Callable[[], None]) -> CopyJob:
        return CopyJob(self.copies(copy, blocks, slots), self.block_bytes, on_end)

    def copies(self, copy: Copy, blocks: Sequence[int], slots: Sequence[int]) -> Copies:
        return copy(blocks, self._memory, slots)

    def drop(self, block_hash: bytes) -> int:
        self._note_changes()
        return self.pool.drop(block_hash)

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int = 0) -> int:
        self._note_changes()
        return self.pool.erase(root, hashes, ids, keep)

    def depth(self, hashes: Sequence[bytes], start: int, end: int, *, exact: bool = False) -> int:
        """How far the chain is here without a gap, between `start` and `end`; `exact`: nothing lossy."""
        return max(len(self.pool.chain_to(hashes[:end], exact=exact)), start)

    def fill(
        self, slots: Sequence[int], root: Root, hashes: Sequence[bytes], start: int, contents: Sequence[Content]
    ) -> list[int]:
        """Blocks from `start` on of a chain lie in `slots`, which the caller holds. Returns the slots to hold from now
        on: where a block is here already, that one."""
        before = self.pool.index.find(hashes[start - 1]) if start else None
        after_lossy = before is not None and self.pool.index[before].lossy
        filled = []
        for at, (slot, content) in enumerate(zip(slots, contents, strict=True), start):
            after_lossy = after_lossy or content.lossy  # what follows a lossy block counts as lossy too
            filled.append(self.pool.fill(slot, root, hashes, at, content.ids, lossy=after_lossy))
            after_lossy = after_lossy or self.pool.is_lossy(hashes[at])
        return filled

    def take_changes(self) -> list[TierEvents]:
        self._note_changes()
        changes, self._changes = self._changes, []
        return changes

    def _note_changes(self) -> None:
        """Called before blocks are taken: the pool tells removals before stores, so earlier stores are noted first."""
        self._changes += self.pool.take_changes(Tier.HOST)


@dataclass(eq=False, slots=True)
class CopyJob:
    """`on_end` is called on the copying thread when no more copies will be made. It can be stopped between batches."""

    copies: Copies
    block_bytes: int
    on_end: Callable[[], None]
    ended: bool = False
    done: int = 0  # blocks that were copied
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def close(self) -> int:
        """No copy begins any more, and none is under way. Returns how many blocks were copied."""
        self._closed = True  # first: the copying thread would take the lock again and again
        with self._lock:
            try:
                self.copies.close()
            except Exception:  # a device's, as below
                log.exception("blocks could not be copied")
        return self.done

    def run(self) -> float:
        """Returns the seconds of copying; what went by before a 0 was waiting for steps."""
        began = time.perf_counter()
        try:
            while not self._closed:
                with self._lock:
                    count = next(self.copies, None)
                    self.done += count or 0
                if count is None:
                    break
                began = began if count else time.perf_counter()
        except Exception:  # a device's: this job has failed, the thread goes on
            log.exception("blocks could not be copied")
        took = time.perf_counter() - began
        self.ended = True
        self.on_end()
        return took


@dataclass(slots=True)
class Landing:
    """One fetch's meeting point of engine and transfer threads. The engine closes it to have its blocks back at once:
    from then on nothing is written to them."""

    headers: list[BlockHeader | None]  # each is set when its block has landed
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    ended: bool = False  # the fetch brings no more
    failure: str = ""  # why it brought less than all of them: a metric's label
    sources: dict[int, str] = field(default_factory=dict)  # ids of the vaults or peers that blocks came from
    traceparent: str = ""  # of a traced request

    def land(self, at: int, header: BlockHeader, write: Callable[[], None]) -> bool:
        """Called by a transfer thread: `write` the block to its place, unless the landing is closed."""
        with self.lock:
            if self.closed:
                return False
            write()
            self.headers[at] = header
            return True

    def close(self) -> int:
        """Called by the engine. Returns how many blocks have landed without a gap."""
        with self.lock:
            self.closed = True
        return next((at for at, header in enumerate(self.headers) if header is None), len(self.headers))


@dataclass(eq=False)
class Copier:
    """Jobs come from one thread, and no more after `close`."""

    speed_in: CopySpeed = field(default_factory=CopySpeed)  # to the device
    speed_out: CopySpeed = field(default_factory=CopySpeed)
    _urgent: deque[CopyJob] = field(default_factory=deque)
    _behind: deque[CopyJob] = field(default_factory=deque)
    _wake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _closing: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)  # starts with the first job

    def bring(self, job: CopyJob) -> None:
        """To the device. Such jobs go first: sequences wait for them."""
        self._urgent.append(job)
        self._begin()

    def offload(self, job: CopyJob) -> None:
        self._behind.append(job)
        self._begin()

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._wake.release()

    def close(self) -> None:
        """What waits is not done; what is under way ends with its block."""
        self._closing = True
        for job in (*self._urgent, *self._behind):
            job.close()
        self._wake.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            jobs, speed = (self._urgent, self.speed_in) if self._urgent else (self._behind, self.speed_out)
            job = jobs.popleft()
            took = job.run()
            speed.observe(job.done * job.block_bytes, took)
