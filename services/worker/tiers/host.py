"""The host tier: a second block pool whose blocks lie in host memory, and the thread that copies to it and from it.

It is the same pool as the device's, with the same rules: whole chains, leaves evicted first, found by hash. Holding a
block means holding the chain up to it; what is held is being copied from or to. The engine's thread owns the tier; the
copier owns its own thread (loop). A copy job can be stopped between any two blocks, so a caller that gives up has its
blocks back at once.
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
from kvfleet.worker.tiers.link_speed import CopySpeed
from kvproto.block_hash import Root
from kvproto.messages import Tier, TierEvents

log = logging.getLogger(__name__)

Moves = Sequence[Callable[[], None]]  # block copies, made in order


class HostTier:
    """`memory` has room for whole blocks of `block_bytes`; how many that is, is the tier's size. It may be none."""

    def __init__(self, memory: memoryview, block_bytes: int, block_size: int) -> None:
        self.blocks = len(memory) // block_bytes
        self.pool = BlockPool(max(1, self.blocks), block_size)  # the smallest there is: of no blocks it is never asked
        self.block_bytes = block_bytes
        self._memory = memory
        self._changes: list[TierEvents] = []

    def view(self, slot: int) -> memoryview:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def allocate(self, count: int) -> list[int]:
        """At most so many slots, fewer if there are not as many; held by the caller."""
        self._note_changes()
        return self.pool.allocate(min(count, self.pool.available, self.blocks))

    def drop(self, block_hash: bytes) -> int:
        self._note_changes()
        return self.pool.drop(block_hash)

    def erase(self, root: Root, hashes: Sequence[bytes], ids: Sequence[int], keep: int = 0) -> int:
        self._note_changes()
        return self.pool.erase(root, hashes, ids, keep)

    def depth(self, hashes: Sequence[bytes], start: int, end: int, *, exact: bool = False) -> int:
        """How far the chain is here without a gap, from `start` on, to `end` at most; `exact`: nothing lossy."""
        return max(len(self.pool.chain_to(hashes[:end], exact=exact)), start)

    def fill(
        self, slots: Sequence[int], root: Root, hashes: Sequence[bytes], start: int, contents: Sequence[Content]
    ) -> list[int]:
        """Blocks `start` and on of a chain have been copied to `slots`, which the caller holds and goes on holding.
        Returns the slots to hold from now on: where a block is here already, that one."""
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
        """The pool tells removals before stores: before blocks are taken again, what was stored is to be noted."""
        self._changes += self.pool.take_changes(Tier.HOST)


@dataclass(eq=False, slots=True)
class CopyJob:
    """`on_end` is called on the copying thread when no more moves will be made."""

    moves: Moves
    block_bytes: int
    on_end: Callable[[], None]
    ended: bool = False
    done: int = 0  # moves that were made
    failure: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def close(self) -> int:
        """No further copy begins, and none is under way. Returns how many were made."""
        with self._lock:
            self._closed = True
        return self.done

    def run(self) -> float:
        began = time.perf_counter()
        try:
            for move in self.moves:
                with self._lock:
                    if self._closed:
                        break
                    move()
                    self.done += 1
        except Exception as error:  # a device's: this job has failed, the thread goes on
            log.exception("a block could not be copied")
            self.failure = type(error).__name__
        took = time.perf_counter() - began
        self.ended = True
        self.moves = ()
        self.on_end()
        return took


class Copier:
    """Jobs come from one thread; `close` when it brings no more."""

    def __init__(self) -> None:
        self.speed_in = CopySpeed()  # to the device
        self.speed_out = CopySpeed()
        self._urgent: deque[CopyJob] = deque()
        self._behind: deque[CopyJob] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)  # starts with the first job

    def bring(self, job: CopyJob) -> None:
        """To the device. Such jobs go first: somebody waits for them."""
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
