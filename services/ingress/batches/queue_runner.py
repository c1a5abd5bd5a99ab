"""Loop: takes requests out of the work queue while the fleet has capacity to spare, and records what came of each.

    waiting ─▶ taken ─▶ refused: nothing is spare ─▶ held, asked again in a moment
                 │                                       a newer one is not taken meanwhile
                 └─▶ runs ─▶ its result is recorded, once ─▶ done in the queue

A request that an ingress took and did not end is taken by another one. Its id follows from its name, so a worker that
still has it goes on with it; and a result that is there already is not made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvfleet.ingress.answers.openai_events import OpenAiForm
from kvfleet.ingress.answers.response_events import ResponseForm
from kvfleet.ingress.batches.batch_records import BatchRecords
from kvfleet.ingress.http.error_bodies import error_body, status_of
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.request_reader import Call, now
from kvfleet.ingress.requests.bodies import read_chat, read_completion
from kvfleet.ingress.requests.responses import read_response
from kvfleet.ingress.responses.response_jobs import ResponseJobs
from kvfleet.ingress.runs.jobs import Job, Prepare
from kvfleet.ingress.runs.repeats import digest_of
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.settings import BatchLimits
from kvproto import codec
from kvproto.connection import is_json
from kvproto.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    KvfleetError,
    LimitExceeded,
    ModelNotFound,
    NotFound,
    OutOfMemory,
    Unavailable,
    WorkerLost,
)
from kvproto.ids import is_token
from kvproto.messages import SPARE_PRIORITY, BatchHead, BatchStatus, QueuedRequest, QueuedResult
from kvproto.subjects import tenant_of_batch
from kvproto.tasks import end
from kvproto.work_queue import QueuedMessage, WorkQueue

log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two looks at what waits
ABSENT_S = 5.0  # the same where there is no queue
TAKE_S = 0.2  # between two tries to take of a queue that was empty
REST_S = 5.0  # a queue that was empty for so long is looked at no more, until something waits
TRYING = 2  # requests of one queue that no worker has begun yet
POLL_S = 0.01
WAIT_S = 0.25  # until a request that nobody could take is tried again
LONGEST_WAIT_S = 5.0
UNKNOWN_S = 60.0  # for which no placement knew the model: it is refused
MAX_HARMS = 3  # of one request: it ended its worker, or a step of its engine
MAX_DELIVERIES = 64  # more than that, and it is the request that ends its ingresses
MAX_BODY_BYTES = 900_000  # of an answer: it is one record
HARMFUL = (WorkerLost, EngineFailure, OutOfMemory)
IN_BATCH = "not in a request that waits"


@dataclass(eq=False)
class TakenRequest:
    """One that this ingress is at."""

    tenant: str
    asked: QueuedRequest
    message: QueuedMessage
    run: Run | None = None
    leaves: bool = False
    harms: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self.run is not None and (self.run.transcript.begun or self.run.over)

    def took(self, run: Run) -> None:
        self.run = run

    async def leave(self) -> None:
        """Let another ingress have it."""
        self.leaves = True
        if self.run is not None:
            await self.run.leave(self)


@dataclass(eq=False)
class _Feed:
    """One queue: of a tenant and a model."""

    subject: str
    taken: set[TakenRequest] = field(default_factory=set)
    not_before: float = 0.0
    change: asyncio.Event = field(default_factory=asyncio.Event)

    def pause(self, seconds: float) -> None:
        self.not_before = max(self.not_before, now() + seconds)

    async def changed(self, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.change.wait(), within_s)
        self.change.clear()


@dataclass(eq=False)
class QueueRunner:
    """Owned by the event loop. `status_of` a batch: as far as this ingress has heard."""

    jobs: ResponseJobs
    records: BatchRecords
    queue: WorkQueue
    limits: BatchLimits
    status_of: Callable[[str, str], BatchStatus | None]
    done_total: int = 0
    _feeds: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _taken: set[TakenRequest] = field(default_factory=set)
    _stopping: set[asyncio.Task[None]] = field(default_factory=set)
    _unknown: dict[str, float] = field(default_factory=dict)  # since when no placement knows the model

    @property
    def running(self) -> int:
        return len(self._taken)

    async def run(self) -> None:
        """Each queue in which something waits has a task."""
        while True:
            try:
                waiting = await self.queue.waiting() if not self.draining and self.limits.lines else {}
                for subject in waiting:
                    if subject not in self._feeds:
                        task = asyncio.create_task(self._serve(subject), name=f"queue-{subject}")
                        self._feeds[subject] = task
                        task.add_done_callback(partial(self._served, subject))
                await asyncio.sleep(LOOK_S)
            except Unavailable as error:
                log.debug("batches: %s", error)
                await asyncio.sleep(ABSENT_S)

    @property
    def draining(self) -> bool:
        return self.jobs.flow.parts.admission.draining

    def _served(self, subject: str, task: asyncio.Task[None]) -> None:
        del self._feeds[subject]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("queue %s failed", subject, exc_info=error)

    async def _serve(self, subject: str) -> None:
        feed = _Feed(subject)
        try:
            opened = await self.queue.open(subject)
        except Unavailable as error:
            log.info("queue %s: %s", subject, error)
            await asyncio.sleep(1.0)
            return
        try:
            idle_since = now()
            while not self.draining and (feed.taken or now() < idle_since + REST_S):
                if not self._may_take(feed):
                    await feed.changed(max(POLL_S, feed.not_before - now()))
                elif (message := await opened.take()) is None:
                    await feed.changed(TAKE_S)
                else:
                    idle_since = now()
                    await self._begin(feed, message)
        except Unavailable as error:
            log.info("queue %s is opened again: %s", subject, error)
        finally:
            await opened.close()

    def _may_take(self, feed: _Feed) -> bool:
        trying = sum(not one.has_begun for one in feed.taken)
        return trying < TRYING and len(self._taken) < self.limits.lines and now() >= feed.not_before

    async def _begin(self, feed: _Feed, message: QueuedMessage) -> None:
        tenant, is_line = tenant_of_batch(message.subject)
        try:
            asked = codec.decode_plain(QueuedRequest, message.data, as_json=is_json(message))
            if not is_token(asked.request):
                raise InvalidRequest("must be 1 to 64 of A-Z a-z 0-9 _ -", field="request")
        except InvalidRequest as error:
            log.warning("a message on %s is refused: %s", message.subject, error)
            await message.done()
            return
        if not is_line:  # what a producer says of a batch is not so
            asked = replace(asked, batch="", line=0, caller="")
        one = TakenRequest(tenant, asked, message)
        feed.taken.add(one)
        self._taken.add(one)
        one.task = asyncio.create_task(self._carry(feed, one), name=f"queued-{asked.request}")

    async def _carry(self, feed: _Feed, one: TakenRequest) -> None:
        beating = asyncio.create_task(self._beat(one), name=f"beat-{one.asked.request}")
        is_done = False
        try:
            is_done = await self._work(feed, one)
        except KvfleetError as error:
            log.warning("queued request %s goes back: %s", one.asked.request, error)
        except Exception:  # the task's top: it goes back, and may go better elsewhere
            log.exception("queued request %s failed, and goes back", one.asked.request)
        finally:
            beating.cancel()
            self._taken.discard(one)
            feed.taken.discard(one)
            feed.change.set()
            with contextlib.suppress(KvfleetError):
                await (one.message.done() if is_done else one.message.give_back())

    async def _beat(self, one: TakenRequest) -> None:
        while True:
            await asyncio.sleep(self.limits.ack_wait_s / 3)
            with contextlib.suppress(KvfleetError):
                await one.message.at_it()
                if not one.asked.batch and await self.records.is_done(one.tenant, one.asked):
                    self._stop(one, "the request has ended")  # its producer has cancelled it, somewhere

    async def _work(self, feed: _Feed, one: TakenRequest) -> bool:
        """True: its message is done with."""
        asked = one.asked
        while not one.leaves:
            if not await self._is_wanted(one.tenant, asked) or await self.records.is_done(one.tenant, asked):
                return True
            result = await self._result(feed, one)
            if result is not None:
                await self._record(one, result)
                return True
        return False

    async def _is_wanted(self, tenant: str, asked: QueuedRequest) -> bool:
        if not asked.batch:
            return True
        status = self.status_of(tenant, asked.batch)
        if status is None:
            try:
                status = (await self.records.find(tenant, asked.batch)).head.status
            except NotFound:
                return False
        return status is BatchStatus.IN_PROGRESS

    async def _result(self, feed: _Feed, one: TakenRequest) -> QueuedResult | None:
        """None: it waits, or is left to others."""
        asked = one.asked
        if asked.cancel:
            return self._ended(asked, "cancelled", "it was cancelled")
        if asked.expires_unix and time.time() >= asked.expires_unix:
            if asked.batch:
                await self._sleep(one, WAIT_S)  # its leader ends the batch
                return None
            return self._ended(asked, "expired", "it has waited for too long")
        if one.message.deliveries > MAX_DELIVERIES:
            return self._ended(asked, "internal_error", f"{MAX_DELIVERIES} ingresses ended while they were at it")
        try:
            body = await self._answer(one)
        except KvfleetError as error:
            if one.leaves or (isinstance(error, Cancelled) and not await self._is_wanted(one.tenant, asked)):
                return None
            if self._waits(one, error):
                wait_s = min(max(error.retry_after_s or WAIT_S, WAIT_S), LONGEST_WAIT_S)
                log.debug("queued request %s waits: %s", asked.request, error)
                feed.pause(wait_s)
                await self._sleep(one, wait_s)
                return None
            return self._said(asked, status_of(error), error_body(error))
        if body is None:
            return None
        return self._said(asked, 200, body)

    async def _sleep(self, one: TakenRequest, seconds: float) -> None:
        until = now() + seconds
        while now() < until and not one.leaves:
            await asyncio.sleep(min(0.05, seconds))

    def _waits(self, one: TakenRequest, error: KvfleetError) -> bool:
        """Whether it may go better later."""
        model = one.message.subject
        if isinstance(error, ModelNotFound):
            return now() - self._unknown.setdefault(model, now()) < UNKNOWN_S
        self._unknown.pop(model, None)
        if isinstance(error, HARMFUL):
            one.harms += 1
            return one.harms < MAX_HARMS
        return error.retryable or isinstance(error, LimitExceeded | Cancelled | DeadlineExceeded)

    async def _answer(self, one: TakenRequest) -> bytes | None:
        """The body, as the route would answer it; None if it was left. Raises KvfleetError."""
        asked, parts = one.asked, self.jobs.flow.parts
        caller = parts.tenancy.caller_named(one.tenant, asked.caller or "queue")
        if caller.tenant != one.tenant:
            caller = Caller(asked.caller or "queue", one.tenant)
        call, prepare = self._call(asked, caller)
        left_s = asked.expires_unix - time.time() if asked.expires_unix else parts.config.request_deadline_s

        async def spare() -> Job:
            job = await prepare()
            generation = replace(job.generation, spare=True, deadline_s=max(left_s, 1.0), max_wait_s=None)
            return replace(job, generation=generation)

        await self.jobs.flow.follow(call, spare, one, one.took)
        self._unknown.pop(one.message.subject, None)
        run = one.run
        if run is None or not run.finished:
            return None
        assert isinstance(run.form, OpenAiForm | ResponseForm)
        return await asyncio.to_thread(run.form.body, run.transcript)

    def _call(self, asked: QueuedRequest, caller: Caller) -> tuple[Call[Any], Prepare]:
        flow, ask = self.jobs.flow, _ask_of(asked.url, asked.body)
        if ask.stream:
            raise InvalidRequest(IN_BATCH, field="stream")
        if ask.placement.policy is not None or ask.placement.worker is not None or ask.placement.priority is not None:
            raise InvalidRequest(f"policy, worker and priority are {IN_BATCH}", field="policy")
        key = f"batch/{asked.batch}/{asked.line}" if asked.batch else f"queued/{asked.request}"
        name = flow.reader.name_of_key(caller.tenant, key)
        route = asked.url.rpartition("/v1/")[2].replace("/", "_")
        call: Call[Any] = Call(
            route, ask, caller, SPARE_PRIORITY, name, digest_of(route, asked.body), None, None, now()
        )
        if asked.url == "/v1/responses":
            if ask.fields.background:
                raise InvalidRequest(IN_BATCH, field="background")
            return call, lambda: self.jobs.fresh(call)
        chat = asked.url == "/v1/chat/completions"
        return call, lambda: flow.chat_answer(call) if chat else flow.completion_answer(call)

    def _said(self, asked: QueuedRequest, status: int, body: bytes) -> QueuedResult:
        if len(body) > MAX_BODY_BYTES:
            why = f"its answer has {len(body)} bytes, and {MAX_BODY_BYTES} can be kept"
            return self._ended(asked, "payload_too_large", why)
        return QueuedResult(asked.request, int(time.time()), status, body.decode(), custom_id=asked.custom_id)

    def _ended(self, asked: QueuedRequest, code: str, why: str) -> QueuedResult:
        return QueuedResult(asked.request, int(time.time()), code=code, message=why, custom_id=asked.custom_id)

    async def _record(self, one: TakenRequest, result: QueuedResult) -> None:
        """Tried until it is kept: a full bucket, or a JetStream that is away, costs no computed answer."""
        while True:
            try:
                self.done_total += await self.records.record(one.tenant, one.asked, result)
                break
            except Unavailable as error:
                log.warning("the result of %s is kept later: %s", one.asked.request, error)
                if one.leaves:
                    raise
                await self._sleep(one, 1.0)
        if one.run is not None:
            self.jobs.flow.parts.runs.forget(one.run)

    def on_change(self, tenant: str, head: BatchHead) -> None:
        """A batch that is not wanted any more stops here."""
        if head.status is BatchStatus.IN_PROGRESS:
            return
        for one in self._taken:
            if (one.tenant, one.asked.batch) == (tenant, head.batch):
                self._stop(one, "the batch has ended")

    def _stop(self, one: TakenRequest, why: str) -> None:
        if one.run is not None and not one.run.over:
            stopping = asyncio.create_task(one.run.stop(Cancelled(why)), name="queued-stop")
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    async def hand_over(self) -> None:
        """To other ingresses, at once."""
        await end(list(self._feeds.values()))
        taken = list(self._taken)
        await asyncio.gather(*(one.leave() for one in taken))
        tasks = [one.task for one in taken if one.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    async def close(self) -> None:
        await self.hand_over()
        await end([*self._stopping, *(one.task for one in self._taken if one.task is not None)])


def _ask_of(url: str, body: dict[str, Any]) -> Any:
    """Raises InvalidRequest."""
    if url == "/v1/chat/completions":
        return read_chat(body)
    if url == "/v1/completions":
        return read_completion(body)
    if url == "/v1/responses":
        return read_response(body)
    raise InvalidRequest("must be /v1/chat/completions, /v1/completions or /v1/responses", field="url")
