"""Loop: where an attempt goes: as placement decides, or by the plain ring where it does not answer (fail open)."""

from __future__ import annotations

import asyncio
import logging
import random

from kvproto import codec
from kvproto.affinity import ring_key
from kvproto.connection import Connection
from kvproto.errors import (
    Cancelled,
    CodecError,
    InvalidRequest,
    KvfleetError,
    ModelNotFound,
    NotFound,
    NoWorkers,
    Unavailable,
    WorkerLost,
    from_code,
)
from kvproto.fleet_view import RECONNECT_GRACE_S
from kvproto.generation import Counters, Generation
from kvproto.members import Members
from kvproto.messages import Failed, Placement, PlaceRequest, State
from kvproto.stream import Stream
from kvproto.subjects import Subjects
from kvproto.trials import Trials

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 0.05
POLICY_TIMEOUT_S = 1.0  # where nobody else can decide as the request wants it
DIRECT, RING = "direct", "ring"  # policies that a client can follow by itself
RETRY_WAIT_S = 0.2


class Placer:
    """What all requests of a client share to be placed. Holds no state of a request."""

    def __init__(self, connection: Connection, subjects: Subjects, members: Members, counters: Counters) -> None:
        self.connection = connection
        self.subjects = subjects
        self.members = members
        self.counters = counters

    async def place(self, stream: Stream, generation: Generation, trials: Trials) -> Placement:
        """Ask placement; without an answer in 50 ms, the plain ring over this client's own view.

        A fresh request with nobody to serve it fails at once; one that has begun, or that started in an outage, waits
        for somebody to come (back).
        """
        while True:
            if stream.closed:
                raise Cancelled("cancelled by the client")
            try:
                return await self._ask(stream, generation, trials)
            except ModelNotFound:
                raise
            except KvfleetError as error:
                begun = bool(trials.excluded or stream.assembly.tokens)
                waits = begun or not self.connection.is_connected or self.in_grace()
                now = asyncio.get_running_loop().time()
                if not (error.retryable and waits) or not trials.may_wait(now, RETRY_WAIT_S):
                    raise
                await retry_wait()

    def in_grace(self) -> bool:
        """Just after an outage a worker may still be on its way back: nobody listening proves nothing yet."""
        return self.connection.reconnects_total > 0 and self.connection.connected_for_s < RECONNECT_GRACE_S

    async def _ask(self, stream: Stream, generation: Generation, trials: Trials) -> Placement:
        begun = bool(stream.attempts or stream.assembly.tokens)  # what was accepted completes
        policy, worker = _policy(generation), generation.worker
        if policy == DIRECT and (stream.assembly.tokens or stream.assembly.started is not None):
            policy, worker = None, None  # the worker that was named had it, and lost it
        question = PlaceRequest(
            request=stream.request,
            model=generation.model,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
            session=generation.session,
            attempt=stream.attempts,
            excluded=tuple(trials.excluded),
            max_tokens=generation.sampling.max_tokens * generation.sampling.n,
            policy=policy,
            worker=worker,
            priority=generation.priority,
            max_wait_s=None if begun else generation.max_wait_s,
        )
        # A stream that has begun goes on by the ring, whatever policy it asked for; one that has not can still be
        # refused, rather than be placed as it did not ask for.
        insists = question.policy not in (None, RING, DIRECT) and not begun
        subject = self.subjects.place(generation.tenant, generation.model)
        try:
            timeout_s = POLICY_TIMEOUT_S if insists else PLACE_TIMEOUT_S
            reply = await self.connection.request(subject, codec.encode(question), timeout_s)
            answer = _read_answer(reply.data)
            if isinstance(answer, Failed) and isinstance(refusal := _refusal(answer), CodecError):
                raise refusal  # it cannot read what this version asks
        except (TimeoutError, WorkerLost, Unavailable, CodecError) as error:
            if insists:
                what = f"placement does not answer, and only it can decide by the policy {question.policy!r}"
                raise Unavailable(what, field="policy", retry_after_s=1.0) from None
            self.counters.fallback_total += 1
            log.info("request %s: placement is silent (%s), placed by the ring", stream.request, error)
            return self._ring_placement(question, generation)
        if isinstance(answer, Failed):
            raise _refusal(answer)
        self.counters.placed_total += 1
        return answer

    def _ring_placement(self, question: PlaceRequest, generation: Generation) -> Placement:
        if question.policy == DIRECT:
            return self._direct_placement(question)
        key = ring_key(
            generation.tenant,
            session=generation.session,
            prompt_ids=generation.prompt_ids,
            prompt=generation.prompt,
        )
        ring = self.members.ring(generation.model)
        worker = (
            ring.owner(key, excluded=question.excluded)
            or ring.owner(key, excluded=question.excluded[-1:])
            or ring.owner(key)
        )
        if worker is None:
            if generation.model not in {view.record.model for view in self.members.view.workers.values()}:
                raise ModelNotFound(f"no worker serves {generation.model!r}", field="model")
            raise NoWorkers(f"no worker of {generation.model!r} is ready", retry_after_s=2.0)
        return Placement(question.request, worker, question.attempt, policy=RING, why="placement did not answer")

    def _direct_placement(self, question: PlaceRequest) -> Placement:
        """The named worker or an error, as placement would say it."""
        worker = question.worker
        if not worker:
            raise InvalidRequest("the policy direct needs a worker", field="worker")
        record = self.members.view.with_state(worker)
        if record is None or record.state is State.DEAD:
            raise NotFound(f"no worker {worker[:64]!r} is alive", field="worker")
        if record.model != question.model:
            raise NotFound(f"worker {worker} serves {record.model}, not {question.model[:64]}", field="worker")
        if record.state is not State.READY:
            raise Unavailable(f"worker {worker} is {record.state.value}", field="worker")
        return Placement(question.request, worker, question.attempt, policy=DIRECT, why="placement did not answer")


async def retry_wait() -> None:
    """Before somebody is asked again; requests that were lost together do not come back together."""
    await asyncio.sleep(RETRY_WAIT_S * (0.75 + random.random() / 2))


def read_placement(data: bytes) -> Placement:
    """Placement's answer: a decision (a map), or its refusal (a `Failed` frame), which is raised."""
    answer = _read_answer(data)
    if isinstance(answer, Failed):
        raise _refusal(answer)
    return answer


def _read_answer(data: bytes) -> Placement | Failed:
    if len(data) > 1 and not codec.is_map_marker(data[1]):
        for frame in codec.decode_frames(data):
            if isinstance(frame, Failed):
                return frame
        raise CodecError("neither a placement nor a failure")
    return codec.decode(Placement, data)


def _refusal(failed: Failed) -> KvfleetError:
    return from_code(failed.code, failed.message, field=failed.field, retry_after_s=failed.retry_after_s)


def _policy(generation: Generation) -> str | None:
    """Who names a worker and no policy wants that worker."""
    return generation.policy or (DIRECT if generation.worker is not None else None)
