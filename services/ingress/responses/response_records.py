"""Adapter: stored responses, in the KV bucket that all ingresses share:

    <tenant>.<request>                      ResponseHead, which holds or names what was asked and said
    <tenant>.<request>.<generation>.<n>     256 KiB of it
    active.<tenant>.<request>               ActiveResponse: it runs in the background, and who sees to it

The bucket has a size and an age: the oldest records give way. One that has lost a chunk is not found.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace

from kvfleet.ingress.runs.transcript import Transcript
from kvproto import codec
from kvproto.buckets import Bucket, StaleRevision
from kvproto.errors import CodecError, NotFound, Unavailable
from kvproto.ids import new_process_id
from kvproto.messages import (
    ActiveResponse,
    Finished,
    ResponseAsked,
    ResponseHead,
    ResponseStatus,
    Started,
    StoredBytes,
    TokenLogprobs,
    Tokens,
)

ACTIVE = "active.*.*"
INLINE_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024
TRIES = 5  # to begin
NOTHING = StoredBytes()


@dataclass(frozen=True, slots=True)
class StoredResponse:
    tenant: str
    head: ResponseHead
    revision: int

    @property
    def is_over(self) -> bool:
        return self.head.status is not ResponseStatus.IN_PROGRESS


def not_found(request: str, field: str = "response_id") -> NotFound:
    return NotFound(f"there is no stored response 'resp_{request[:80]}'", field=field)


@dataclass(frozen=True, slots=True)
class ResponseRecords:
    """All methods raise Unavailable without JetStream. Keys carry the caller's tenant: others' are not found."""

    bucket: Bucket

    async def find(self, tenant: str, request: str, field: str = "response_id") -> StoredResponse:
        """Raises NotFound naming `field`."""
        entry = await self.bucket.get(_key(tenant, request))
        if entry.value is None:
            raise not_found(request, field)
        try:
            return StoredResponse(tenant, codec.decode(ResponseHead, entry.value), entry.revision)
        except CodecError as error:
            raise Unavailable(f"the record of response {request} is unreadable: {error}") from None

    async def asked(self, stored: StoredResponse) -> ResponseAsked:
        """Raises NotFound if it has given way."""
        data = await self._read(stored, stored.head.asked)
        try:
            return codec.decode(ResponseAsked, data)
        except CodecError as error:
            raise Unavailable(f"what response {stored.head.request} was asked for is unreadable: {error}") from None

    async def said(self, stored: StoredResponse) -> Transcript:
        """All that it brought. Raises NotFound if it has given way."""
        transcript = Transcript()
        if stored.head.said is not None:
            transcript.take(codec.decode_frames(await self._read(stored, stored.head.said)))  # type: ignore[arg-type]
        return transcript

    async def begin(self, head: ResponseHead, asked: ResponseAsked, active: ActiveResponse) -> int:
        """Of a response in the background; returns the active record's revision, 0 if it has begun elsewhere. An active
        record without a head is of an ingress that died between the two, or is there just now: either head will do."""
        key, active_key = _key(active.tenant, head.request), _active_key(active.tenant, active.request)
        for _ in range(TRIES):
            entry, known = await asyncio.gather(self.bucket.get(key), self.bucket.get(active_key))
            if entry.value is not None:
                return 0
            with contextlib.suppress(StaleRevision):
                revision = await self.hold(active, known.revision)
                break
        else:
            raise Unavailable(f"response {head.request} is begun elsewhere, too", retry_after_s=1.0)
        kept = await self._keep(key, codec.encode(asked))
        try:
            await self.bucket.update(key, codec.encode(replace(head, asked=kept)), entry.revision)
        except StaleRevision:
            await self._forget(key, kept)
        return revision

    async def end(self, tenant: str, head: ResponseHead, asked: ResponseAsked, transcript: Transcript | None) -> None:
        """Store it with its end, unless it has one. One that ran in the background is active no more; if it has no
        record, it was deleted."""
        key = _key(tenant, head.request)
        entry = await self.bucket.get(key)
        before = codec.decode(ResponseHead, entry.value) if entry.value is not None else None
        if before.status is ResponseStatus.IN_PROGRESS if before is not None else not head.background:
            asked_kept, said_kept = await asyncio.gather(
                self._keep(key, codec.encode(replace(asked, prompt_ids=()))),
                self._keep(key, _frames(transcript) if transcript is not None else b""),
            )
            told = replace(head, asked=asked_kept, said=said_kept if transcript is not None else None)
            try:
                await self.bucket.update(key, codec.encode(told), entry.revision)
                await self._forget(key, before.asked if before is not None else NOTHING)
            except StaleRevision:  # another ingress ended it, or it was deleted
                await self._forget(key, asked_kept, said_kept)
        if head.background:
            await self.drop(tenant, head.request)

    async def cancel(self, stored: StoredResponse, now: int) -> StoredResponse:
        """Raises StaleRevision if it has just ended."""
        head = replace(stored.head, status=ResponseStatus.CANCELLED, ended_unix=now)
        revision = await self.bucket.update(_key(stored.tenant, head.request), codec.encode(head), stored.revision)
        await self.drop(stored.tenant, head.request)
        return StoredResponse(stored.tenant, head, revision)

    async def erase(self, stored: StoredResponse) -> None:
        """Raises StaleRevision if it has just ended."""
        key = _key(stored.tenant, stored.head.request)
        await self.bucket.delete(key, stored.revision)
        await self._forget(key, stored.head.asked, stored.head.said or NOTHING)
        if stored.head.background:
            await self.drop(stored.tenant, stored.head.request)

    async def hold(self, active: ActiveResponse, revision: int) -> int:
        """See to it, if the record's revision is this one. Raises StaleRevision."""
        return await self.bucket.update(_active_key(active.tenant, active.request), codec.encode(active), revision)

    async def drop(self, tenant: str, request: str, revision: int | None = None) -> None:
        """It runs no more. With a revision: raises StaleRevision if somebody else sees to it."""
        await self.bucket.delete(_active_key(tenant, request), revision)

    async def _keep(self, key: str, data: bytes) -> StoredBytes:
        if len(data) <= INLINE_BYTES:
            return StoredBytes(data)
        kept = StoredBytes(generation=new_process_id(), chunks=-(-len(data) // CHUNK_BYTES))
        parts = [data[at * CHUNK_BYTES :][:CHUNK_BYTES] for at in range(kept.chunks)]
        chunks = zip(_chunk_keys(key, kept), parts, strict=True)
        await asyncio.gather(*(self.bucket.update(chunk, part, 0) for chunk, part in chunks))
        return kept

    async def _read(self, stored: StoredResponse, kept: StoredBytes) -> bytes:
        keys = _chunk_keys(_key(stored.tenant, stored.head.request), kept)
        chunks = [entry.value for entry in await asyncio.gather(*map(self.bucket.get, keys))]
        if not all(chunks):
            raise not_found(stored.head.request)
        return b"".join(filter(None, chunks)) if keys else kept.inline

    async def _forget(self, key: str, *kept: StoredBytes) -> None:
        """What is left gives way with time."""
        with contextlib.suppress(Unavailable):
            await asyncio.gather(*(self.bucket.delete(chunk) for one in kept for chunk in _chunk_keys(key, one)))


def _key(tenant: str, request: str) -> str:
    return f"{tenant}.{request}"


def _active_key(tenant: str, request: str) -> str:
    return f"active.{tenant}.{request}"


def _chunk_keys(key: str, kept: StoredBytes) -> list[str]:
    return [f"{key}.{kept.generation}.{n}" for n in range(kept.chunks)]


def _frames(transcript: Transcript) -> bytes:
    said, started, finished = transcript.choices[0], transcript.started, transcript.finished
    assert finished is not None
    scores: tuple[TokenLogprobs, ...] = tuple(said.logprobs) if said.is_scored else ()
    tokens = Tokens(finished.request, finished.attempt, 0, 0, tuple(said.ids), tuple(said.pieces), scores)
    frames: list[Started | Tokens | Finished] = [one for one in (started, tokens, finished) if one is not None]
    return codec.encode_frames(frames)
