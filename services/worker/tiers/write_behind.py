"""Blocks on their way to one vault, and what it is to forget. Thread-safe; owns the queue and a connection of its own.

    offer ──▶ queue ──a batch──▶ has it? ──▶ encode ──▶ put ──▶ done
                ▲──────────── it did not get through ─────│
    erase: what waits is dropped; the vault forgets after the batch that is under way

The caller is told at once when the queue is full, and `on_done` is called in any case, at the latest some seconds
after OFFLOAD_LIMIT_S: then the memory is its owner's again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvfleet.worker.blocks.chain_location import BlockName
from kvfleet.worker.tiers.block_codec import BlockShape, choose, encoded_bytes
from kvfleet.worker.tiers.connection_thread import Connect, ConnectionThread
from kvfleet.worker.tiers.deadlines import Deadlines
from kvfleet.worker.tiers.offload_queue import Offload, OffloadQueue
from kvfleet.worker.tiers.remote_counts import RemoteCounts
from kvfleet.worker.tiers.vault_ring import by_root
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.client import DataPlaneClient, PutStatus
from kvproto.dataplane.wire import MAX_BLOCKS
from kvproto.messages import Tier

OFFLOAD_LIMIT_S = 10.0
ERASE_LIMIT_S = 5.0
AGAIN_S = 2.0  # from an erase that failed, or that a broken put may have outlived, to the second one

Blocks = list[tuple[BlockHeader, memoryview]]


class WriteBehind:
    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        kv_format: bytes,
        shape: BlockShape,
        codec: BlockCodec,
        max_bytes: int,
        deadlines: Deadlines,
        counts: RemoteCounts,
    ) -> None:
        self._format = kv_format
        self._shape = shape
        self._codec = codec
        self._deadlines = deadlines
        self._counts = counts
        self._lock = threading.Lock()
        self._queue = OffloadQueue(max_bytes)
        self._asked_to_drain = False
        self._watched = False
        self._closed = False
        self._broke_at = float("-inf")  # when a put ended of which nobody knows what became of it
        self._scratch = bytearray()
        self._connection = ConnectionThread(f"{name}-write", connect, self._maintain)

    # ------------------------------------------------------------------ any thread

    def offer(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        """False: the queue is full, and nothing happens."""
        offload = Offload(name, payload.cast("B"), lossy, on_done, time.monotonic() + OFFLOAD_LIMIT_S)
        with self._lock:
            if self._closed or not self._queue.add(offload):
                return False
            watch, self._watched = not self._watched, True
        if watch:
            self._deadlines.after(OFFLOAD_LIMIT_S, self._expire)
        self._drain_soon()
        return True

    def erase(self, names: Sequence[BlockName]) -> None:
        self.drop({name.hash for name in names})
        again = time.monotonic() - self._broke_at < OFFLOAD_LIMIT_S
        self._erase(names, last=False)
        if again:
            self._deadlines.after(AGAIN_S, lambda: self._erase(names, last=True))

    def drop(self, hashes: Collection[bytes]) -> None:
        """Nothing of these blocks is written that is not under way already."""
        with self._lock:
            dropped = self._queue.drop(hashes)
        self._give_back(dropped, "erased")

    def close(self) -> list[threading.Thread]:
        """Waits for nothing: the thread that will end. What waits is given back now, what is under way with it."""
        with self._lock:
            self._closed = True
            dropped = self._queue.drop_all()
        self._connection.close()
        self._give_back(dropped, "gone")
        return [self._connection.thread]

    # ------------------------------------------------------------------ the connection's thread

    def _maintain(self, client: DataPlaneClient) -> None:
        """Connected, or nothing to do: what waits since there was no connection goes now."""
        if len(self._queue):
            self._drain_soon()

    def _drain_soon(self) -> None:
        with self._lock:
            if self._asked_to_drain:
                return
            self._asked_to_drain = True
        if not self._connection.submit(_Job(self._drain, self._broke)):
            self._asked_to_drain = False  # `_maintain` asks again

    def _erase(self, names: Sequence[BlockName], *, last: bool) -> None:
        """Tried twice. Any thread."""

        def run(client: DataPlaneClient) -> None:
            for share in by_root(names):
                for start in range(0, len(share.at), MAX_BLOCKS):
                    hashes = [names[at].hash for at in share.at[start : start + MAX_BLOCKS]]
                    client.erase(share.root, hashes, time.monotonic() + ERASE_LIMIT_S)

        def fail(reason: str) -> None:
            if last or self._closed:
                self._counts.failed(Tier.VAULT, "erase")
            else:
                self._deadlines.after(AGAIN_S, lambda: self._erase(names, last=True))

        if not self._connection.submit(_Job(run, fail)):
            fail("gone")

    def _drain(self, client: DataPlaneClient) -> None:
        """One batch; then whatever else was asked for has its turn."""
        now = time.monotonic()
        with self._lock:
            expired = self._queue.expired(now)
            batch = self._queue.take()
        self._give_back(expired, "expired")
        if batch:
            self._note(batch, self._written(client, batch, min(offload.expires for offload in batch)))
        self._asked_to_drain = False
        if len(self._queue):
            self._drain_soon()

    def _note(self, batch: Sequence[Offload], statuses: Sequence[PutStatus]) -> None:
        with self._lock:
            self._queue.done()
        told = Counter(statuses)
        self._counts.offloaded(told[PutStatus.STORED])
        for status in (PutStatus.REFUSED, PutStatus.CORRUPT):
            if told[status]:
                self._counts.failed(Tier.VAULT, f"put_{status.value}", told[status])
        for offload in batch:
            offload.on_done()

    def _broke(self, reason: str) -> None:
        """The batch did not get through, if there was one."""
        now = time.monotonic()
        with self._lock:
            ended = self._queue.put_back(float("inf") if self._closed else now)
        self._broke_at = now
        self._asked_to_drain = False
        self._give_back(ended, "expired")

    def _written(self, client: DataPlaneClient, batch: Sequence[Offload], deadline: float) -> list[PutStatus]:
        root, lossy = batch[0].name.root, batch[0].lossy
        statuses = [PutStatus.PRESENT] * len(batch)
        asked = list(range(len(batch)))
        if self._codec is not BlockCodec.RAW:  # encoding costs more than to ask
            held = client.has(root, [offload.name.hash for offload in batch], False, deadline)
            asked = [at for at in asked if not held[at]]
        blocks = self._encoded([batch[at] for at in asked], lossy=lossy)
        if blocks:
            for at, status in zip(asked, client.put(root, blocks, deadline), strict=True):
                statuses[at] = status
        return statuses

    def _encoded(self, offloads: Sequence[Offload], *, lossy: bool) -> Blocks:
        """Sealed; payloads lie in the scratch buffer, or where they were where a block stays raw."""
        quantises = self._codec is not BlockCodec.RAW and self._shape.dtype != "int8"
        size = encoded_bytes(self._codec, self._shape) if quantises else 0
        if len(self._scratch) < size * len(offloads):
            self._scratch = bytearray(size * len(offloads))
        blocks: Blocks = []
        for at, offload in enumerate(offloads):
            room = memoryview(self._scratch)[at * size : (at + 1) * size]
            encoded = choose(self._codec, self._shape, offload.payload, room)
            payload = offload.payload if encoded.codec is BlockCodec.RAW else room
            if encoded.codec is not BlockCodec.RAW:
                self._counts.quantised(encoded.snr_db, self._shape.raw_bytes, encoded.length)
            elif quantises:
                self._counts.stayed_raw()
            header = BlockHeader(
                *offload.name[:4],
                self._format,
                encoded.codec,
                self._shape.raw_bytes,
                encoded.length,
                lossy or encoded.codec is not BlockCodec.RAW,
                encoded.snr_db,
            )
            blocks.append((header.sealed(payload), payload))
        return blocks

    # ------------------------------------------------------------------ the deadlines' thread

    def _expire(self) -> None:
        """What is under way expires with its put."""
        with self._lock:
            expired = self._queue.expired(time.monotonic())
            self._watched = bool(len(self._queue))
            watch = self._watched
        self._give_back(expired, "expired")
        if watch:
            self._deadlines.after(OFFLOAD_LIMIT_S / 10, self._expire)

    def _give_back(self, offloads: Sequence[Offload], reason: str) -> None:
        if offloads:
            self._counts.failed(Tier.VAULT, f"offload_{reason}", len(offloads))
        for offload in offloads:
            offload.on_done()


@dataclass(frozen=True, slots=True)
class _Job:
    """Of the connection's thread."""

    run: Callable[[DataPlaneClient], None]
    fail: Callable[[str], None]
