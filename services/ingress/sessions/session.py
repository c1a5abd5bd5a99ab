"""Loop: one session as an ingress reads it, its open turn, and its records in the KV bucket:

    <tenant>.<hash of seq_id>                        SessionHead, which names the generation that counts
    <tenant>.<hash of seq_id>.<generation>.<n>       ids n * 4096 ... of one history
    <tenant>.<hash of seq_id>.<generation>.strays    what was computed beside it, if anything was

All is written by compare-and-set. A record newer than this ingress knows may be its own (a write that timed out and was
delivered after all) or of the same request at another ingress: it is adopted, and the write is tried once more. Any
other newer record means that the turn is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvfleet.ingress.settings import SessionLimits
from kvproto import codec
from kvproto.block_hash import pack_ids, unpack_ids
from kvproto.buckets import Bucket, StaleRevision
from kvproto.errors import CodecError, KvfleetError, SessionBusy, SessionNotFound, Unavailable
from kvproto.messages import SessionHead, SessionStrays, Stray, Turn
from kvproto.regions import MAX_REGIONS

CHUNK_IDS = 4096
WRITE_TRIES = 4
MAX_OBSERVED = 65_536  # sessions


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it was read; `head` None: it does not exist."""

    key: str
    seq_id: str
    revision: int
    head: SessionHead | None = None
    ids: tuple[int, ...] = ()
    chunk_revisions: tuple[int, ...] = ()
    expired: SessionHead | None = None  # its record, until it is swept
    strays: tuple[Stray, ...] = ()  # of one that was erased

    def is_last(self, request: str) -> bool:
        """Whether this request's turn was committed last."""
        return self.head is not None and self.head.last_request == request

    def before_last(self) -> Session:
        """With the history as it was before the turn that was committed last."""
        assert self.head is not None
        return replace(self, ids=self.ids[: self.head.last_start])

    def has_moved_on(self, request: str) -> bool:
        """Whether another turn may have begun since this request's turn."""
        head = self.head
        if head is None or (head.turn is not None and head.turn.request == request):
            return False
        return request not in (head.last_request, head.left_request)


@dataclass(slots=True)
class OpenTurn:
    """The running turn that this ingress holds of a session. `revision` is the head's; `lock` guards both."""

    session: Session
    head: SessionHead
    revision: int
    ended: bool = False  # committed or abandoned
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def request(self) -> str:
        return self.head.turn.request if self.head.turn is not None else ""


@dataclass(eq=False, slots=True)
class LeaseObserver:
    """For how long a running turn's record has not changed, by this process's own clock.

    A lease is renewed by writing the record again. Wall clocks may differ by hours, so a record that was unchanged for
    a whole lease of local time counts as not renewed (as in Kubernetes' leader election).
    """

    _seen: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)

    def unchanged_s(self, key: str, revision: int, now: float) -> float:
        known = self._seen.get(key)
        if known is None or known[0] != revision:
            known = self._seen[key] = revision, now
            if len(self._seen) > MAX_OBSERVED:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return now - known[1]

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)


def is_expired(head: SessionHead, now_ms: int, limits: SessionLimits) -> bool:
    return head.turn is None and now_ms - head.updated_unix_ms > limits.idle_expiry_s * 1000


def is_as_before(session: Session, head: SessionHead | None, request: str) -> bool:
    """Whether a session has had no turn since it was read but this request's own, begun at any ingress. A new session
    that had only that has no head once the turn is abandoned."""
    before = session.head
    is_new = before is None or not before.turns
    if head is None:
        return is_new
    if request != (head.turn.request if head.turn is not None else head.left_request):
        return False
    if before is None or is_new:
        return not head.turns
    return (head.generation, head.length, head.turns) == (before.generation, before.length, before.turns)


def joined(before: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    """Regions that a session's blocks may be in."""
    return tuple(dict.fromkeys((*before, *more)))[:MAX_REGIONS]


def not_found(seq_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {seq_id[:80]!r}", field="seq_id")


IsOurs = Callable[[Session, Turn, SessionHead | None], bool]  # whether a turn of ours goes on from the head found


class TurnCommitted(Exception):
    """Another ingress has committed the same request."""


@dataclass(frozen=True, slots=True)
class SessionRecords:
    """All methods raise Unavailable without NATS; those of a turn SessionBusy if it is lost."""

    bucket: Bucket
    is_ingress_alive: Callable[[str], bool]

    async def head(self, key: str) -> tuple[SessionHead | None, int]:
        entry = await self.bucket.get(key)
        if entry.value is None:
            return None, entry.revision
        try:
            return codec.decode(SessionHead, entry.value), entry.revision
        except CodecError as error:
            raise Unavailable(f"the record of session {key} is unreadable: {error}") from None

    async def history(self, key: str, head: SessionHead) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids of a head's history, and its chunks' revisions; None if they have just been replaced."""
        chunks = await asyncio.gather(*map(self.bucket.get, _chunk_keys(key, head)))
        if any(chunk.value is None for chunk in chunks):
            return None
        ids = unpack_ids(b"".join((chunk.value or b"")[: 4 * CHUNK_IDS] for chunk in chunks))
        return (ids[: head.length], tuple(chunk.revision for chunk in chunks)) if len(ids) >= head.length else None

    async def strays(self, key: str, head: SessionHead) -> tuple[Stray, ...]:
        if not head.strays:
            return ()
        entry = await self.bucket.get(f"{key}.{head.generation}.strays")
        try:
            return codec.decode(SessionStrays, entry.value).chains if entry.value is not None else ()
        except CodecError as error:
            raise Unavailable(f"the record {entry.key} is unreadable: {error}") from None

    async def renew(self, turn: OpenTurn, head: SessionHead) -> None:
        """Also after another ingress that ran the same request has abandoned it, or is gone."""
        await self._write(turn, head, self._is_left)

    async def commit(self, turn: OpenTurn, head: SessionHead) -> None:
        """Also while another ingress runs the same request. Raises TurnCommitted if it has committed it."""
        await self._write(turn, head, _is_shared)

    async def abandon(self, turn: OpenTurn, head: SessionHead) -> None:
        """The head without its turn; a session that has nothing but this turn is deleted."""
        if head.turns or head.strays:
            await self._write(turn, head, _is_own)
            return
        key = turn.session.key
        try:
            await self.bucket.delete(key, turn.revision)
        except StaleRevision:
            await self._adopt(turn, _is_own)
            await self.bucket.delete(key, turn.revision)

    async def _write(self, turn: OpenTurn, head: SessionHead, is_ours: IsOurs) -> None:
        key = turn.session.key
        try:
            turn.revision = await self.bucket.update(key, codec.encode(head), turn.revision)
        except StaleRevision:
            await self._adopt(turn, is_ours)
            head = replace(head, regions=joined(turn.head.regions, head.regions))
            try:
                turn.revision = await self.bucket.update(key, codec.encode(head), turn.revision)
            except StaleRevision:
                raise _lost(turn.session) from None

    async def _adopt(self, turn: OpenTurn, is_ours: IsOurs) -> None:
        """Go on from the head in the bucket, with the regions that another ingress has added."""
        head, revision = await self.head(turn.session.key)
        if turn.head.turn is None or not is_ours(turn.session, turn.head.turn, head):
            raise _lost(turn.session)
        turn.revision = revision
        if head is not None:
            turn.head = replace(turn.head, regions=joined(head.regions, turn.head.regions))

    def _is_left(self, session: Session, ours: Turn, head: SessionHead | None) -> bool:
        found = head.turn if head is not None else None
        is_held = found is not None and found.ingress != ours.ingress and self.is_ingress_alive(found.ingress)
        return is_as_before(session, head, ours.request) and not is_held

    async def write_history(self, turn: OpenTurn, generation: str, ids: tuple[int, ...], kept: int) -> None:
        """Write a turn's chunks before its commit; the first `kept` ids are there. Raises as `commit` does."""
        session = turn.session
        for n in range(kept // CHUNK_IDS, chunks_of(len(ids))):
            revision = session.chunk_revisions[n] if kept and n < len(session.chunk_revisions) else 0
            data = pack_ids(ids[n * CHUNK_IDS : (n + 1) * CHUNK_IDS])
            await self._write_chunk(turn, f"{session.key}.{generation}.{n}", data, revision)

    async def _write_chunk(self, turn: OpenTurn, key: str, data: bytes, revision: int) -> None:
        while True:
            try:
                await self.bucket.update(key, data, revision)
                return
            except StaleRevision:
                # An ingress that lost this session may have written meanwhile: take over, if the turn is still ours.
                await self._adopt(turn, _is_shared)
                revision = (await self.bucket.get(key)).revision

    async def write_strays(self, key: str, generation: str, strays: Sequence[Stray]) -> None:
        key, data = f"{key}.{generation}.strays", codec.encode(SessionStrays(tuple(strays)))
        for _ in range(WRITE_TRIES):
            entry = await self.bucket.get(key)
            with contextlib.suppress(StaleRevision):
                await self.bucket.update(key, data, entry.revision)
                return
        raise Unavailable(f"{key} is being written by others", retry_after_s=1.0)

    async def erase_beside(self, key: str, head: SessionHead) -> None:
        """Erase chunks and strays that no head names any more, so a failure only wastes their bytes."""
        strays = [f"{key}.{head.generation}.strays"] if head.strays else []
        with contextlib.suppress(KvfleetError):
            await asyncio.gather(*map(self.bucket.delete, [*_chunk_keys(key, head), *strays]))


def chunks_of(length: int) -> int:
    return -(-length // CHUNK_IDS)


def _chunk_keys(key: str, head: SessionHead) -> list[str]:
    return [f"{key}.{head.generation}.{n}" for n in range(chunks_of(head.length))]


def _is_own(_: Session, ours: Turn, head: SessionHead | None) -> bool:
    found = head.turn if head is not None else None
    return found is not None and (found.request, found.ingress) == (ours.request, ours.ingress)


def _is_shared(session: Session, ours: Turn, head: SessionHead | None) -> bool:
    """Raises TurnCommitted."""
    if head is not None and head.last_request == ours.request:
        raise TurnCommitted
    return is_as_before(session, head, ours.request)


def _lost(session: Session) -> SessionBusy:
    return SessionBusy(f"this turn of session {session.seq_id[:80]!r} lost its lease, it is not committed")
