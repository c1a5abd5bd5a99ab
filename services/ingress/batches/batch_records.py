"""Adapter: files, batches and results, in the KV bucket that all ingresses share:

    file.<tenant>.<file>               FileHead
    chunk.<tenant>.<file>.<n>          512 KiB of it at most, whole lines
    batch.<tenant>.<batch>             BatchHead
    line.<tenant>.<batch>.<n>          QueuedResult of a line
    result.<tenant>.<request>          QueuedResult of a producer's request

A result is created, never changed: a line that ran twice has one result. The files of a batch's answers and errors are
its results, read when they are asked for. A bucket that is full takes nothing new; what is there stays for its age.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvfleet.ingress.settings import BatchLimits
from kvproto import codec
from kvproto.buckets import Bucket, StaleRevision
from kvproto.errors import CodecError, LimitExceeded, NotFound, Unavailable
from kvproto.ids import is_token, new_request_id
from kvproto.messages import BatchHead, FileHead, QueuedRequest, QueuedResult

UPLOAD_S = 600.0  # a file that is not ready by then was given up
HEADS = "batch.*.*"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    tenant: str
    head: BatchHead
    revision: int


@dataclass(frozen=True, slots=True)
class BatchRecords:
    """All methods raise Unavailable without JetStream. Keys carry the caller's tenant: others' are not found."""

    bucket: Bucket
    limits: BatchLimits

    # Files.

    async def store_file(self, tenant: str, name: str, chunks: list[bytes], expires_unix: int = 0) -> FileHead:
        """Raises LimitExceeded beyond the tenant's quota: its room is reserved before it is counted, so that two
        uploads at once do not both fit."""
        size = sum(map(len, chunks))
        head = FileHead(new_request_id(), name, size, int(time.time()), False, len(chunks), expires_unix)
        key = _file_key(tenant, head.file)
        revision = await self.bucket.update(key, codec.encode(head), 0)
        try:
            await self.check_room(tenant)
            for n, chunk in enumerate(chunks):
                await self.bucket.update(_chunk_key(tenant, head.file, n), chunk, 0)
            head = replace(head, ready=True)
            await self.bucket.update(key, codec.encode(head), revision)
        except BaseException:
            with contextlib.suppress(Unavailable):
                await self.drop_file(tenant, head)
            raise
        return head

    async def find_file(self, tenant: str, file: str) -> FileHead:
        """Raises NotFound."""
        if is_token(file):
            entry = await self.bucket.get(_file_key(tenant, file))
            if entry.value is not None:
                head = _read(FileHead, entry.key, entry.value)
                if head.ready and not _is_over(head):
                    return head
        raise no_file(file)

    async def files(self, tenant: str) -> list[FileHead]:
        """The ready ones, newest first. Those whose time is over go."""
        found = []
        for entry in await self.bucket.listed(f"file.{tenant}.*"):
            head = _read(FileHead, entry.key, entry.value or b"")
            if _is_over(head):
                await self.drop_file(tenant, head)
            else:
                found.append(head)
        return sorted(found, key=lambda one: (one.created_unix, one.file), reverse=True)

    async def chunk(self, tenant: str, file: str, n: int) -> bytes:
        entry = await self.bucket.get(_chunk_key(tenant, file, n))
        if entry.value is None:
            raise no_file(file)
        return entry.value

    async def chunks(self, tenant: str, head: FileHead) -> AsyncIterator[bytes]:
        for n in range(head.chunks):
            yield await self.chunk(tenant, head.file, n)

    async def drop_file(self, tenant: str, head: FileHead) -> None:
        """The head last: until then its room counts."""
        for n in range(head.chunks):
            await self.bucket.delete(_chunk_key(tenant, head.file, n))
        await self.bucket.delete(_file_key(tenant, head.file))

    async def check_room(self, tenant: str) -> None:
        """Raises LimitExceeded if the tenant has more than its quota."""
        files, batches = await asyncio.gather(self.files(tenant), self.batches(tenant))
        used = sum(one.bytes for one in files) + sum(one.head.result_bytes for one in batches)
        if used > self.limits.tenant_bytes:
            raise LimitExceeded(
                f"files and results of tenant {tenant} may take {self.limits.tenant_bytes} bytes, not {used}: "
                "delete some",
                field="file",
            )

    # Batches.

    async def begin(self, tenant: str, head: BatchHead) -> None:
        """Raises LimitExceeded beyond the tenant's quota."""
        await self.check_room(tenant)
        await self.bucket.update(_batch_key(tenant, head.batch), codec.encode(head), 0)
        active = [one for one in await self.batches(tenant) if not one.head.status.is_end]
        if len(active) > self.limits.tenant_batches:
            await self.bucket.delete(_batch_key(tenant, head.batch))
            raise LimitExceeded(f"at most {self.limits.tenant_batches} batches of tenant {tenant} at once")

    async def find(self, tenant: str, batch: str) -> StoredBatch:
        """Raises NotFound."""
        if is_token(batch):
            entry = await self.bucket.get(_batch_key(tenant, batch))
            if entry.value is not None:
                return StoredBatch(tenant, _read(BatchHead, entry.key, entry.value), entry.revision)
        raise NotFound(f"there is no batch 'batch_{batch[:80]}'", field="batch_id")

    async def batches(self, tenant: str) -> list[StoredBatch]:
        """Newest first."""
        entries = await self.bucket.listed(f"batch.{tenant}.*")
        found = [StoredBatch(tenant, _read(BatchHead, one.key, one.value or b""), one.revision) for one in entries]
        return sorted(found, key=lambda one: (one.head.created_unix, one.head.batch), reverse=True)

    async def change(self, stored: StoredBatch, head: BatchHead) -> StoredBatch:
        """Raises StaleRevision if it was changed in between."""
        revision = await self.bucket.update(_batch_key(stored.tenant, head.batch), codec.encode(head), stored.revision)
        return StoredBatch(stored.tenant, head, revision)

    # Results.

    async def is_done(self, tenant: str, asked: QueuedRequest) -> bool:
        return (await self.bucket.get(_result_key(tenant, asked))).value is not None

    async def record(self, tenant: str, asked: QueuedRequest, result: QueuedResult) -> bool:
        """Once: False if there is a result already."""
        try:
            await self.bucket.update(_result_key(tenant, asked), codec.encode(result), 0)
        except StaleRevision:
            return False
        return True

    async def results(self, tenant: str, batch: str) -> list[tuple[int, QueuedResult]]:
        """Those that are there, by line."""
        entries = await self.bucket.listed(f"line.{tenant}.{batch}.*")
        return sorted((line_of(one.key), _read(QueuedResult, one.key, one.value or b"")) for one in entries)

    async def drop_results(self, tenant: str, batch: str, lines: Iterable[int]) -> None:
        for line in lines:
            await self.bucket.delete(f"line.{tenant}.{batch}.{line}")


def no_file(file: str) -> NotFound:
    return NotFound(f"there is no file 'file-{file[:80]}'", field="file_id")


def line_of(key: str) -> int:
    return int(key.rpartition(".")[2])


def _is_over(head: FileHead) -> bool:
    now = time.time()
    return bool(head.expires_unix and head.expires_unix <= now) or not (
        head.ready or now < head.created_unix + UPLOAD_S
    )


def _file_key(tenant: str, file: str) -> str:
    return f"file.{tenant}.{file}"


def _chunk_key(tenant: str, file: str, n: int) -> str:
    return f"chunk.{tenant}.{file}.{n}"


def _batch_key(tenant: str, batch: str) -> str:
    return f"batch.{tenant}.{batch}"


def _result_key(tenant: str, asked: QueuedRequest) -> str:
    return f"line.{tenant}.{asked.batch}.{asked.line}" if asked.batch else f"result.{tenant}.{asked.request}"


def _read(kind: type[T], key: str, value: bytes) -> T:
    try:
        return codec.decode(kind, value)
    except CodecError as error:
        raise Unavailable(f"the record {key} is unreadable: {error}") from None
