"""One session as an ingress read it, the turn that is open on it, and what their records say."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvfleet.ingress.settings import SessionLimits
from kvproto.errors import SessionNotFound
from kvproto.messages import SessionHead, Stray
from kvproto.regions import MAX_REGIONS

MAX_OBSERVED = 65_536  # sessions


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

    @property
    def request(self) -> str:
        return self.head.turn.request if self.head.turn is not None else ""


@dataclass(eq=False, slots=True)
class LeaseObserver:
    """Since when a running turn's record has been as it is, by this process's own clock.

    A turn's lease is renewed by writing its record again. Whether it still is cannot be told by the wall clock, which
    may be wrong here or there by hours; a record that was unchanged for a whole lease of local time was not renewed (as
    in Kubernetes' leader election). Bounded: the record that was looked at longest ago is forgotten, and begins anew.
    """

    _seen: OrderedDict[str, tuple[int, float]] = field(default_factory=OrderedDict)

    def unchanged_s(self, key: str, revision: int, now: float) -> float:
        """Seconds since this revision was first seen here."""
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
    """Whether the session was not used for longer than sessions are kept."""
    return head.turn is None and now_ms - head.updated_unix_ms > limits.idle_expiry_s * 1000


def is_as_before(session: Session, head: SessionHead | None, request: str) -> bool:
    """Whether nothing but this request's own turn has come to a session since it was read, whichever ingress began the
    turn and whether or not it has let go of it: of a new session nothing is left then."""
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
    """Regions that a session's blocks may be in: as many as are known of at all."""
    return tuple(dict.fromkeys((*before, *more)))[:MAX_REGIONS]


def not_found(seq_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {seq_id[:80]!r}", field="seq_id")
