"""Blocks on their way to one vault, oldest first, bounded in bytes. Pure; guarded by the lock of its `WriteBehind`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise, takewhile

from kvfleet.worker.blocks.chain_location import BlockName

BATCH_BLOCKS = 64
BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Offload:
    """`payload` stays as it is until `on_done` is called; nothing is done with it after `expires`."""

    name: BlockName
    payload: memoryview
    lossy: bool
    on_done: Callable[[], None]
    expires: float


class OffloadQueue:
    """Parents come before their children and are written before them: order is never changed."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[Offload] = deque()
        self._batch: list[Offload] = []
        self._unwanted: set[bytes] = set()  # of the batch
        self.bytes = 0  # of what waits and of the batch that is under way

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, offload: Offload) -> bool:
        """False: it is full. A block larger than all of it may wait alone."""
        if self.bytes and self.bytes + offload.payload.nbytes > self._max_bytes:
            return False
        self._waiting.append(offload)
        self.bytes += offload.payload.nbytes
        return True

    def take(self) -> list[Offload]:
        """The next batch, of one root and equally lossy; the one before it must be done."""
        assert not self._batch
        size = 0
        while self._waiting and len(self._batch) < BATCH_BLOCKS:
            offload = self._waiting[0]
            first = self._batch[0] if self._batch else offload
            size += offload.payload.nbytes
            if (first.name.root, first.lossy) != (offload.name.root, offload.lossy):
                break
            if self._batch and size > BATCH_BYTES:
                break
            self._batch.append(self._waiting.popleft())
        return self._batch.copy()

    def done(self) -> None:
        """The batch under way has come to its end, whichever."""
        self._leave(self._batch)
        self._batch = []
        self._unwanted.clear()

    def put_back(self, now: float) -> list[Offload]:
        """The batch under way did not get through: it is first again, but for what has expired or was dropped
        meanwhile, which is returned."""
        ended = [one for one in self._batch if one.expires <= now or one.name.hash in self._unwanted]
        self._waiting.extendleft(reversed([one for one in self._batch if one not in ended]))
        self._leave(ended)
        self._batch = []
        self._unwanted.clear()
        return ended

    def expired(self, now: float) -> list[Offload]:
        """Takes out what has waited too long."""
        expired = list(takewhile(lambda offload: offload.expires <= now, self._waiting))
        for _ in expired:
            self._waiting.popleft()
        self._leave(expired)
        return expired

    def drop(self, hashes: Collection[bytes]) -> list[Offload]:
        """Takes out what waits of these blocks; those under way do not come back."""
        self._unwanted.update(one.name.hash for one in self._batch if one.name.hash in hashes)
        dropped = [offload for offload in self._waiting if offload.name.hash in hashes]
        if dropped:
            self._waiting = deque(offload for offload in self._waiting if offload.name.hash not in hashes)
            self._leave(dropped)
        return dropped

    def drop_all(self) -> list[Offload]:
        dropped = list(self._waiting)
        self._waiting.clear()
        self._leave(dropped)
        return dropped

    def _leave(self, offloads: Collection[Offload]) -> None:
        self.bytes -= sum(offload.payload.nbytes for offload in offloads)

    def check_integrity(self) -> None:
        assert self.bytes == sum(offload.payload.nbytes for offload in [*self._waiting, *self._batch])
        assert all(one.expires <= other.expires for one, other in pairwise(self._waiting))
