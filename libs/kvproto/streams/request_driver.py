"""Loop: one request from placement to its terminal frame, over as many attempts as it takes.

    place ──▶ publish ──▶ accepted ──▶ tokens... ──▶ Finished
      ▲          │ no responders          │ worker lost, silent, Moved, retryable Failed
      └──────────┴────────────────────────┘  next attempt, continuing after the tokens already here

A worker that moves a request keeps its blocks until the driver tells it that the next attempt has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from dataclasses import dataclass, replace

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import (
    EXPIRES,
    Cancelled,
    DeadlineExceeded,
    KvfleetError,
    PayloadTooLarge,
    Unavailable,
    VersionMismatch,
    WorkerLost,
)
from kvproto.members import Members
from kvproto.messages import CancelRequest, Failed, GenerateRequest, Moved, PauseRequest, Placement, ResendRequest
from kvproto.regions import split
from kvproto.streams.generation import ClientCounters, Generation, Trials
from kvproto.streams.placing import Placer, refusal, retry_wait, source_of
from kvproto.streams.stream import Inbox, Mover, Signal, Stream
from kvproto.subjects import Subjects
from kvproto.trace_context import headers_of

log = logging.getLogger(__name__)

ACK_TIMEOUT_S = 2.0
MOVED_WAIT_S = 0.3  # for the last tokens of an attempt that has moved, else they are generated again
CANCELS_KEPT, CANCEL_KEPT_S = 1024, 60.0  # said again after a reconnect, ours or the worker's
RELEASE_POLL_S = 0.25  # tokens of a successor do not wake the driver


@dataclass(eq=False)
class RequestDriver:
    """Shared by all requests of a client. `run` is a stream's one task, and sleeps until a signal arrives."""

    connection: Connection
    subjects: Subjects
    members: Members
    inbox: Inbox
    counters: ClientCounters

    def __post_init__(self) -> None:
        self.placer = Placer(self.connection, self.subjects, self.members, self.counters)
        self._cancels: deque[tuple[float, str, str, str, bytes]] = deque(maxlen=CANCELS_KEPT)

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    async def run(self, stream: Stream, generation: Generation) -> None:
        trials = Trials(generation, self.now())
        if stream.assembly.has_begun:
            trials.be_patient(self.now())
        try:
            await self._try(stream, generation, trials)
        except KvfleetError as error:
            stream.fail(trials.told(error, self.now()))
        except asyncio.CancelledError:
            stream.fail(Cancelled("the client is closing"))
            raise
        except Exception as error:  # the task's top: the reader must learn of it
            log.exception("request %s: the driver failed", stream.request, extra={"request": stream.request})
            stream.fail(KvfleetError(f"{type(error).__name__}: {error}"))
        finally:
            self.inbox.receivers.pop(stream.request, None)
            stream.trail.closed(stream.error)
            await self._release_mover(stream)

    async def _try(self, stream: Stream, generation: Generation, trials: Trials) -> None:
        """Attempt after attempt, until the stream is closed. Raises the last one's error."""
        about = {"request": stream.request}
        while not stream.closed:
            placement = stream.placement = await self.placer.place(stream, generation, trials)
            worker = placement.worker
            try:
                moved = await self._attempt(stream, generation, placement, trials.deadline)
            except KvfleetError as error:
                stream.trusts_clocks = stream.trusts_clocks and error.field != EXPIRES
                stream.trusts_versions = stream.trusts_versions and not isinstance(error, VersionMismatch)
                stream.trail.attempt_ended(error, moved=False)
                stream.successor = ""
                if stream.assembly.terminal is None:  # it did not end by itself
                    received = stream.received or stream.assembly.next_indices
                    await self._cancel(worker, stream, stream.assembly.attempt, received)
                    if placement.then:  # it need not fetch any more
                        await self._cancel(placement.then, stream, stream.assembly.attempt)
                if isinstance(error, WorkerLost) and not stream.closed:
                    self.counters.lost_total += 1
                ended = (stream.request, stream.attempts, worker, error)
                log.info("request %s: attempt %d at %s ended: %s", *ended, extra=about)
                wait = trials.failed(worker, error, self.now(), accepted=stream.accepted)
            else:
                stream.trail.attempt_ended(None, moved=moved)
                if not moved:
                    return
                moved_from = stream.assembly.attempt
                log.info("request %s: %s hands attempt %d over", stream.request, worker, moved_from, extra=about)
                await self._follow(stream, worker)
                wait = trials.moved(worker, self.now())
            if wait:
                await retry_wait()

    async def _attempt(self, stream: Stream, generation: Generation, placement: Placement, deadline: float) -> bool:
        """One attempt until its terminal frame; whether it moved. Raises what ended it otherwise. Placement numbers it,
        as it knows other clients' attempts at this request."""
        attempt = max(stream.attempts, placement.attempt)
        stream.attempts = attempt + 1
        stream.begin(placement.worker, attempt)
        await self._ask_for(stream, generation, placement, deadline)
        await self._listen(stream, placement.worker, deadline)
        terminal = stream.assembly.terminal
        if isinstance(terminal, Failed):
            raise _ended_by(terminal, attached=placement.attached)
        return isinstance(terminal, Moved)

    async def _ask_for(self, stream: Stream, generation: Generation, placement: Placement, deadline: float) -> None:
        """Send the request. Raises DeadlineExceeded, PayloadTooLarge, Unavailable."""
        remaining = deadline - self.now()
        if remaining <= 0:
            raise DeadlineExceeded("the request's deadline passed")
        assembly = stream.assembly
        alone = generation.sampling.n == 1
        traceparent = stream.trail.attempting(placement.worker, assembly.attempt)
        body = GenerateRequest(
            request=stream.request,
            attempt=assembly.attempt,
            model=generation.model,
            sampling=generation.sampling,
            inbox=self.inbox.batch,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
            output_ids=tuple(assembly.ids) if alone else (),
            text_sent=assembly.choices[0].chars if alone else 0,
            session=generation.session,
            priority=generation.priority,
            deadline_ms=int(remaining * 1000),
            expires_unix_ms=int((time.time() + remaining) * 1000) if stream.trusts_clocks else None,
            traceparent=traceparent,
            continuations=assembly.continuations(),
            exact=generation.exact,
            chat=generation.chat,
            scored=assembly.scored,
            then=placement.then,
        )
        mover = stream.mover
        if mover is not None and (held_at := self._holder(mover.worker, placement.worker)):
            held = (assembly.started.prompt_tokens if assembly.started else 0) + len(assembly.ids)
            body = replace(body, source=held_at, source_tokens=held, handed_over=True)
        else:  # vaults have the blocks of a mover that is gone
            body = replace(body, **source_of(placement), handed_over=mover is not None)
        view = self.members.view.workers.get(placement.worker) if stream.trusts_versions else None
        data = codec.encode(body, codec.version_of_offer(view.record, body) if view else None)
        if len(data) > self.connection.max_payload:
            raise PayloadTooLarge(
                f"{len(data)} bytes on the wire, NATS takes at most {self.connection.max_payload}", field="prompt"
            )
        subject = self.subjects.worker_generate(placement.worker, generation.tenant)
        reply = self.inbox.of(stream.request, assembly.attempt)
        headers = headers_of(traceparent, self.connection.max_payload - len(data))
        await self.connection.publish(subject, data, reply=reply, headers=headers)
        if placement.then:
            ahead = self.subjects.worker_generate(placement.then, generation.tenant)
            await self.connection.publish(ahead, codec.encode(body.ahead_from(placement.worker)))

    async def _listen(self, stream: Stream, worker: str, deadline: float) -> None:
        """Until the attempt's terminal frame is here. Raises what ends the wait early."""
        assembly = stream.assembly
        published_at, tokens_before = self.now(), assembly.tokens
        settle_at = float("inf")
        while assembly.terminal is None:
            wait = deadline - self.now()
            if not stream.accepted:
                wait = min(wait, ACK_TIMEOUT_S)
            if stream.mover is not None:
                wait = min(wait, RELEASE_POLL_S)
            wait = min(wait, settle_at - self.now())
            signal = await stream.next_signal(max(wait, 0.0))
            if self.now() >= deadline:
                raise DeadlineExceeded("the request's deadline passed")
            if signal is Signal.CANCELLED:
                raise Cancelled("cancelled by the client")
            gone = signal is Signal.WORKER_LOST or signal is Signal.NO_RESPONDERS
            if assembly.is_moving and (gone or self.now() >= settle_at):
                assembly.settle()
            elif signal is None and not stream.accepted:
                waited_s = min(self.now() - published_at, self.connection.connected_for_s)  # 0 while disconnected
                if waited_s > ACK_TIMEOUT_S and not self.connection.is_silent:
                    raise WorkerLost(f"worker {worker} did not accept within {ACK_TIMEOUT_S} s")
            elif signal is Signal.NO_RESPONDERS:
                if not stream.accepted or not self.placer.in_grace():
                    raise WorkerLost(f"worker {worker} is not there")
            elif signal is Signal.WORKER_LOST:
                raise WorkerLost(f"worker {worker} {stream.lost_why or 'is gone'}")
            elif signal is Signal.MOVING:
                settle_at = self.now() + MOVED_WAIT_S
                await self._ask_again(stream, worker)
            elif signal is Signal.SILENT or signal is Signal.GAP:
                await self._ask_again(stream, worker)
                if stream.was_paused:  # the message that ended the pause may be lost
                    await self._pause(stream, worker, paused=False)
            elif signal is Signal.FULL or signal is Signal.DRAINED:
                await self._pause(stream, worker, paused=signal is Signal.FULL)
            if stream.mover is not None and (_has_begun(stream) or assembly.tokens > tokens_before):
                await self._release_mover(stream)

    def _holder(self, mover: str, successor: str) -> str:
        """The mover's name for its successor; "" if that cannot reach it: in another region, or dead. In another region
        of both the successor finds out whether it lives."""
        region, own = split(mover)
        if mover == successor or region != split(successor)[0]:
            return ""
        return own if region or self.members.view.is_alive(own) else ""

    async def _ask_again(self, stream: Stream, worker: str) -> None:
        self.counters.resends_total += 1
        stream.hearing.asks(self.now())
        assembly = stream.assembly
        inbox = self.inbox.of(stream.request, assembly.attempt)
        first, *others = indices = assembly.next_indices
        more = indices if others else ()
        question = ResendRequest(stream.request, assembly.attempt, first, inbox, more, assembly.scored)
        await self.connection.publish(
            self.subjects.worker_resend(worker, stream.tenant), codec.encode(question), reply=inbox
        )

    async def _follow(self, stream: Stream, worker: str) -> None:
        """An attempt has moved: its worker has the blocks, unless it never began the attempt."""
        terminal = stream.assembly.terminal
        stream.successor = (terminal.to or "") if isinstance(terminal, Moved) else ""
        if stream.mover is not None and not _has_begun(stream):
            await self._cancel(worker, stream, stream.assembly.attempt)
            return
        await self._release_mover(stream)
        stream.mover = Mover(worker, stream.assembly.attempt)

    async def _release_mover(self, stream: Stream) -> None:
        """The successor has begun, or there will be none: the mover may free the blocks."""
        mover, stream.mover = stream.mover, None
        if mover is not None:
            await self._cancel(mover.worker, stream, mover.attempt)

    async def _cancel(self, worker: str, stream: Stream, attempt: int, received: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(KvfleetError):
            message = CancelRequest(stream.request, attempt, self.inbox.batch, received)
            said = self.subjects.worker_cancel(worker, stream.tenant), codec.encode(message)
            self._cancels.append((self.now(), worker, stream.request, *said))
            await self.connection.publish(*said)

    def has_cancelled(self, worker: str) -> bool:
        """Lately, anything of this worker's."""
        return any(told == worker for _, told, *_ in self._cancels)

    async def cancel_again(self, worker: str = "") -> None:
        """What was on its way when the connection broke, ours or this `worker`'s, is lost, and a worker would go on for
        nobody: what it then has of a deleted session, nobody knows of."""
        for at, told, request, subject, data in list(self._cancels):
            is_due = self.now() - at < CANCEL_KEPT_S and request not in self.inbox.receivers
            if is_due and worker in ("", told):
                with contextlib.suppress(KvfleetError):
                    await self.connection.publish(subject, data)

    async def _pause(self, stream: Stream, worker: str, *, paused: bool) -> None:
        if not paused:
            stream.paused_since = None
        await self.connection.publish(
            self.subjects.worker_pause(worker, stream.tenant),
            codec.encode(PauseRequest(stream.request, stream.assembly.attempt, paused, self.inbox.batch)),
        )


def _ended_by(failed: Failed, *, attached: bool) -> KvfleetError:
    """The failure as this reader's error: another reader's cancel or deadline is not its own."""
    error = refusal(failed)
    anothers = isinstance(error, Cancelled) or (attached and isinstance(error, DeadlineExceeded))
    if (failed.retryable or anothers) and not error.retryable:
        return Unavailable(failed.message, field=failed.field, retry_after_s=failed.retry_after_s)
    return error


def _has_begun(stream: Stream) -> bool:
    """Whether the present attempt is known to have been scheduled."""
    started = stream.assembly.started
    return started is not None and started.attempt == stream.assembly.attempt
