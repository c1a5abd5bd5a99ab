"""Loop: what readers ask a worker for: generate, cancel, pause, repeat. Owned by the worker's event loop.

A request is checked, accepted (from then on it has one terminal frame) and handed to the engine, or refused at its
reply inbox. A known request gets one more reader: so a repeat goes on reading, or has its result again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from kvfleet.worker.port.capacity import Attempt, Departures
from kvfleet.worker.port.engine_port import Hashed
from kvfleet.worker.serve.chat_intake import ChatIntake, TakenChat
from kvfleet.worker.serve.fetch_ahead import FetchAhead, Spawn
from kvfleet.worker.serve.request_intake import check_capacity, check_request, content_of, of_its_asker, sequences_of
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.streams import request_trace
from kvfleet.worker.streams.records import AttemptRecord, Reader, failure, without_message
from kvproto import codec
from kvproto.block_hash import Root
from kvproto.connection import Message, is_no_responders
from kvproto.errors import CodecError, InvalidRequest, KvfleetError, Unavailable, WorkerLost
from kvproto.fleet_view import RECONNECT_GRACE_S
from kvproto.messages import Accepted, CancelRequest, GenerateRequest, PauseRequest, ResendRequest, ReturnExpected
from kvproto.subjects import is_inbox, may_read, producers_tenant, tenant_of_word
from kvproto.trace_context import in_headers, sampled

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096  # about a millisecond of tokenising
INLINE_IDS = 4096  # of hashing

T = TypeVar("T", CancelRequest, PauseRequest, ResendRequest, ReturnExpected)


class Asked(NamedTuple):
    request: GenerateRequest
    tenant: str
    reply: str

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.request.request, self.request.attempt, self.request.inbox, self.tenant


@dataclass(eq=False)
class RequestDesk:
    parts: WorkerParts
    is_draining: Callable[[], bool]
    spawn: Spawn
    requests_total: int = 0
    refused_total: int = 0
    malformed_total: int = 0
    _departures: Departures = field(default_factory=Departures)
    _preparing: set[tuple[str, int, str, str]] = field(default_factory=set)
    _preparers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="prepare"))

    def __post_init__(self) -> None:
        parts = self.parts
        self._fleet_key = parts.settings.fleet_key.encode()
        self._engine, self._frames, self._outbox = parts.engine, parts.frames, parts.outbox
        self._chats = ChatIntake(parts.bundle, parts.text)
        self.ahead = FetchAhead(parts, self.spawn)

    def close(self) -> None:
        self._preparers.shutdown(wait=False, cancel_futures=True)

    async def on_generate(self, message: Message) -> None:
        tenant = message.subject.rsplit(".", 1)[-1]
        if not may_read(message.reply, tenant):
            self.refused_total += 1  # that inbox is not even told so
            return
        request: GenerateRequest | None = None
        try:
            request = codec.decode(GenerateRequest, message.data)
            if message.headers and (given := sampled(in_headers(message.headers))) is not None:
                request = replace(request, traceparent=given)
            highest = self.parts.settings.max_producer_priority
            request = of_its_asker(request, message.reply, self._fleet_key, highest)
            give_way = self._check(request, len(self._preparing))
            if not may_read(request.inbox, tenant):
                raise InvalidRequest("is another tenant's", field="inbox")
            asked = Asked(request, tenant, message.reply)
            if asked.key in self._preparing or (request.ahead and give_way):
                return
            if not request.ahead:
                self.ahead.end(request.request, tenant=tenant)
            meeting = self.parts.tiers.meet(request.source)
            known, grammar = len(request.prompt_ids) + _generated(request), request.sampling.grammar
            aside = meeting or grammar or request.chat or request.ahead
            if len(request.prompt or "") > INLINE_CHARACTERS or known > INLINE_IDS or aside:
                self._preparing.add(asked.key)  # so that a cancel finds it
                self.spawn(self._prepare_aside(asked, meeting), "preparing")
                return
            ids = request.prompt_ids or self._encode(request.prompt or "")
            self._take(asked, ids, self.parts.models.root(request.model, tenant, ids), give_way, {})
        except KvfleetError as error:
            if isinstance(error, CodecError):
                self.malformed_total += 1
            self._refuse(message.reply, request, error)

    async def _prepare_aside(self, asked: Asked, meeting: Awaitable[None] | None) -> None:
        """Tokenise and hash a long prompt, render a chat, compile a grammar, aside: leases and streams do not wait."""
        request, chat = asked.request, None
        on_thread = partial(asyncio.get_running_loop().run_in_executor, self._preparers)
        try:
            if meeting is not None:
                await meeting
            if request.chat is not None:
                chat = await on_thread(self._chats.take, request, request.chat)
            grammar = (chat or request).sampling.grammar
            if grammar is not None and not request.ahead:
                await self._engine.learn(grammar, asked.tenant)
            ids = chat.ids if chat else request.prompt_ids or await on_thread(self._encode, request.prompt or "")
            root = self.parts.models.root(request.model, asked.tenant, ids)
            hashed: Hashed = {}
            if request.ahead or self.parts.tiers.would_look(request, len(ids) + _generated(request)):
                hashed = await on_thread(self.parts.tiers.hash, request, root, ids)
            if request.ahead:
                for names in hashed.values() if asked.key in self._preparing else ():
                    self.ahead.begin(request, asked.tenant, root, names)
            elif asked.key in self._preparing:  # else it was cancelled meanwhile
                give_way = self._check(request)  # others came meanwhile
                self._take(asked, ids, root, give_way, hashed, chat)
        except KvfleetError as error:
            self._refuse(asked.reply, request, error)
        finally:
            self._preparing.discard(asked.key)

    def _encode(self, text: str) -> tuple[int, ...]:
        return self.parts.text.encode(text, begins=True, field="prompt")

    def _take(
        self,
        asked: Asked,
        ids: tuple[int, ...],
        root: Root,
        give_way: int,
        hashed: Hashed,
        chat: TakenChat | None = None,
    ) -> None:
        """Raises InvalidRequest or Unavailable if the attempt is known and this cannot be a reader of it."""
        request, reply = asked.request, asked.reply
        content = content_of(request, ids, asked.tenant)
        known = self._frames.known(request.request, request.attempt)
        if known is None:
            self._accept(asked, ids, root, content, hashed, chat)
            if give_way:
                self._make_room(request, give_way)
            return
        if known.content != content:
            raise InvalidRequest("another request of this id runs here, or did a moment ago", field="request")
        frames = self._frames.join(known, request, reply)
        if known.terminal is None:
            self._park(known)  # a newcomer wants to read
        self._acknowledge(request, reply)
        if known.trace is not None and known.terminal is None:
            known.trace.span.link(request.traceparent)
        self._outbox.send_to(Reader(request.inbox, request.encoding), frames)
        if request.watcher and known.terminal is not None:
            self._outbox.send(reply, codec.encode_frames([without_message(known.terminal)]))

    def _acknowledge(self, request: GenerateRequest, reply: str) -> None:
        if is_inbox(reply):
            accepted = Accepted(request.request, request.attempt, self.parts.record.id, self.parts.record.epoch)
            self._outbox.send(reply, codec.encode_frames([accepted]))

    def _accept(
        self,
        asked: Asked,
        ids: tuple[int, ...],
        root: Root,
        content: bytes,
        hashed: Hashed,
        chat: TakenChat | None,
    ) -> None:
        request, tenant, reply = asked
        self.requests_total += 1
        about = {"request": request.request, "tenant": tenant}
        log.debug("request %s: attempt %d is taken", request.request, request.attempt, extra=about)
        now = asyncio.get_running_loop().time()
        record = self._frames.open(request, reply, tenant, now, content, chat.builders if chat else ())
        record.root, record.prompt_ids = root, ids
        record.trace = trace = request_trace.begin(self.parts.tracer, self.parts.record.id, request, tenant)
        self.parts.broadcast.wake()
        self._acknowledge(request, reply)
        deadline = None
        if request.deadline_ms is not None:
            record.deadline = now + request.deadline_ms / 1000
            deadline = time.monotonic() + request.deadline_ms / 1000
        if not record.pending:
            self._outbox.send_frames(self._frames.conclude(record, len(ids), now))
            return
        specs = sequences_of(
            request,
            sorted(record.pending),
            prompt_ids=ids,
            root=root,
            tenant=tenant,
            adapter=self.parts.models.adapter(request.model),
            deadline=deadline,
            location=self.parts.tiers.locate(request, root, ids, hashed, trace.span.traceparent if trace else ""),
            trace=trace.sequence if trace else None,
            sampling=chat.sampling if chat else None,
        )
        for spec in specs:
            self._engine.submit(spec)

    def _make_room(self, request: GenerateRequest, count: int) -> None:
        def answered(answer: asyncio.Future[frozenset[Attempt]]) -> None:
            failed = answer.cancelled() or answer.exception() is not None  # the engine is gone, and all sequences
            self._departures.answered(count, () if failed else answer.result())

        self._departures.asked += count
        key = request.request, request.attempt
        asyncio.ensure_future(self._engine.make_room(*key, count)).add_done_callback(answered)

    def _check(self, request: GenerateRequest, before: int = 0) -> int:
        """`before`: requests being prepared. Returns how many sequences have to give way."""
        new, me = self._frames.known(request.request, request.attempt) is None, self.parts.record
        self.parts.models.check(request.model, new=new)
        check_request(request, draining=new and self.is_draining(), unix_ms=time.time() * 1000)
        if not new:
            return 0
        if not self._engine.is_ready:
            raise Unavailable("this worker's engine is away, or not there yet")
        limit = self.parts.settings.waiting + me.slots
        taken = self._frames.pending_sequences + before
        leaving = self._departures.count(self._frames.pending_of)
        load, rates = self._engine.measured
        return check_capacity(request, taken=taken, limit=limit, load=load, rates=rates, leaving=leaving)

    def _refuse(self, reply: str, request: GenerateRequest | None, error: KvfleetError) -> None:
        """Tell the reply inbox only: the asker there decides what the client sees."""
        self.refused_total += 1
        if not is_inbox(reply):
            return
        *_, name, number = ("", *reply.split("."))  # a fleet inbox ends in request and attempt
        attempt = int(number) if number.isdigit() else 0
        if request is not None:
            name, attempt = request.request, request.attempt
        log.debug("request %s: refused: %s", name, error, extra={"request": name})
        self._outbox.send(reply, codec.encode_frames([failure(name, attempt, error)]))

    async def on_cancel(self, message: Message) -> None:
        if (cancel := self._read(CancelRequest, message)) is None:
            return
        asker = tenant_of_word(message.subject)
        self._preparing -= {
            (request, attempt, inbox, tenant)
            for request, attempt, inbox, tenant in self._preparing
            if request == cancel.request
            and asker in (None, tenant)
            and cancel.attempt in (None, attempt)
            and (not cancel.inbox or cancel.inbox == inbox)
        }
        for record in self._frames.leave_ended(cancel.request, cancel.attempt, cancel.inbox, asker):
            self.spawn(self._forget(record, cancel.received), "forgetting")
        self.ahead.end(cancel.request, cancel.attempt, asker)
        for record in self._frames.running:
            if record.request == cancel.request and record.is_of(asker) and cancel.attempt in (None, record.attempt):
                self._leave(record, cancel.inbox, cancel.received)

    def _leave(self, record: AttemptRecord, inbox: str, received: Sequence[int] = ()) -> None:
        """A reader leaves (all, without `inbox`). The attempt ends with the last one, which has `received` so many
        tokens of each choice."""
        if inbox and not record.is_read_at(inbox):
            return
        if self._frames.leave(record, inbox):
            self._engine.cancel(*record.key, received)
        else:
            self._park(record)

    async def _forget(self, record: AttemptRecord, received: Sequence[int]) -> None:
        """As a cancel in time has the engine do: no erase could name these tokens."""
        for ids, known in zip(record.chains, received, strict=False):
            with contextlib.suppress(KvfleetError):  # the engine is gone, and what it held
                await self._engine.erase(record.root, ids, len(record.prompt_ids) + known)

    async def on_unheard(self, message: Message) -> None:
        number = message.subject.rsplit(".", 1)[-1]
        if is_no_responders(message) and number.isdecimal():
            self._frames.leases.on_notice(int(number), asyncio.get_running_loop().time())

    def maintain_readers(self, now: float) -> None:
        """Call about twice a second."""
        steady = self.parts.connection.is_settled(RECONNECT_GRACE_S)
        for inbox in self._frames.leases.gone(now, steady=steady):
            log.info("nobody listens at %s any more: what is read there alone ends", inbox)
            for record in self._frames.running:
                self._leave(record, inbox)
        self._outbox.ask_for_receipts(now)

    async def on_pause(self, message: Message) -> None:
        if (pause := self._read(PauseRequest, message)) is None:
            return
        record = self._frames.find(pause.request, pause.attempt)
        if record is None or not record.is_of(tenant_of_word(message.subject)):
            return
        if not pause.inbox or record.is_read_at(pause.inbox):
            self._frames.pause(record, pause.inbox, paused=pause.paused)
            self._park(record, again=pause.paused)

    async def on_return_expected(self, message: Message) -> None:
        if (said := self._read(ReturnExpected, message)) is not None:
            self._engine.expect_return(said.request, said.attempt, said.soonest_s, said.latest_s)

    def _park(self, record: AttemptRecord, *, again: bool = False) -> None:
        """Parked while all readers want that. `again`: one has just repeated it."""
        key, parked = record.key, record.paused_at is not None
        if record.wants_pause and (again or not parked):
            record.paused_at = asyncio.get_running_loop().time()
            if not parked:
                self._engine.pause(*key)
        elif parked and not record.wants_pause:
            record.paused_at = None
            self._engine.resume(*key)

    async def on_resend(self, message: Message) -> None:
        """An attempt that is unknown here is answered with WorkerLost."""
        if (asked := self._read(ResendRequest, message)) is None:
            return
        asker = tenant_of_word(message.subject)
        if not is_inbox(asked.inbox) or (asker is not None and producers_tenant(asked.inbox) != asker):
            self._malformed(message, CodecError("must be an inbox of one's own", field="inbox"))
            return
        known = self._frames.known(asked.request, asked.attempt)
        if known is not None and not (known.is_of(asker) and may_read(asked.inbox, known.tenant)):
            self.refused_total += 1
            log.warning("%s asks for an attempt of another tenant", asked.inbox)
            return
        frames = self._frames.repeat(
            asked.request,
            asked.attempt,
            asked.from_index,
            asked.from_indices,
            asked.scored,
            step_age_s=self._engine.step_age_s,
        )
        if not frames:
            lost = WorkerLost(f"worker {self.parts.record.id} does not know this attempt")
            frames = [failure(asked.request, asked.attempt, lost)]
        for frame in frames:
            self._outbox.send(asked.inbox, codec.encode_frames([frame]))

    def _read(self, kind: type[T], message: Message) -> T | None:
        try:
            return codec.decode(kind, message.data)
        except CodecError as error:
            self._malformed(message, error)
            return None

    def _malformed(self, message: Message, error: CodecError) -> None:
        self.malformed_total += 1
        log.debug("%s: %s", message.subject, error)


def _generated(request: GenerateRequest) -> int:
    """Outputs of the longest choice so far."""
    return max(len(request.continuation(choice).output_ids) for choice in range(request.sampling.n))
