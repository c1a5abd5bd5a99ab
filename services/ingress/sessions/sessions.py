"""Loop: sessions, named conversations whose history is durable as token ids, one turn at a time.

    idle ──lock──▶ turn running ──commit──▶ idle, longer
      ▲                │  failed, cancelled: as before
      └────────────────┘  lease not renewed, or its ingress gone: the next turn may take it

The head's `length` says which ids count, so chunks are written before the commit, by compare-and-set as the head is: an
ingress that lost its lease cannot overwrite what followed. A replaced history gets a new generation of chunks.

What a session's requests computed besides its history (cut turns, further choices, the end of a replaced history) is
kept as strays, to be erased with it. For that a first turn that is cut leaves a session without turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from kvfleet.ingress.runs.transcript import bounded, ids_of, moved, settled
from kvfleet.ingress.sessions.session import (
    LeaseObserver,
    OpenTurn,
    Session,
    SessionRecords,
    TurnCommitted,
    is_as_before,
    is_expired,
    joined,
    not_found,
)
from kvfleet.ingress.settings import SessionLimits
from kvproto import codec
from kvproto.buckets import Bucket, StaleRevision
from kvproto.errors import InvalidRequest, KvfleetError, SessionBusy, Unavailable
from kvproto.ids import new_process_id, session_key
from kvproto.messages import SessionHead, Stray, Turn

log = logging.getLogger(__name__)

COMMIT_RETRY_S = 0.5
LOCK_TRIES = 4

Forget = Callable[[str, SessionHead, tuple[int, ...], int], None]


@dataclass(eq=False, slots=True)
class Sessions:
    """Owned by the event loop; `run` renews the leases of running turns until cancelled. `forget(key, head, ids, keep)`
    is called for blocks of ids behind `keep` that are of no use any more."""

    bucket: Bucket
    ingress: str
    limits: SessionLimits
    unix_ms: Callable[[], int]
    is_ingress_alive: Callable[[str], bool]
    clock: Callable[[], float] = time.monotonic
    forget: Forget = lambda key, head, ids, keep: None
    turns_total: int = 0  # committed
    _records: SessionRecords = field(init=False)
    _leases: LeaseObserver = field(default_factory=LeaseObserver)
    _turns: dict[str, OpenTurn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._records = SessionRecords(self.bucket, self.is_ingress_alive)

    @property
    def running(self) -> int:
        return len(self._turns)

    async def read(self, tenant: str, seq_id: str) -> Session:
        """An expired session reads as absent. Raises Unavailable."""
        key = session_key(tenant, seq_id)
        for _ in range(3):  # a turn that replaces the history may delete chunks under this reader
            head, revision = await self._records.head(key)
            if head is None:
                return Session(key, seq_id, revision)
            if is_expired(head, self.unix_ms(), self.limits):
                return Session(key, seq_id, revision, expired=head)
            if (history := await self._records.history(key, head)) is not None:
                return Session(key, seq_id, revision, head, *history)
        raise Unavailable(f"the history of session {seq_id!r} is being written", retry_after_s=1.0)

    async def _holds(self, key: str, ids: Sequence[int]) -> bool:
        head, _ = await self._records.head(key)
        history = await self._records.history(key, head) if head is not None and head.length >= len(ids) else None
        return history is not None and history[0][: len(ids)] == tuple(ids)

    def fresh(self, tenant: str, seq_id: str) -> Session:
        """A session whose name was drawn just now: it has nothing to read."""
        return Session(session_key(tenant, seq_id), seq_id, 0)

    async def find(self, tenant: str, seq_id: str) -> Session:
        """As `read`. Raises SessionNotFound, also for another tenant's, and one whose first turn was cut."""
        session = await self.read(tenant, seq_id)
        if session.head is None or not (session.head.turns or session.head.turn):
            raise not_found(seq_id)
        return session

    def is_busy(self, session: Session) -> bool:
        return session.head is not None and self._is_held(session.key, session.head.turn, session.revision)

    def _is_held(self, key: str, turn: Turn | None, revision: int) -> bool:
        """Whether the turn's ingress is alive and renews its lease."""
        if turn is None or not self.is_ingress_alive(turn.ingress):
            self._leases.forget(key)
            return False
        return self._leases.unchanged_s(key, revision, self.clock()) < self.limits.lease_s

    def fits(self, tokens: int) -> bool:
        return tokens <= self.limits.max_tokens

    def check_length(self, tokens: int, field: str) -> None:
        """Raises InvalidRequest for a history that is too long to keep."""
        if not self.fits(tokens):
            raise InvalidRequest(
                f"the session would grow to {tokens} tokens, at most {self.limits.max_tokens} are kept", field=field
            )

    async def lock(self, session: Session, model: str, request: str) -> OpenTurn:
        """Begin a turn. Raises SessionBusy while another one runs, also one that began since `session` was read.

        A turn of the same request at another ingress is taken over: both read the same stream, and the first to finish
        commits. If the other has committed since, the returned turn has `ended`.
        """
        for _ in range(LOCK_TRIES):
            try:
                return await self._lock(session, model, request)
            except StaleRevision:
                head, revision = await self._records.head(session.key)
                if head is not None and head.last_request == request:
                    return OpenTurn(session, head, revision, ended=True)
                if not is_as_before(session, head, request):
                    break
                session = replace(session, head=head, revision=revision)
        raise SessionBusy(f"another turn of session {session.seq_id[:80]!r} has just begun or ended", retry_after_s=1.0)

    async def _lock(self, session: Session, model: str, request: str) -> OpenTurn:
        ours = session.head is not None and session.head.turn is not None and session.head.turn.request == request
        if self.is_busy(session) and not ours:
            raise SessionBusy(f"another turn of session {session.seq_id[:80]!r} is running", retry_after_s=1.0)
        before, now = session.head, self.unix_ms()
        if before is None:
            before = SessionHead(session.seq_id, model, 0, 0, now, now, generation=new_process_id())
        head = replace(before, turn=self._lease(request))
        revision = await self.bucket.update(session.key, codec.encode(head), session.revision)
        held = self._turns[request] = OpenTurn(session, head, revision)
        if session.expired is not None:
            await self._records.erase_beside(session.key, session.expired)
        return held

    async def commit(
        self,
        turn: OpenTurn,
        model: str,
        ids: Sequence[int],
        worker: str,
        *,
        start: int = 0,
        regions: Sequence[str] = (),
        strays: Sequence[Stray] = (),
    ) -> None:
        """End a turn: the session's history is `ids` now, of which the turn's own begin at `start`; other `regions`
        had a part in it, and `strays` were computed beside it.

        Commits everything or nothing. Raises SessionBusy if the turn was lost, Unavailable if JetStream is away for too
        long. Does nothing for a turn that another ingress, or an earlier try, has committed.
        """
        session, before, ids = turn.session, turn.session.ids, tuple(ids)
        extends = session.head is not None and len(ids) >= len(before) and ids[: len(before)] == before
        generation = turn.head.generation if extends or session.head is None else new_process_id()
        until = asyncio.get_running_loop().time() + self.limits.commit_timeout_s
        while not turn.ended:
            try:
                async with turn.lock:
                    self._turns.pop(turn.request, None)
                    await self._records.write_history(turn, generation, ids, len(before) if extends else 0)
                    head = replace(
                        turn.head,
                        model=model,
                        length=len(ids),
                        turns=turn.head.turns + 1,
                        updated_unix_ms=self.unix_ms(),
                        worker=worker,
                        turn=None,
                        generation=generation,
                        last_request=turn.request,
                        last_start=start,
                        left_request="",
                        regions=joined(turn.head.regions, regions),
                    )
                    head = await self._keep_strays(session, head, ids, strays)
                    await self._records.commit(turn, head)
                    turn.ended = True
                if session.head is not None and generation != session.head.generation:
                    await self._records.erase_beside(session.key, session.head)
            except TurnCommitted:
                turn.ended = True
            except SessionBusy:
                if not await self._holds(session.key, ids):
                    await self._erase_unnamed(session.key, replace(turn.head, generation=generation, length=len(ids)))
                    raise
                turn.ended = True  # by another ingress, and the conversation has gone on from it
            except Unavailable as error:
                if asyncio.get_running_loop().time() > until:
                    raise
                log.warning("session %s: not committed yet: %s", session.key, error)
                await asyncio.sleep(COMMIT_RETRY_S)
        self.turns_total += 1

    async def abandon(self, turn: OpenTurn, regions: Sequence[str] = (), strays: Sequence[Stray] = ()) -> None:
        """End a turn that failed; the session gains `regions` and `strays`. Never raises; while JetStream is away for
        too long, or once the turn is lost, the lease runs out instead, and the strays are forgotten at once."""
        session, request = turn.session, turn.request
        until = asyncio.get_running_loop().time() + self.limits.commit_timeout_s
        while True:
            try:
                async with turn.lock:
                    self._turns.pop(request, None)
                    head = session.head or turn.head
                    head = replace(head, turn=None, left_request=request, regions=joined(head.regions, regions))
                    head = await self._keep_strays(session, head, session.ids, strays)
                    await self._records.abandon(turn, head)
                return
            except KvfleetError as error:
                if not isinstance(error, Unavailable) or asyncio.get_running_loop().time() > until:
                    log.info("session %s: the turn's lease is left to run out: %s", session.key, error)
                    await self._forget_lost(turn, regions, strays)
                    return
            await asyncio.sleep(COMMIT_RETRY_S)

    async def _forget_lost(self, turn: OpenTurn, regions: Sequence[str], strays: Sequence[Stray]) -> None:
        """What a turn computed whose session was deleted, or went on without it: no deletion to come would find it."""
        session, request, is_gone = turn.session, turn.request, False
        with contextlib.suppress(KvfleetError):
            found, _ = await self._records.head(session.key)
            if found is not None:
                held = found.turn
                is_shared = held is not None and held.request == request and held.ingress != self.ingress
                if is_shared or request in (found.last_request, found.left_request):
                    return  # another ingress, which runs the same request, notes it
            is_gone = await self._erase_unnamed(session.key, turn.head)
        head = replace(turn.head, regions=joined(turn.head.regions, regions))
        for one in strays:
            self.forget(session.key, head, session.ids[: one.start] + one.ids, 0 if is_gone else one.start)

    async def _erase_unnamed(self, key: str, head: SessionHead) -> bool:
        """The records that a lost turn wrote, which the head that is there does not name. Returns whether its session
        is gone."""
        with contextlib.suppress(KvfleetError):
            found, _ = await self._records.head(key)
            if found is None or found.generation != head.generation:
                await self._records.erase_beside(key, replace(head, strays=1))
                return True
            if not found.strays:
                await self._records.erase_beside(key, replace(head, strays=1, length=0))
        return False

    async def _keep_strays(
        self, session: Session, head: SessionHead, history: tuple[int, ...], more: Sequence[Stray]
    ) -> SessionHead:
        """Write the strays with `more`, and forget those beyond the bounds. Returns the head."""
        before, known = session.head, list[Stray]()
        if before is not None:
            known = moved(await self._records.strays(session.key, before), session.ids, history)
            if before.model != head.model:  # another model's blocks
                for one in known:
                    if whole := history[: one.start] + one.ids:
                        self.forget(session.key, before, whole, 0)
                known = []
        kept, dropped = bounded(settled([*known, *more], history))
        if kept or (before is not None and before.strays):
            await self._records.write_strays(session.key, head.generation, kept)
        for one in dropped:
            self.forget(session.key, head, history[: one.start] + one.ids, one.start)
        return replace(head, strays=ids_of(kept))

    async def erase(
        self, tenant: str, seq_id: str, first: Callable[[Session], Awaitable[None]] | None = None
    ) -> Session:
        """Returns it with its strays. `first` gets it before its record goes: who asks again, as this ended in the
        middle, has to find it. Raises SessionNotFound, SessionBusy while a turn runs, Unavailable."""
        session = await self.read(tenant, seq_id)
        head = session.head
        if head is None:
            raise not_found(seq_id)
        if self.is_busy(session):
            raise SessionBusy(f"a turn of session {seq_id[:80]!r} is running", retry_after_s=1.0)
        found = replace(session, strays=await self._records.strays(session.key, head))
        if first is not None:
            await first(found)
        await self._erase(session.key, head, session.revision)
        return found

    async def erase_key(self, key: str, *, only_expired: bool) -> bool:
        """For the sweep; False if the session is in use, not expired, or gone."""
        head, revision = await self._records.head(key)
        if head is None or self._is_held(key, head.turn, revision):
            return False
        if only_expired and not is_expired(replace(head, turn=None), self.unix_ms(), self.limits):
            return False
        try:
            await self._erase(key, head, revision)
        except SessionBusy:
            return False
        return True

    async def _erase(self, key: str, head: SessionHead, revision: int) -> None:
        try:
            await self.bucket.delete(key, revision)
        except StaleRevision:
            raise SessionBusy("another turn of this session has just begun or ended", retry_after_s=1.0) from None
        await self._records.erase_beside(key, head)

    def _lease(self, request: str) -> Turn:
        return Turn(request, self.ingress, self.unix_ms() + int(self.limits.lease_s * 1000))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.limits.lease_s / 3)
            await self.renew()

    async def renew(self) -> None:
        """Renew all leases once. A lost turn is noticed when it commits; one of the same request that another ingress
        has abandoned is taken again."""
        for request, turn in list(self._turns.items()):
            async with turn.lock:
                if request not in self._turns:
                    continue
                head = replace(turn.head, turn=self._lease(request))
                try:
                    await self._records.renew(turn, head)
                    turn.head = replace(head, regions=turn.head.regions)
                except KvfleetError as error:
                    log.warning("session %s: its turn's lease was not renewed: %s", turn.session.key, error)
