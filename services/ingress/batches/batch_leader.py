"""Loop: leads batches. Each is led by the ingress that its head names, elected by compare-and-set.

    validating ─▶ in_progress ─▶ completed         its lines are queued, so many at a time, and their results counted
        │              ├─▶ expired                 what has no result by then gets none
        ▼              └─▶ cancelling ─▶ cancelled
      failed

A leader that is gone is replaced within a second, by one that goes on from the head: lines that were queued twice have
one result all the same. If the queue has lost lines, those without a result are queued again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvfleet.ingress.batches.batch_input import InputCheck, lines_of, read_line
from kvfleet.ingress.batches.batch_records import BatchRecords, StoredBatch, line_of
from kvproto import codec
from kvproto.buckets import BucketFollower, BucketWatch, StaleRevision
from kvproto.errors import CodecError, KvfleetError, LimitExceeded, NotFound, Unavailable
from kvproto.messages import BatchFault, BatchHead, BatchStatus, QueuedRequest, QueuedResult
from kvproto.subjects import tenant_of_batch
from kvproto.tasks import end
from kvproto.work_queue import WorkQueue

log = logging.getLogger(__name__)

LOOK_S = 0.5
TICK_S = 0.25
TELL_S = 1.0  # between two counts in the head
ROOM_S = 5.0  # between two looks at the tenant's quota
LOST_S = 5.0  # without a result, and nothing in the queue: its lines are lost
WINDOW = 256  # lines of one batch that are queued and have no result
MAX_TAKEOVERS = 64
Found = tuple[str, str]  # tenant, batch


@dataclass(eq=False)
class Leader:
    """Leads one batch. Owned by its task; `stored` is its head as this ingress wrote or read it last."""

    records: BatchRecords
    queue: WorkQueue
    stored: StoredBatch
    done: dict[int, tuple[bool, int]] = field(default_factory=dict)  # by line: whether it is good, and its bytes
    _results: BucketFollower | None = None
    _chunk: list[bytes] = field(default_factory=list)
    _chunk_from: int = 0  # the line that it begins with
    _next_chunk: int = 0
    _changed_at: float = 0.0
    _told_at: float = 0.0
    _room_at: float = 0.0
    _has_room: bool = True
    _again: int = 0  # times that lost lines were queued again

    @property
    def head(self) -> BatchHead:
        return self.stored.head

    async def lead(self) -> None:
        """To its end, or until another ingress leads it. Raises KvfleetError."""
        if self.head.status is BatchStatus.VALIDATING:
            await self._validate()
        if self.head.status.is_end:
            return
        tenant, batch = self.stored.tenant, self.head.batch
        bucket = self.records.bucket
        results = self._results = BucketFollower(
            self.queue.connection, bucket.name, f"line.{tenant}.{batch}.*", "batch-results", self._read
        )
        await results.start(10.0)
        self._changed_at = time.monotonic()
        try:
            while not await self._tick():
                await asyncio.sleep(TICK_S)
        finally:
            await results.stop()

    def heard(self, stored: StoredBatch) -> None:
        """Another one has changed the head: its caller cancels it."""
        if stored.revision > self.stored.revision:
            self.stored = stored

    async def _read(self, watch: BucketWatch) -> None:
        async for entry in watch.entries():
            if entry is None and self._results is not None:
                self._results.listed.set()
            if entry is None or entry.value is None:
                continue
            try:
                result = codec.decode(QueuedResult, entry.value)
            except CodecError as error:
                log.warning("batch %s: result %s is unreadable: %s", self.head.batch, entry.key, error)
                continue
            self.done[line_of(entry.key)] = result.is_good, len(entry.value)
            self._changed_at = time.monotonic()

    async def _validate(self) -> None:
        tenant, head, check = self.stored.tenant, self.head, InputCheck(self.head.endpoint)
        try:
            file = await self.records.find_file(tenant, head.input_file)
            async for chunk in self.records.chunks(tenant, file):
                await asyncio.to_thread(check.read, chunk)
            check.end()
        except NotFound as error:
            check.faults.append(BatchFault("no_file", error.message))
        now = int(time.time())
        if check.faults:
            await self._change(status=BatchStatus.FAILED, faults=tuple(check.faults), ended_unix=now)
        else:
            await self._change(status=BatchStatus.IN_PROGRESS, total=check.total, started_unix=now)

    async def _tick(self) -> bool:
        """True: it has ended."""
        head, now = self.head, time.time()
        if head.status is BatchStatus.CANCELLING:
            await self._end(BatchStatus.CANCELLED)
        elif len(self.done) >= head.total:
            await self._end(BatchStatus.COMPLETED)
        elif now >= head.expires_unix:
            await self._end(BatchStatus.EXPIRED)
        if self.head.status.is_end:
            return True
        await self._feed()
        if time.monotonic() - self._told_at >= TELL_S and len(self.done) != head.completed + head.failed:
            self._told_at = time.monotonic()
            await self._change(**self._counts())
        return False

    async def _end(self, status: BatchStatus) -> None:
        await self._change(status=status, ended_unix=int(time.time()), **self._counts())
        log.info("batch %s: %s, %d of %d lines", self.head.batch, status.value, len(self.done), self.head.total)

    def _counts(self) -> dict[str, int]:
        good = sum(is_good for is_good, _ in self.done.values())
        size = sum(size for _, size in self.done.values())
        return {"completed": good, "failed": len(self.done) - good, "result_bytes": size}

    async def _change(self, **changes: object) -> None:
        """Raises StaleRevision if another ingress leads it now; a cancellation in between is kept."""
        if self.head.status is BatchStatus.CANCELLING and changes.get("status") is BatchStatus.IN_PROGRESS:
            changes["status"] = BatchStatus.CANCELLING
        try:
            self.stored = await self.records.change(self.stored, replace(self.head, **changes))  # type: ignore[arg-type]
        except StaleRevision:
            found = await self.records.find(self.stored.tenant, self.head.batch)
            if found.head.ingress != self.head.ingress or found.head.status.is_end:
                raise
            self.stored = found  # it was cancelled: the next tick says so

    # Queueing.

    async def _feed(self) -> None:
        head = self.head
        if not await self._room():
            return
        try:
            if head.queued < head.total:
                await self._queue_more(min(head.total, len(self.done) + WINDOW))
            elif time.monotonic() - self._changed_at > LOST_S and not await self._any_waiting():
                await self._queue_again()
        except LimitExceeded as error:
            log.debug("batch %s waits: %s", head.batch, error)  # the queue is full: there is enough to do

    async def _room(self) -> bool:
        """Whether its tenant may have more results."""
        if time.monotonic() - self._room_at >= ROOM_S:
            self._room_at = time.monotonic()
            try:
                await self.records.check_room(self.stored.tenant)
                self._has_room = True
            except LimitExceeded as error:
                self._has_room = False
                log.info("batch %s waits: %s", self.head.batch, error)
        return self._has_room

    async def _queue_more(self, until: int) -> None:
        """A line is queued before the head says so: a successor may queue some again."""
        line = self.head.queued
        try:
            while line < until and self.head.status is BatchStatus.IN_PROGRESS:
                if line not in self.done:
                    await self._put(line, f"{self.head.batch}.{line}")
                line += 1
        finally:
            if line > self.head.queued:
                await self._change(queued=line)

    async def _any_waiting(self) -> bool:
        """Of its tenant's lines. So lost lines are missed for as long as the tenant has others there."""
        own = self.stored.tenant, True
        return any(tenant_of_batch(subject) == own for subject in await self.queue.waiting())

    async def _queue_again(self) -> None:
        self._changed_at = time.monotonic()
        missing = [line for line in range(self.head.total) if line not in self.done][:WINDOW]
        self._again += 1
        log.warning("batch %s: the queue has lost %d lines, they are queued again", self.head.batch, len(missing))
        for line in missing:
            await self._put(line, f"{self.head.batch}.{line}.{self.head.ingress}.{self.head.takeovers}.{self._again}")

    async def _put(self, line: int, message_id: str) -> None:
        said = read_line(await self._line(line), self.head.endpoint)
        asked = QueuedRequest(
            f"{self.head.batch}-{line}",
            said.body,
            self.head.endpoint,
            self.head.expires_unix,
            self.head.batch,
            line,
            said.custom_id,
            self.head.caller,
        )
        subject = self.queue.subjects.batch_line(self.stored.tenant, said.model)
        await self.queue.put(subject, codec.encode(asked), message_id)

    async def _line(self, line: int) -> bytes:
        """Lines are read in order, a chunk at a time."""
        if line < self._chunk_from:
            self._chunk, self._chunk_from, self._next_chunk = [], 0, 0
        while line >= self._chunk_from + len(self._chunk):
            self._chunk_from += len(self._chunk)
            data = await self.records.chunk(self.stored.tenant, self.head.input_file, self._next_chunk)
            self._chunk = list(lines_of(data))
            self._next_chunk += 1
        return self._chunk[line - self._chunk_from]


@dataclass(eq=False)
class BatchLeaders:
    """Which batches there are, and those that this ingress leads. Owned by the event loop. `is_alive` says so of other
    ingresses."""

    records: BatchRecords
    queue: WorkQueue
    ingress: str
    is_alive: Callable[[str], bool]
    is_draining: Callable[[], bool]
    on_change: Callable[[str, BatchHead], None] = lambda tenant, head: None
    taken_over_total: int = 0
    _known: dict[Found, StoredBatch] = field(default_factory=dict)
    _led: dict[Found, tuple[Leader, asyncio.Task[None]]] = field(default_factory=dict)

    @property
    def led(self) -> int:
        return len(self._led)

    def status_of(self, tenant: str, batch: str) -> BatchStatus | None:
        """As far as this ingress has heard."""
        stored = self._known.get((tenant, batch))
        return None if stored is None else stored.head.status

    async def read(self, watch: BucketWatch) -> None:
        """Of `HEADS`."""
        async for entry in watch.entries():
            if entry is None:
                continue
            _, tenant, batch = entry.key.split(".")
            if entry.value is None:
                self._known.pop((tenant, batch), None)
                continue
            try:
                head = codec.decode(BatchHead, entry.value)
            except CodecError as error:
                log.warning("batches: record %s is unreadable: %s", entry.key, error)
                continue
            stored = self._known[tenant, batch] = StoredBatch(tenant, head, entry.revision)
            if (tenant, batch) in self._led:
                self._led[tenant, batch][0].heard(stored)
            self.on_change(tenant, head)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for found, stored in list(self._known.items()):
                if not stored.head.status.is_end and found not in self._led and self._is_left(stored.head):
                    await self._take(found, stored)

    def _is_left(self, head: BatchHead) -> bool:
        return not self.is_draining() and (head.ingress in ("", self.ingress) or not self.is_alive(head.ingress))

    async def _take(self, found: Found, stored: StoredBatch) -> None:
        head = stored.head
        taken = replace(head, ingress=self.ingress, takeovers=head.takeovers + bool(head.ingress))
        if taken.takeovers > MAX_TAKEOVERS:
            fault = BatchFault("internal_error", f"{MAX_TAKEOVERS} ingresses ended while they led it")
            taken = replace(taken, status=BatchStatus.FAILED, faults=(fault,), ended_unix=int(time.time()))
        try:
            mine = await self.records.change(stored, taken)
        except StaleRevision:
            return  # another ingress was faster
        except Unavailable as error:
            log.warning("batch %s is not taken yet: %s", head.batch, error)
            return
        self._known[found] = mine
        if taken.status.is_end:
            return
        if head.ingress and head.ingress != self.ingress:
            self.taken_over_total += 1
            log.info("batch %s: its ingress is gone, it goes on here", head.batch)
        leader = Leader(self.records, self.queue, mine)
        self._led[found] = leader, asyncio.create_task(self._lead(found, leader), name=f"batch-{head.batch}")

    async def _lead(self, found: Found, leader: Leader) -> None:
        batch = leader.head.batch
        try:
            await leader.lead()
        except StaleRevision:
            log.info("batch %s: another ingress leads it now", batch)
        except KvfleetError as error:
            log.warning("batch %s: %s; it goes on in a moment", batch, error)
            await asyncio.sleep(LOOK_S)
        except Exception:  # the task's top: the batch must not stand still for a fault
            log.exception("batch %s failed to be led, and is tried again", batch)
            await asyncio.sleep(LOOK_S)
        finally:
            del self._led[found]
            known = self._known.get(found)
            if known is not None and leader.stored.revision > known.revision:
                self._known[found] = leader.stored

    async def hand_over(self) -> None:
        """To the other ingresses."""
        led = list(self._led.values())
        await end([task for _, task in led])
        for leader, _ in led:
            with contextlib.suppress(KvfleetError):
                if not leader.head.status.is_end:
                    await self.records.change(leader.stored, replace(leader.head, ingress=""))

    async def close(self) -> None:
        await end([task for _, task in self._led.values()])
