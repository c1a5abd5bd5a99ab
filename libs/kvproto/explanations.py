"""Loop: asks all placement replicas why a request was placed as it was, or what they decided last, and puts their
answers together.

The attempts of one request may have been placed by different replicas, and each remembers its own decisions only. All
hear the question; it ends with the last replica that the members view knows, or after half a second without it.
"""

from __future__ import annotations

import asyncio
import contextlib

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, InvalidRequest, NotFound, Unavailable
from kvproto.ids import is_token, new_process_id
from kvproto.members import Members
from kvproto.messages import MAX_NAME_CHARS, Decision, ExplainRequest, Explanation, Role
from kvproto.nats_message import Message, is_no_responders
from kvproto.subjects import Subjects

EXPLAIN_TIMEOUT_S = 0.5  # of every asker: what has waited for so long at a replica nobody waits for any more
MAX_NEWEST = 200


class Explanations:
    """A client's questions. Each has a subscription of its own: there are few of them, and they are short."""

    def __init__(self, connection: Connection, subjects: Subjects, members: Members) -> None:
        self._connection = connection
        self._subjects = subjects
        self._members = members

    async def ask(self, request: str, tenant: str | None) -> tuple[Decision, ...]:
        """Decisions, oldest attempt first. Raises InvalidRequest, NotFound, or Unavailable if nobody answers."""
        if not is_token(request):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="request")
        decisions = await self._collect(ExplainRequest(request, tenant))
        if not decisions:
            raise NotFound(f"no placement replica remembers deciding about request {request!r}", field="request")
        return tuple(sorted(decisions, key=lambda one: (one.tenant, one.attempt, one.unix_ms)))

    async def newest(self, limit: int, tenant: str | None, model: str | None) -> tuple[Decision, ...]:
        """The last decisions of all replicas, newest first; a replica that is asked for too many lists at once does not
        answer. Raises InvalidRequest, or Unavailable if nobody answers."""
        if not 1 <= limit <= MAX_NEWEST:
            raise InvalidRequest(f"must be 1 to {MAX_NEWEST}, got {limit}", field="limit")
        if model is not None and len(model) > MAX_NAME_CHARS:
            raise InvalidRequest(f"at most {MAX_NAME_CHARS} characters", field="model")
        decisions = await self._collect(ExplainRequest("", tenant, limit, model))
        return tuple(sorted(decisions, key=lambda one: (one.unix_ms, one.attempt), reverse=True)[:limit])

    async def _collect(self, question: ExplainRequest) -> list[Decision]:
        """Of all replicas. One that the members view does not know yet may answer too, and counts if it is in time.
        Raises Unavailable if nobody answers."""
        found: dict[str, list[Decision]] = {}
        done: set[str] = set()
        complete = asyncio.Event()

        async def hear(message: Message) -> None:
            if is_no_responders(message):
                complete.set()
                return
            try:
                answer = codec.decode(Explanation, message.data)
            except CodecError:
                return  # of a newer version, perhaps: as if it had not answered
            found.setdefault(answer.placement, []).extend(answer.decisions)
            if not answer.more:
                done.add(answer.placement)
                if self._replicas() <= done:
                    complete.set()

        inbox = f"{self._connection.inbox_prefix}.x.{new_process_id()}"
        subscription = await self._connection.subscribe(inbox, hear)
        try:
            await self._connection.publish(self._subjects.placement_explain(), codec.encode(question), reply=inbox)
            async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                await complete.wait()
        except TimeoutError:
            pass  # one that vanished is a member for some seconds yet: what the others know will do
        finally:
            with contextlib.suppress(Exception):  # the connection may be closing: then there is nothing to let go of
                await subscription.unsubscribe()
        if not found:
            raise Unavailable("no placement replica answers", retry_after_s=1.0)
        return [decision for of_one in found.values() for decision in of_one]

    def _replicas(self) -> set[str]:
        return {member for role, member in self._members.view.members if role is Role.PLACEMENT}
