"""Loop: the client of a fleet, also the ingress's: starts requests, watches them, asks workers.

async with await Client.open("nats://127.0.0.1:4222") as client:
    async with client.generate(Generation("demo", Sampling(max_tokens=50), prompt="O Romeo")) as stream:
        async for event in stream: ...

A question to a worker, or its answer, that exceeds one message travels in parts. A long history's token ids go first,
each message answered empty; the last message is the question itself (`AdminRequest.question`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvproto import codec
from kvproto.block_hash import pack_ids
from kvproto.connection import Connection, Message, is_no_responders
from kvproto.errors import (
    CodecError,
    InvalidRequest,
    KvfleetError,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    Unavailable,
    from_code,
)
from kvproto.fleet_view import Change, WorkerView
from kvproto.ids import DEFAULT_NAMESPACE, DEFAULT_TENANT, is_token, new_process_id, new_request_id
from kvproto.members import Members
from kvproto.messages import (
    MAX_NAME_CHARS,
    AdminCommand,
    AdminReply,
    AdminRequest,
    Bundle,
    Continuation,
    Decision,
    ExplainRequest,
    Explanation,
    Role,
    Sampling,
)
from kvproto.response_format import grammar_of
from kvproto.schema import read_map, to_map
from kvproto.streams.generation import ClientCounters, Generation, seed_of
from kvproto.streams.request_driver import RequestDriver
from kvproto.streams.silence import LEAST_S, Ear, Verdict, judge
from kvproto.streams.stream import Inbox, Signal, Stream
from kvproto.subjects import PRODUCER_INBOX, Subjects, inbox_prefix, producers_tenant
from kvproto.tasks import end
from kvproto.trace_context import Trail

GAP_S = 0.02
WATCH_PERIOD_S = 0.05
PAUSED_LIMIT_S = 60.0
BUFFER_TOKENS = 4096
EXPLAIN_TIMEOUT_S = 0.5  # of every client: a replica drops a question that is older
MAX_NEWEST = 200
HEADROOM_BYTES = 4096  # of a message, for all fields but ids
ID_BYTES = 4
STRAY_BYTES = 32  # besides its ids


class Client:
    """One process's client. `open` connects; `over` shares a connection, as the ingress does."""

    def __init__(self, connection: Connection, subjects: Subjects, members: Members) -> None:
        self.connection = connection
        self.subjects = subjects
        self.members = members
        self.counters = ClientCounters()
        self.inbox = Inbox(connection)
        self._driver = RequestDriver(connection, subjects, members, self.inbox, self.counters)
        self._streams: dict[str, Stream] = {}
        self._begun = asyncio.Event()  # a stream, since there were none
        self._watcher: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._owns_connection = False
        self._ear = Ear(self.now())

    @classmethod
    async def open(
        cls,
        servers: str | Sequence[str] = "nats://127.0.0.1:4222",
        *,
        tenant: str = DEFAULT_TENANT,
        namespace: str = DEFAULT_NAMESPACE,
        region: str = "",
        **options: Any,
    ) -> Client:
        """Connect as a producer of `tenant`. Options are `Connection.open`'s. Raises Unavailable."""
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.{tenant}", new_process_id())
        connection = await Connection.open(servers, name=prefix, inbox_prefix=prefix, **options)
        try:
            client = await cls.over(connection, Subjects(namespace, region))
        except BaseException:
            await connection.close()
            raise
        client._owns_connection = True
        return client

    @classmethod
    async def over(cls, connection: Connection, subjects: Subjects) -> Client:
        members = Members(connection, subjects)
        client = cls(connection, subjects, members)
        await client.inbox.start()
        await members.start()
        members.listeners.append(client._on_member)
        connection.on_reconnect.append(client._on_reconnect)
        client._watcher = asyncio.create_task(client._watch(), name="client-watch")
        return client

    async def close(self) -> None:
        """Cancel running requests and free all resources."""
        await asyncio.gather(*(stream.cancel() for stream in list(self._streams.values())), return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
        with contextlib.suppress(ValueError):
            self.connection.on_reconnect.remove(self._on_reconnect)
        await self.members.stop()
        await end(list(self._telling))
        with contextlib.suppress(Exception):
            await self.inbox.stop()
        if self._owns_connection:
            await self.connection.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    @property
    def streams(self) -> int:
        return len(self._streams)

    def fail_streams(self, error: KvfleetError) -> None:
        """End all running requests with an error for their readers, and cancel them at the workers."""
        for stream in list(self._streams.values()):
            stream.fail(error)
            stream.signal(Signal.CANCELLED)

    def generate(
        self, generation: Generation, before: Sequence[Continuation] = (), trail: Trail | None = None
    ) -> Stream:
        """Start a request, after the tokens of each choice in `before`. The stream's reader raises its errors.
        `trail` records the attempts; without one the `traceparent` is passed on.

        A request id that another process has started, a short while ago at most, is read from its first token on.
        """
        if bool(generation.prompt_ids) + (generation.prompt is not None) + (generation.chat is not None) != 1:
            one_of = "exactly one of prompt_ids, prompt and chat must be given and not empty"
            raise InvalidRequest(one_of, field="prompt")
        _check_text_and_ids(generation)
        if generation.response_format is not None:
            if generation.sampling.grammar is not None:
                raise InvalidRequest("give either grammar or response_format, not both", field="grammar")
            sampling = replace(generation.sampling, grammar=grammar_of(generation.response_format))
            generation = replace(generation, sampling=sampling, response_format=None)
        read_map(Sampling, to_map(generation.sampling), "sampling")  # as the worker would find it
        _check_before(before, generation.sampling.n)
        request = generation.request or new_request_id()
        if not is_token(request):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="request")
        if generation.sampling.seed is None:  # kept in the request, so that a later attempt draws the same tokens
            generation = replace(generation, sampling=replace(generation.sampling, seed=seed_of(request)))
        if (chat := generation.chat) is not None:
            chat = replace(chat, unix_s=chat.unix_s or int(time.time()))
            generation = replace(generation, chat=chat, session=generation.session or chat.conversation)
        if request in self._streams:
            raise InvalidRequest("this request id is already running", field="request")
        self.subjects.place(generation.tenant, generation.model)  # refuses a tenant that is no subject token
        own = producers_tenant(self.connection.inbox_prefix)
        if own not in (None, generation.tenant):
            raise PermissionDenied(f"this client is the tenant {own}'s", field="tenant")
        choices = generation.sampling.n
        scores = generation.sampling.prompt_logprobs is not None
        limit = BUFFER_TOKENS if scores else min(generation.sampling.max_tokens * choices, BUFFER_TOKENS)
        stream = Stream(request, limit, self.now, choices, scores=scores)
        stream.tenant = own
        stream.trail = trail if trail is not None else Trail(generation.traceparent)
        stream.assembly.resume(before, generation.scored)
        self._streams[request] = stream
        self._begun.set()
        self.inbox.receivers[request] = stream
        self.counters.requests_total += 1
        stream.driver = asyncio.create_task(self._driver.run(stream, generation), name=f"stream-{request}")
        stream.driver.add_done_callback(lambda _: self._streams.pop(request, None))
        return stream

    async def _watch(self) -> None:
        """One timer for all streams: gaps, silence, readers that do not read."""
        while True:
            if not self._streams:
                self._begun.clear()
                await self._begun.wait()
            await asyncio.sleep(WATCH_PERIOD_S)
            now = self.now()
            listens = self.connection.is_connected and not self.connection.is_silent
            if not self._ear.tick(now, listens=listens):
                continue
            for stream in list(self._streams.values()):
                if not stream.accepted:
                    continue
                if stream.paused_since is not None:
                    if now - stream.paused_since > PAUSED_LIMIT_S:
                        stream.fail(LimitExceeded(f"the client did not read for {PAUSED_LIMIT_S:.0f} s"))
                        stream.signal(Signal.CANCELLED)
                    continue
                verdict = self._judge(stream, now) if now - stream.hearing.heard_at > LEAST_S else Verdict.WAIT
                if verdict is Verdict.ASK:
                    stream.signal(Signal.SILENT)
                elif verdict is not Verdict.WAIT:
                    stream.lost_why = verdict.value
                    stream.signal(Signal.WORKER_LOST)
                elif (
                    stream.gap_since is not None
                    and now - stream.gap_since > GAP_S
                    and now - stream.hearing.probed_at > 10 * GAP_S
                ):
                    stream.signal(Signal.GAP)

    def _judge(self, stream: Stream, now: float) -> Verdict:
        view = self.members.view.workers.get(str(stream.worker))
        beat = view.heartbeat if view is not None else None
        return judge(
            now,
            self._ear,
            stream.hearing,
            stream.assembly.tokens,
            step_s=beat.rates.step_s if beat is not None else 0.0,
            beat_at=view.heartbeat_at if view is not None else -1e9,
            server_at=self.connection.heard_at,
        )

    def _on_member(self, change: Change, view: WorkerView) -> None:
        for stream in self._streams.values():
            restarted = change is Change.NEW_EPOCH and stream.worker_epoch not in (None, view.record.epoch)
            if stream.worker == view.record.id and (change is Change.LEFT or restarted):
                stream.signal(Signal.WORKER_LOST)
        if change is Change.JOINED and self._driver.has_cancelled(view.record.id):
            telling = asyncio.create_task(self._driver.cancel_again(view.record.id), name="cancel-again")
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)

    async def _on_reconnect(self) -> None:
        """Frames sent during the outage are lost: ask every worker at once how far it is."""
        self._ear.tick(self.now(), listens=False)
        for stream in list(self._streams.values()):
            if stream.accepted:
                stream.hearing.heard_at = self.now()
                stream.signal(Signal.SILENT)
        await self._driver.cancel_again()

    async def admin(self, worker: str, request: AdminRequest, timeout_s: float = 5.0) -> bytes:
        """The joined parts of a worker's answer, each within `timeout_s`. Raises its error, WorkerLost, TimeoutError,
        Unavailable."""

        async def exchange(question: AdminRequest) -> AdminReply:
            subject = self.subjects.worker_admin(worker)
            message = await self.connection.request(subject, codec.encode(question), timeout_s)
            reply = codec.decode(AdminReply, message.data)
            if reply.code is not None:
                raise from_code(reply.code, reply.message)
            return reply

        strays = sum(len(one.ids) * ID_BYTES + STRAY_BYTES for one in request.strays)
        room = (min(self.connection.max_payload, codec.MAX_MESSAGE_BYTES) - HEADROOM_BYTES - strays) // ID_BYTES
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

    async def bundle(self, worker: str) -> Bundle:
        """Tokenizer, template and defaults of the model this worker serves."""
        data = await self.admin(worker, AdminRequest(AdminCommand.BUNDLE))
        return codec.decode(Bundle, data, limit=codec.MAX_BUNDLE_BYTES)

    async def explain(self, request: str, tenant: str | None = None) -> tuple[Decision, ...]:
        """Why a request's attempts were placed as they were and what became of them, oldest attempt first.

        `tenant`: only if the request is this one's. NATS permissions let ingresses and operators ask, not producers.
        Raises InvalidRequest, NotFound (no replica has decided about it) or Unavailable (none answers).
        """
        if not is_token(request):
            raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="request")
        decisions = await self._decisions(ExplainRequest(request, tenant))
        if not decisions:
            raise NotFound(f"no placement replica remembers deciding about request {request!r}", field="request")
        return tuple(sorted(decisions, key=lambda one: (one.tenant, one.attempt, one.unix_ms)))

    async def newest_decisions(
        self, limit: int, tenant: str | None = None, model: str | None = None
    ) -> tuple[Decision, ...]:
        """The newest decisions of all placement replicas, newest first. An overloaded replica does not answer.

        Raises InvalidRequest for a limit that is not 1 to 200, Unavailable if no replica answers.
        """
        if not 1 <= limit <= MAX_NEWEST:
            raise InvalidRequest(f"must be 1 to {MAX_NEWEST}, got {limit}", field="limit")
        if model is not None and len(model) > MAX_NAME_CHARS:
            raise InvalidRequest(f"at most {MAX_NAME_CHARS} characters", field="model")
        decisions = await self._decisions(ExplainRequest("", tenant, limit, model))
        return tuple(sorted(decisions, key=lambda one: (one.unix_ms, one.attempt), reverse=True)[:limit])

    async def _decisions(self, question: ExplainRequest) -> list[Decision]:
        """Of all replicas, as each remembers only its own. Ends with the last known replica, or after 0.5 s. Raises
        Unavailable if none answers."""
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
                if {member for role, member in self.members.view.members if role is Role.PLACEMENT} <= done:
                    complete.set()

        inbox = f"{self.connection.inbox_prefix}.x.{new_process_id()}"
        subscription = await self.connection.subscribe(inbox, hear)
        try:
            await self.connection.publish(self.subjects.placement_explain(), codec.encode(question), reply=inbox)
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

    async def miss(self, model: str) -> None:
        """Report a request for a model without a known worker. Raises NoWorkers if it is one of this fleet's."""
        await self._driver.placer.miss(model)


def _check_ids(field: str, ids: Sequence[int], rule: str) -> None:
    try:
        pack_ids(ids)
    except (OverflowError, TypeError, ValueError):
        raise InvalidRequest(rule, field=field) from None


def _check_before(before: Sequence[Continuation], choices: int) -> None:
    if before and len(before) != choices:
        raise InvalidRequest(f"must be one of each of {choices} choices, got {len(before)}", field="before")
    if choices == 1 and any(one.finished for one in before):
        raise InvalidRequest("it has ended: there is nothing to go on with", field="before")
    for one in before:
        _check_ids("before", one.output_ids, "ids must be integers within [0, 4294967295]")


def _check_text_and_ids(generation: Generation) -> None:
    _check_ids("prompt_ids", generation.prompt_ids, "must be integers within [0, 4294967295]")
    for field, text in (("prompt", generation.text or ""), ("stop", "".join(generation.sampling.stop))):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("is no text: it has a lone surrogate", field=field) from None


__all__ = ["Client", "ClientCounters", "Generation"]
