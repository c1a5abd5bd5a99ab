"""Loop: what an open turn writes into its session's records, all by compare-and-set.

A record that is newer than this ingress knows is not always another turn's: a write that timed out in an outage of NATS
is delivered after it all the same, and another ingress may run the same request. Such a record is adopted, and the
write is tried once more; any other one means that the turn is lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvfleet.ingress.sessions.session import OpenTurn, is_as_before, joined, lost_turn, read_head, take_over
from kvfleet.ingress.sessions.session_chunks import KeyValue
from kvproto import codec
from kvproto.buckets import StaleRevision
from kvproto.messages import SessionHead

Adopt = Callable[[OpenTurn], Awaitable[None]]


class TurnCommitted(Exception):
    """Another ingress has committed the same request."""


class TurnWriter:
    """Holds nothing itself. All methods raise SessionBusy where the turn is another's now, Unavailable without NATS."""

    def __init__(self, bucket: KeyValue, is_ingress_alive: Callable[[str], bool]) -> None:
        self._bucket = bucket
        self._alive = is_ingress_alive

    async def renew(self, turn: OpenTurn, head: SessionHead) -> None:
        """Also where another ingress that ran the same request has let go of it, or is gone."""
        await self._write(turn, head, self._adopt_left)

    async def commit(self, turn: OpenTurn, head: SessionHead) -> None:
        """Also where another ingress runs the same request. Raises TurnCommitted if it has committed it."""
        await self._write(turn, head, self._adopt_shared)

    async def abandon(self, turn: OpenTurn, head: SessionHead) -> None:
        """The head without its turn."""
        await self._write(turn, head, self._adopt_own)

    async def delete(self, turn: OpenTurn) -> None:
        """The head of a session that has nothing but this turn."""
        key = turn.session.key
        try:
            await self._bucket.delete(key, turn.revision)
        except StaleRevision:
            await self._adopt_own(turn)
            await self._bucket.delete(key, turn.revision)

    async def write_chunk(self, turn: OpenTurn, key: str, data: bytes, revision: int) -> None:
        """A chunk of the history that the turn is about to commit. Raises as `commit` does."""
        while True:
            try:
                await self._bucket.update(key, data, revision)
                return
            except StaleRevision:
                # An ingress that lost this session may have written meanwhile: take over, if the turn is still ours.
                await self._adopt_shared(turn)
                revision = (await self._bucket.get(key)).revision

    async def _write(self, turn: OpenTurn, head: SessionHead, adopt: Adopt) -> None:
        key = turn.session.key
        try:
            turn.revision = await self._bucket.update(key, codec.encode(head), turn.revision)
        except StaleRevision:
            await adopt(turn)
            head = replace(head, regions=joined(turn.head.regions, head.regions))
            try:
                turn.revision = await self._bucket.update(key, codec.encode(head), turn.revision)
            except StaleRevision:
                raise lost_turn(turn.session) from None

    async def _adopt_own(self, turn: OpenTurn) -> None:
        """The head's newest revision, if our own turn stands in it."""
        entry = await self._bucket.get(turn.session.key)
        head = read_head(entry)
        ours, found = turn.head.turn, head.turn if head is not None else None
        if ours is None or found is None or (found.request, found.ingress) != (ours.request, ours.ingress):
            raise lost_turn(turn.session)
        take_over(turn, entry, head)

    async def _adopt_left(self, turn: OpenTurn) -> None:
        entry = await self._bucket.get(turn.session.key)
        head = read_head(entry)
        ours, found = turn.head.turn, head.turn if head is not None else None
        if ours is None or not is_as_before(turn.session, head, ours.request):
            raise lost_turn(turn.session)
        if found is not None and found.ingress != ours.ingress and self._alive(found.ingress):
            raise lost_turn(turn.session)
        take_over(turn, entry, head)

    async def _adopt_shared(self, turn: OpenTurn) -> None:
        entry = await self._bucket.get(turn.session.key)
        head = read_head(entry)
        ours = turn.head.turn
        if ours is None:
            raise lost_turn(turn.session)
        if head is not None and head.last_request == ours.request:
            raise TurnCommitted
        if not is_as_before(turn.session, head, ours.request):
            raise lost_turn(turn.session)
        take_over(turn, entry, head)
