"""Loop: what a client asks besides generating: of all placement replicas how they decided, of one worker by its admin
subject.

The attempts of one request may have been placed by different replicas, and each remembers its own decisions only. All
hear the question; it ends with the last replica that the members view knows, or after half a second without it.

What is too long for one message to a worker goes, and comes, part by part. Token ids of a long history are told first,
message by message, each answered empty; the last one is the question itself (`AdminRequest.question`). Further parts of
the answer are then asked for without telling them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, InvalidRequest, NotFound, Unavailable, from_code
from kvproto.ids import is_token, new_process_id, new_request_id
from kvproto.members import Members
from kvproto.messages import MAX_NAME_CHARS, AdminReply, AdminRequest, Decision, ExplainRequest, Explanation, Role
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


HEADROOM_BYTES = 4096  # of a message, for all but ids
ID_BYTES = 4
STRAY_BYTES = 32  # besides its ids


class Administration:
    """A client's questions to workers; holds nothing between them."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self._connection = connection
        self._subjects = subjects

    async def ask(self, worker: str, request: AdminRequest, timeout_s: float) -> bytes:
        """The parts of the answer, joined; `timeout_s` is for each message. Raises the worker's error, WorkerLost,
        TimeoutError, or Unavailable."""
        request = await self._told(worker, request, timeout_s)
        parts: list[bytes] = []
        total, digest = 1, ""
        while len(parts) < total:
            reply = await self._exchange(worker, replace(request, part=len(parts)), timeout_s)
            if parts and (reply.parts, reply.digest) != (total, digest):
                raise Unavailable(f"the answer of worker {worker} changed while it was fetched", retry_after_s=0.0)
            total, digest = reply.parts, reply.digest
            parts.append(reply.data)
        return b"".join(parts)

    async def _told(self, worker: str, request: AdminRequest, timeout_s: float) -> AdminRequest:
        """The question as it fits a message, the worker knowing the ids that it leaves out."""
        strays = sum(len(one.ids) * ID_BYTES + STRAY_BYTES for one in request.strays)
        room = (min(self._connection.max_payload, codec.MAX_MESSAGE_BYTES) - HEADROOM_BYTES - strays) // ID_BYTES
        ids = request.ids
        if len(ids) <= room:
            return request
        question = new_request_id()
        for start in range(0, len(ids), room):
            some = replace(request, ids=ids[start : start + room], question=question, ids_before=start, more_ids=True)
            await self._exchange(worker, replace(some, strays=()), timeout_s)
        return replace(request, ids=(), question=question, ids_before=len(ids))

    async def _exchange(self, worker: str, request: AdminRequest, timeout_s: float) -> AdminReply:
        message = await self._connection.request(self._subjects.worker_admin(worker), codec.encode(request), timeout_s)
        reply = codec.decode(AdminReply, message.data)
        if reply.code is not None:
            raise from_code(reply.code, reply.message)
        return reply
