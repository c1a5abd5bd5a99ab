"""Loop: a client's questions besides generating: to all placement replicas, and to one worker's admin subject.

A question or an answer that exceeds one message travels in parts. A long history's token ids go first, each message
answered empty; the last message is the question itself (`AdminRequest.question`).
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import CodecError, Unavailable, from_code
from kvproto.fleet_view import FleetView
from kvproto.ids import new_process_id, new_request_id
from kvproto.messages import AdminReply, AdminRequest, Decision, ExplainRequest, Explanation, Role
from kvproto.nats_message import Message, is_no_responders
from kvproto.subjects import Subjects

EXPLAIN_TIMEOUT_S = 0.5  # of every client: a replica drops a question that is older
MAX_NEWEST = 200
HEADROOM_BYTES = 4096  # of a message, for all fields but ids
ID_BYTES = 4
STRAY_BYTES = 32  # besides its ids


async def ask_placements(
    connection: Connection, subjects: Subjects, view: FleetView, question: ExplainRequest
) -> list[Decision]:
    """Decisions of all replicas, as each remembers only its own. Ends with the last replica that `view` knows, or after
    0.5 s. Raises Unavailable if none answers."""
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
            return  # of a newer version, perhaps
        found.setdefault(answer.placement, []).extend(answer.decisions)
        if not answer.more:
            done.add(answer.placement)
            if {member for role, member in view.members if role is Role.PLACEMENT} <= done:
                complete.set()

    inbox = f"{connection.inbox_prefix}.x.{new_process_id()}"
    subscription = await connection.subscribe(inbox, hear)
    try:
        await connection.publish(subjects.placement_explain(), codec.encode(question), reply=inbox)
        async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
            await complete.wait()
    except TimeoutError:
        pass  # a replica that vanished stays a member for some seconds
    finally:
        with contextlib.suppress(Exception):  # the connection may be closing
            await subscription.unsubscribe()
    if not found:
        raise Unavailable("no placement replica answers", retry_after_s=1.0)
    return [decision for of_one in found.values() for decision in of_one]


async def ask_worker(
    connection: Connection, subjects: Subjects, worker: str, request: AdminRequest, timeout_s: float
) -> bytes:
    """The parts of the answer, joined; `timeout_s` is for each message. Raises the worker's error, WorkerLost,
    TimeoutError, or Unavailable."""

    async def exchange(question: AdminRequest) -> AdminReply:
        message = await connection.request(subjects.worker_admin(worker), codec.encode(question), timeout_s)
        reply = codec.decode(AdminReply, message.data)
        if reply.code is not None:
            raise from_code(reply.code, reply.message)
        return reply

    strays = sum(len(one.ids) * ID_BYTES + STRAY_BYTES for one in request.strays)
    room = (min(connection.max_payload, codec.MAX_MESSAGE_BYTES) - HEADROOM_BYTES - strays) // ID_BYTES
    ids = request.ids
    if len(ids) > room:
        request = replace(request, question=new_request_id())
        for start in range(0, len(ids), room):
            some = replace(request, ids=ids[start : start + room], ids_before=start, more_ids=True, strays=())
            await exchange(some)
        request = replace(request, ids=(), ids_before=len(ids))
    parts: list[bytes] = []
    total, digest = 1, ""
    while len(parts) < total:
        reply = await exchange(replace(request, part=len(parts)))
        if parts and (reply.parts, reply.digest) != (total, digest):
            raise Unavailable(f"the answer of worker {worker} changed while it was fetched", retry_after_s=0.0)
        total, digest = reply.parts, reply.digest
        parts.append(reply.data)
    return b"".join(parts)
