"""Blocks on their way to one vault, and those that it is to forget. Thread-safe; owns their queue and a connection.

offer ──▶ queue ──a batch──▶ has it? ──▶ encode ──▶ put ──▶ done
            ▲──────────── it did not get through ─────│
erase: what waits is dropped; the vault forgets after the batch that is under way, or once it is back
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

from kvfleet.worker.blocks.block_codec import choose, encoded_bytes
from kvfleet.worker.blocks.chain_location import BlockName, by_root
from kvfleet.worker.tiers.transfers import (
    GONE,
    Connect,
    ConnectionJob,
    ConnectionThread,
    Deadlines,
    RemoteCounts,
    RemoteSettings,
)
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.client import DataPlaneClient, PutStatus
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.messages import Tier

BATCH_BLOCKS = 64
BATCH_BYTES = 16 * 1024 * 1024
OFFLOAD_LIMIT_S = 10.0
ERASE_LIMIT_S = 5.0
AGAIN_S = 2.0  # from an erase that failed, or that a broken put may have outlived, to the second one
MAX_OWED = 65_536  # blocks that a vault is still to forget


@dataclass(frozen=True, slots=True, eq=False)
class Offload:
    """`payload` stays as it is until `on_done`, which is called some seconds after `expires` at the latest."""

    name: BlockName
    payload: memoryview
    lossy: bool
    on_done: Callable[[], None]
    expires: float


@dataclass(eq=False, slots=True)
class OffloadQueue:
    """What waits for one vault, oldest first. The order never changes, as parents come, and are written, before their
    children. Guarded by the lock of its `WriteBehind`."""

    max_bytes: int
    nbytes: int = 0  # of what waits and of the batch that is under way
    _waiting: deque[Offload] = field(default_factory=deque)
    _batch: list[Offload] = field(default_factory=list)
    _unwanted: set[bytes] = field(default_factory=set)  # of the batch

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, offload: Offload) -> bool:
        """False: it is full. A block larger than all of it may wait alone."""
        if self.nbytes and self.nbytes + offload.payload.nbytes > self.max_bytes:
            return False
        self._waiting.append(offload)
        self.nbytes += offload.payload.nbytes
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
        self.put_back(float("inf"))

    def put_back(self, now: float) -> list[Offload]:
        """The batch did not get through: it is first again, except what expired or was dropped, which is returned."""
        ended = [one for one in self._batch if one.expires <= now or one.name.hash in self._unwanted]
        self._waiting.extendleft(reversed([one for one in self._batch if one not in ended]))
        self._leave(ended)
        self._batch = []
        self._unwanted.clear()
        return ended

    def expired(self, now: float) -> list[Offload]:
        expired = list(takewhile(lambda offload: offload.expires <= now, self._waiting))
        for _ in expired:
            self._waiting.popleft()
        self._leave(expired)
        return expired

    def drop(self, hashes: Collection[bytes]) -> list[Offload]:
        """Take out those of these blocks that wait; those under way do not come back."""
        self._unwanted.update(one.name.hash for one in self._batch if one.name.hash in hashes)
        dropped = [offload for offload in self._waiting if offload.name.hash in hashes]
        if dropped:
            self._waiting = deque(offload for offload in self._waiting if offload.name.hash not in hashes)
            self._leave(dropped)
        return dropped

    def _leave(self, offloads: Collection[Offload]) -> None:
        self.nbytes -= sum(offload.payload.nbytes for offload in offloads)

    def check_integrity(self) -> None:
        assert self.nbytes == sum(offload.payload.nbytes for offload in [*self._waiting, *self._batch])
        assert all(one.expires <= other.expires for one, other in pairwise(self._waiting))


Owed = dict[bytes, BlockName]  # by hash: what a vault is still to forget


def owe(owed: Owed, names: Sequence[BlockName]) -> None:
    """The oldest ones give way."""
    owed.update((name.hash, name) for name in names)
    for _ in range(len(owed) - MAX_OWED):
        owed.pop(next(iter(owed)), None)


@dataclass(eq=False)
class WriteBehind:
    """`owed` begins with what an earlier life of this vault is owed, which may still add to it."""

    vault: str
    connect: Connect
    settings: RemoteSettings
    deadlines: Deadlines
    counts: RemoteCounts
    owed: Owed = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _asked_to_drain: bool = False
    _asked_to_erase: bool = False
    _watched: bool = False
    _closed: bool = False
    _broke_at: float = float("-inf")  # when a put last ended without an answer
    _scratch: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._queue = OffloadQueue(self.settings.max_queued_bytes)
        self._connection = ConnectionThread(f"vault-{self.vault}-write", self.connect, self._maintain)
        self._connection.start()

    def offer(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        """False: the queue is full, and nothing happens."""
        offload = Offload(name, payload.cast("B"), lossy, on_done, time.monotonic() + OFFLOAD_LIMIT_S)
        with self._lock:
            if self._closed or not self._queue.add(offload):
                return False
            watch, self._watched = not self._watched, True
        if watch:
            self.deadlines.after(OFFLOAD_LIMIT_S, self._expire)
        self._drain_soon()
        return True

    def erase(self, names: Sequence[BlockName]) -> None:
        """No more of these blocks is written, except what is under way, and the vault forgets them."""
        with self._lock:
            dropped = self._queue.drop({name.hash for name in names})
        self._give_back(dropped, "erased")
        again = time.monotonic() - self._broke_at < OFFLOAD_LIMIT_S
        self._owe(names)
        if again:
            self.deadlines.after(AGAIN_S, lambda: self._owe(names))

    def _owe(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            owe(self.owed, names)
        self._erase_soon()

    def close(self) -> threading.Thread:
        """Returns at once, with the thread that will end. What waits is given back now, what is under way with it."""
        with self._lock:
            self._closed = True
            dropped = self._queue.expired(float("inf"))
        self._connection.close()
        self._give_back(dropped, GONE)
        return self._connection.thread

    def _drain_soon(self) -> None:
        with self._lock:
            if self._asked_to_drain:
                return
            self._asked_to_drain = True
        if not self._connection.submit(ConnectionJob(self._drain, self._broke)):
            self._asked_to_drain = False  # `_maintain` asks again

    def _erase_soon(self) -> None:
        with self._lock:
            if self._asked_to_erase or self._closed or not self.owed:
                return
            self._asked_to_erase = True
        if not self._connection.submit(ConnectionJob(self._erase, self._not_erased)):
            self._asked_to_erase = False  # `_maintain` asks again

    def _erase(self, client: DataPlaneClient) -> None:
        with self._lock:
            names = list(self.owed.values())
        for share in by_root(names):
            for at in share.parts(MAX_BLOCKS):
                client.erase(share.root, [names[one].hash for one in at], time.monotonic() + ERASE_LIMIT_S)
        with self._lock:
            for name in names:
                if self.owed.get(name.hash) is name:  # else it is to be forgotten once more
                    self.owed.pop(name.hash, None)
        self._asked_to_erase = False
        self._erase_soon()

    def _not_erased(self, reason: str) -> None:
        self.counts.failed(Tier.VAULT, "erase")
        self._asked_to_erase = False
        self.deadlines.after(AGAIN_S, self._erase_soon)

    def _give_back(self, offloads: Sequence[Offload], reason: str) -> None:
        if offloads:
            self.counts.failed(Tier.VAULT, f"offload_{reason}", len(offloads))
        for offload in offloads:
            offload.on_done()

    def _maintain(self, client: DataPlaneClient) -> None:
        """For what came while there was no connection."""
        if len(self._queue):
            self._drain_soon()
        self._erase_soon()

    def _drain(self, client: DataPlaneClient) -> None:
        """One batch; then other jobs have their turn."""
        now = time.monotonic()
        with self._lock:
            expired = self._queue.expired(now)
            batch = self._queue.take()
        self._give_back(expired, "expired")
        if batch:
            told = Counter(self._written(client, batch, min(offload.expires for offload in batch)))
            with self._lock:
                self._queue.done()
            self.counts.offloaded(told[PutStatus.STORED])
            for status in (PutStatus.REFUSED, PutStatus.CORRUPT):
                if told[status]:
                    self.counts.failed(Tier.VAULT, f"put_{status.value}", told[status])
            for offload in batch:
                offload.on_done()
        self._asked_to_drain = False
        self._maintain(client)

    def _broke(self, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            ended = self._queue.put_back(float("inf") if self._closed else now)
        self._broke_at = now
        self._asked_to_drain = False
        self._give_back(ended, "expired")

    def _written(self, client: DataPlaneClient, batch: Sequence[Offload], deadline: float) -> list[PutStatus]:
        """The fate of those that the vault did not have."""
        root = batch[0].name.root
        if self.settings.codec is not BlockCodec.RAW:  # encoding costs more than a question
            held = client.has(root, [offload.name.hash for offload in batch], False, deadline)
            batch = [offload for offload, has in zip(batch, held, strict=True) if not has]
        return client.put(root, self._encoded(batch), deadline) if batch else []

    def _encoded(self, offloads: Sequence[Offload]) -> list[tuple[BlockHeader, memoryview]]:
        """Sealed; encoded payloads lie in the scratch buffer."""
        codec, shape = self.settings.codec, self.settings.shape
        quantises = codec is not BlockCodec.RAW and shape.dtype != "int8"
        size = encoded_bytes(codec, shape) if quantises else 0
        if len(self._scratch) < size * len(offloads):
            self._scratch = bytearray(size * len(offloads))
        blocks = []
        for at, offload in enumerate(offloads):
            payload, room = offload.payload, memoryview(self._scratch)[at * size : (at + 1) * size]
            kv_format, shape = self.settings.form(offload.name.ids)
            encoded = choose(codec, shape, payload, room)
            is_lossy = encoded.codec is not BlockCodec.RAW
            if is_lossy:
                payload = room
                self.counts.quantised(encoded.snr_db, shape.raw_bytes, encoded.length)
            elif quantises and shape == self.settings.shape:
                self.counts.stayed_raw()
            lossy = offload.lossy or is_lossy
            header = BlockHeader(
                *offload.name[:4], kv_format, encoded.codec, shape.raw_bytes, encoded.length, lossy, encoded.snr_db
            )
            blocks.append((header.sealed(payload), payload))
        return blocks

    def _expire(self) -> None:
        """What is under way expires with its put instead."""
        with self._lock:
            expired = self._queue.expired(time.monotonic())
            watch = self._watched = self._queue.nbytes > 0  # what is under way may come back
        self._give_back(expired, "expired")
        if watch:
            self.deadlines.after(OFFLOAD_LIMIT_S / 10, self._expire)
