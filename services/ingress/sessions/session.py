"""One session as an ingress read it, the turn that is open on it, and what their records say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvfleet.ingress.config import SessionLimits
from kvproto import codec
from kvproto.buckets import Entry
from kvproto.errors import CodecError, SessionBusy, SessionNotFound, Unavailable
from kvproto.messages import SessionHead, Stray
from kvproto.regions import MAX_REGIONS


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it was read; `head` None: there is none (yet, or any more)."""

    key: str
    seq_id: str
    revision: int
    head: SessionHead | None = None
    ids: tuple[int, ...] = ()
    chunk_revisions: tuple[int, ...] = ()
    expired: SessionHead | None = None  # it lies there still, until it is swept
    strays: tuple[Stray, ...] = ()  # of one that was erased

    def is_last(self, request: str) -> bool:
        """Whether this request's turn is the one that was committed last."""
        return self.head is not None and self.head.last_request == request

    def before_last(self) -> Session:
        """As it was read, with the history that was there before the turn that was committed last."""
        assert self.head is not None
        return replace(self, ids=self.ids[: self.head.last_start])

    def has_moved_on(self, request: str) -> bool:
        """Whether another turn may have come since this request's turn began."""
        head = self.head
        if head is None or (head.turn is not None and head.turn.request == request):
            return False
        return request not in (head.last_request, head.left_request)


@dataclass(slots=True)
class OpenTurn:
    """The running turn of a session that this ingress holds. `revision` is the head's; `lock` guards it."""

    session: Session
    head: SessionHead
    revision: int
    ended: bool = False  # committed or abandoned
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def is_expired(head: SessionHead, now_ms: int, limits: SessionLimits) -> bool:
    """Whether the session was not used for longer than sessions are kept. Pure."""
    return head.turn is None and now_ms - head.updated_unix_ms > limits.idle_expiry_s * 1000


def is_as_before(session: Session, head: SessionHead | None, request: str) -> bool:
    """Whether nothing but this request's own turn has come to a session since it was read, whichever ingress began the
    turn and whether or not it has let go of it: of a new session nothing is left then. Pure."""
    before = session.head
    is_new = before is None or not before.turns
    if head is None:
        return is_new
    if request != (head.turn.request if head.turn is not None else head.left_request):
        return False
    if before is None or is_new:
        return not head.turns
    return (head.generation, head.length, head.turns) == (before.generation, before.length, before.turns)


def read_head(entry: Entry) -> SessionHead | None:
    if entry.value is None:
        return None
    try:
        return codec.decode(SessionHead, entry.value)
    except CodecError as error:
        raise Unavailable(f"the record of session {entry.key} is unreadable: {error}") from None


def take_over(turn: OpenTurn, entry: Entry, head: SessionHead | None) -> None:
    """Go on from the head as it lies there, with the regions that another ingress has added."""
    turn.revision = entry.revision
    if head is not None:
        turn.head = replace(turn.head, regions=joined(head.regions, turn.head.regions))


def joined(before: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    """Regions that a session's blocks may be in: as many as are known of at all."""
    return tuple(dict.fromkeys((*before, *more)))[:MAX_REGIONS]


def not_found(seq_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {seq_id[:80]!r}", field="seq_id")


def lost_turn(session: Session) -> SessionBusy:
    return SessionBusy(f"this turn of session {session.seq_id[:80]!r} lost its lease, it is not committed")
