"""Loop: asks workers on their admin subject: what is too long for one message goes, and comes, part by part.

Token ids of a long history are told first, message by message, each answered empty; the last one is the question itself
(`AdminRequest.question`). Further parts of the answer are then asked for without telling them again.
"""

from __future__ import annotations

from dataclasses import replace

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import Unavailable, from_code
from kvproto.ids import new_request_id
from kvproto.messages import AdminReply, AdminRequest
from kvproto.subjects import Subjects

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
