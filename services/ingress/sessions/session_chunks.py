"""Loop: what lies beside a session's head in the bucket: its history in chunks of 4,096 ids, and its strays.

    <tenant>.<hash of seq_id>.<generation>.<n>       ids n * 4096 ... of one history
    <tenant>.<hash of seq_id>.<generation>.strays    what was computed beside it, if anything was

A head names the generation that counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from kvproto import codec
from kvproto.block_hash import unpack_ids
from kvproto.buckets import Entry, StaleRevision
from kvproto.errors import CodecError, KvfleetError, Unavailable
from kvproto.messages import SessionHead, SessionStrays, Stray

CHUNK_IDS = 4096
WRITE_TRIES = 4


class KeyValue(Protocol):
    """The part of `kvproto.buckets.Bucket` that is needed here. All methods may raise Unavailable."""

    async def get(self, key: str) -> Entry: ...
    async def update(self, key: str, value: bytes, revision: int) -> int: ...
    async def delete(self, key: str, revision: int | None = None) -> None: ...


class SessionChunks:
    """Holds nothing itself."""

    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def history(self, key: str, head: SessionHead) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The history that a head names, and its chunks' revisions; None where they have just been replaced."""
        chunks = await asyncio.gather(
            *(self._bucket.get(chunk_key(key, head.generation, n)) for n in range(chunks_of(head.length)))
        )
        if any(chunk.value is None for chunk in chunks):
            return None
        ids = unpack_ids(b"".join((chunk.value or b"")[: 4 * CHUNK_IDS] for chunk in chunks))
        return (ids[: head.length], tuple(chunk.revision for chunk in chunks)) if len(ids) >= head.length else None

    async def strays(self, key: str, head: SessionHead) -> tuple[Stray, ...]:
        """What a head says that there is beside its history."""
        if not head.strays:
            return ()
        entry = await self._bucket.get(_strays_key(key, head.generation))
        try:
            return codec.decode(SessionStrays, entry.value).chains if entry.value is not None else ()
        except CodecError as error:
            raise Unavailable(f"the record {entry.key} is unreadable: {error}") from None

    async def write_strays(self, key: str, generation: str, strays: Sequence[Stray]) -> None:
        """In place of those that lie there."""
        key, data = _strays_key(key, generation), codec.encode(SessionStrays(tuple(strays)))
        for _ in range(WRITE_TRIES):
            entry = await self._bucket.get(key)
            with contextlib.suppress(StaleRevision):
                await self._bucket.update(key, data, entry.revision)
                return
        raise Unavailable(f"{key} is being written by others", retry_after_s=1.0)

    async def erase(self, key: str, head: SessionHead) -> None:
        """The head no longer names them, so a failure here only wastes their bytes."""
        keys = [chunk_key(key, head.generation, n) for n in range(chunks_of(head.length))]
        if head.strays:
            keys.append(_strays_key(key, head.generation))
        with contextlib.suppress(KvfleetError):
            await asyncio.gather(*map(self._bucket.delete, keys))


def chunk_key(key: str, generation: str, n: int) -> str:
    return f"{key}.{generation}.{n}"


def chunks_of(length: int) -> int:
    return -(-length // CHUNK_IDS)


def _strays_key(key: str, generation: str) -> str:
    return f"{key}.{generation}.strays"
