"""Loop: places an attempt by placement's decision, or by the plain ring where it does not answer (fail open).

Placement answers with a decision (a map), or with its refusal (a `Failed` frame). It may name another region:

    own placement ──▶ "ask eu" ──▶ eu's placement ──▶ a worker there
                 ◀── "not eu" ─────┘ refuses, or does not answer
    own placement ──▶ w1, "eu may have more" ──▶ eu's placement ──▶ who there has it: w1 may fetch it
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

from kvproto import codec
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
from kvproto.hash_ring import ring_key
from kvproto.ids import DEFAULT_TENANT, new_request_id
from kvproto.members import Members
from kvproto.messages import Failed, Placement, PlaceRequest, State, WorkerRole
from kvproto.regions import qualify, split
from kvproto.streams.generation import ClientCounters, Generation, Trials
from kvproto.streams.silence import PlacementBreaker
from kvproto.streams.stream import Stream
from kvproto.subjects import Subjects
from kvproto.trace_context import headers_of

log = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 0.05
POLICY_TIMEOUT_S = 1.0  # for a policy that only placement can follow
REGION_TIMEOUT_S = 1.0
SOURCE_TIMEOUT_S = 0.25
DIRECT, RING = "direct", "ring"  # policies that a client can follow by itself
RETRY_WAIT_S = 0.2
MOST_REGIONS = 8  # asked one after the other


@dataclass(eq=False)
class Placer:
    """Shared by all requests of a client. Holds no state of a request."""

    connection: Connection
    subjects: Subjects
    members: Members
    counters: ClientCounters
    breaker: PlacementBreaker = field(default_factory=PlacementBreaker)

    async def place(self, stream: Stream, generation: Generation, trials: Trials) -> Placement:
        """Ask placement; without an answer in 50 ms, use the plain ring over this client's own view. Without a worker a
        fresh request fails at once; one that has begun, or that started in an outage, waits."""
        while True:
            if stream.closed:
                raise Cancelled("cancelled by the client")
            traceparent = stream.trail.placing(stream.attempts)
            try:
                placement = await self._ask(stream, generation, trials, traceparent)
                stream.trail.placed(placement)
                return placement
            except KvfleetError as error:
                stream.trail.unplaced(error)
                begun = bool(trials.excluded) or stream.assembly.has_begun
                if isinstance(error, ModelNotFound) and not begun:
                    raise  # else it had a worker, which a placement that has just started does not know yet
                waits = (begun or not self.connection.is_connected or self.in_grace()) and not generation.spare
                now = asyncio.get_running_loop().time()
                retryable = error.retryable or isinstance(error, ModelNotFound)
                if not (retryable and waits) or not trials.may_wait(now, RETRY_WAIT_S):
                    raise
                await retry_wait()

    async def miss(self, model: str) -> None:
        """Tell placement of a request for a model without a known worker, so that autoscaling starts one. Raises
        NoWorkers if it is one of this fleet's: of a process that has just started, placement may know more, also a
        worker that takes it. Without an answer, if no worker at all is known."""
        question = PlaceRequest(request=new_request_id(), model=model, prompt="")
        try:
            subject = self.subjects.place(DEFAULT_TENANT, model)
            answer = read_answer(await self._exchange(subject, question, PLACE_TIMEOUT_S))
        except (TimeoutError, KvfleetError):
            if self.members.view.workers:
                return
            raise NoWorkers("no worker has been seen yet", retry_after_s=2.0) from None
        if not isinstance(answer, Failed) or answer.retryable:
            raise NoWorkers(f"no worker of {model!r} is ready", retry_after_s=2.0)

    def in_grace(self) -> bool:
        """Just after an outage, when no-responders notices prove nothing yet."""
        return not self.connection.is_settled(RECONNECT_GRACE_S)

    async def _ask(self, stream: Stream, generation: Generation, trials: Trials, traceparent: str | None) -> Placement:
        begun = bool(stream.attempts) or stream.assembly.has_begun
        worker = generation.worker
        policy = generation.policy or (DIRECT if worker is not None else None)
        if policy == DIRECT and (stream.assembly.has_begun or stream.assembly.started is not None):
            policy, worker = None, None  # the named worker has lost it
        question = PlaceRequest(
            request=stream.request,
            model=generation.model,
            prompt_ids=generation.prompt_ids,
            prompt=generation.text,
            session=generation.session,
            attempt=stream.attempts,
            excluded=tuple(trials.excluded),
            max_tokens=generation.sampling.max_tokens * generation.sampling.at_once,
            policy=policy,
            worker=worker,
            priority=generation.priority,
            max_wait_s=None if begun else generation.max_wait_s,
            reusable=stream.assembly.reusable,
            spare=generation.spare,
            successor=stream.successor,
        )
        # A stream that has begun may go on by the ring, whatever its policy; a fresh one is refused instead.
        insists = question.spare or (question.policy not in (None, RING, DIRECT) and not begun)
        tenant = generation.tenant
        answer = await self._ask_own(question, tenant, traceparent, insists=insists)
        while answer.region and not answer.worker:
            there = await self._follow(question, answer, tenant, traceparent)
            if there is not None:
                return there
            question = replace(question, excluded_regions=(*question.excluded_regions, answer.region))
            if len(question.excluded_regions) > MOST_REGIONS:
                raise NoWorkers(f"{MOST_REGIONS} regions could not take it", retry_after_s=2.0)
            answer = await self._ask_own(question, tenant, traceparent, insists=insists)
        if answer.elsewhere:
            answer = await self._find_source(question, answer, tenant, traceparent)
        return answer

    async def _exchange(
        self, subject: str, question: PlaceRequest, timeout_s: float, traceparent: str | None = None
    ) -> bytes:
        """Raises TimeoutError, WorkerLost, Unavailable."""
        deadline_ms = round(timeout_s * 1000)
        expires = int(time.time() * 1000) + deadline_ms
        data = codec.encode(replace(question, deadline_ms=deadline_ms, expires_unix_ms=expires))
        headers = headers_of(traceparent, self.connection.max_payload - len(data))
        return (await self.connection.request(subject, data, timeout_s, headers)).data

    async def _ask_own(
        self, question: PlaceRequest, tenant: str, traceparent: str | None, *, insists: bool
    ) -> Placement:
        """The own region's placement: a worker, or another region's name."""
        subject = self.subjects.place(tenant, question.model)
        now = asyncio.get_running_loop().time
        if not insists and not self.breaker.may_ask(now()):
            self.counters.unasked_total += 1
            return self._fall_back(question, tenant, "has not answered lately")
        try:
            timeout_s = POLICY_TIMEOUT_S if insists else PLACE_TIMEOUT_S
            data = await self._exchange(subject, question, timeout_s, traceparent)
            self.breaker.answered()
            answer = read_answer(data)
            if isinstance(answer, Failed) and isinstance(refused := refusal(answer), CodecError):
                raise refused  # it cannot read this version's question
        except (TimeoutError, WorkerLost, Unavailable, CodecError) as error:
            if isinstance(error, TimeoutError):  # other errors cost no time
                self.breaker.unanswered(now())
            if insists:
                only = "knows what is spare" if question.spare else f"can decide by the policy {question.policy!r}"
                field = None if question.spare else "policy"
                raise Unavailable(
                    f"placement does not answer, and only it {only}", field=field, retry_after_s=1.0
                ) from None
            return self._fall_back(question, tenant, f"is silent: {error}")
        if isinstance(answer, Failed):
            raise refusal(answer)
        self.counters.placed_total += 1
        return answer

    def _fall_back(self, question: PlaceRequest, tenant: str, why: str) -> Placement:
        """By the plain ring, or to the named worker."""
        self.counters.fallback_total += 1
        about = {"request": question.request}
        log.info("request %s: placement %s; placed by the ring", question.request, why, extra=about)
        if question.policy == DIRECT:
            return self._direct_placement(question)
        key = ring_key(tenant, session=question.session, prompt_ids=question.prompt_ids, prompt=question.prompt)
        ring, excluded = self.members.ring(question.model), question.excluded
        ready = {view.record.id: view.record.role for view in self.members.view.ready(question.model)}
        prefillers = tuple(name for name, role in ready.items() if role is WorkerRole.PREFILL)
        planned = question.successor if question.successor in ready and question.successor not in excluded else None
        worker = (
            planned
            or ring.owner(key, excluded=(*excluded, *prefillers))
            or ring.owner(key, excluded=excluded)
            or ring.owner(key, excluded=excluded[-1:])
            or ring.owner(key)
        )
        if worker is None:
            begun = question.attempt or self.subjects.region  # another worker, or another region, may serve it
            view = self.members.view
            if not begun and view.workers and not view.knows(question.model):
                raise ModelNotFound(f"no worker serves {question.model!r}", field="model")
            raise NoWorkers(f"no worker of {question.model!r} is ready", retry_after_s=2.0)
        return Placement(question.request, worker, question.attempt, policy=RING, why="placement did not answer")

    def _direct_placement(self, question: PlaceRequest) -> Placement:
        """The named worker, or placement's error."""
        worker = question.worker
        if not worker:
            raise InvalidRequest("the policy direct needs a worker", field="worker")
        record = self.members.view.with_state(worker)
        if record is None or record.state is State.DEAD:
            raise NotFound(f"no worker {worker[:64]!r} is alive", field="worker")
        if not record.serves(question.model):
            raise NotFound(f"worker {worker} serves {record.model}, not {question.model[:64]}", field="worker")
        if record.state is not State.READY:
            raise Unavailable(f"worker {worker} is {record.state.value}", field="worker")
        return Placement(question.request, worker, question.attempt, policy=DIRECT, why="placement did not answer")

    async def _follow(
        self, question: PlaceRequest, referral: Placement, tenant: str, traceparent: str | None
    ) -> Placement | None:
        """A worker of the region that the own placement names; None if that region cannot take it."""
        region = referral.region
        known_there = tuple(own for there, own in map(split, question.excluded) if there == region)
        there = replace(question, excluded=known_there, excluded_regions=())
        answer = await self._ask_region(region, tenant, there, REGION_TIMEOUT_S, traceparent)
        if answer is None or not answer.worker:
            self.counters.region_refusals_total += 1
            return None
        self.counters.spilled_total += 1
        log.info("request %s goes to region %s: %s", question.request, region, referral.why)
        placed = replace(answer, worker=qualify(region, answer.worker), region=region)
        return _with_better_source(placed, referral)

    async def _find_source(
        self, question: PlaceRequest, placement: Placement, tenant: str, traceparent: str | None
    ) -> Placement:
        """The same placement, with a source in the other region if that has more of the prompt."""
        there = replace(question, excluded=(), excluded_regions=(), policy=None, worker=None, seeks_source=True)
        answer = await self._ask_region(placement.elsewhere, tenant, there, SOURCE_TIMEOUT_S, traceparent)
        return placement if answer is None else _with_better_source(placement, answer)

    async def _ask_region(
        self, region: str, tenant: str, question: PlaceRequest, timeout_s: float, traceparent: str | None
    ) -> Placement | None:
        try:
            subject = self.subjects.region_place(region, tenant, question.model)
            answer = read_answer(await self._exchange(subject, question, timeout_s, traceparent))
        except (TimeoutError, KvfleetError) as error:
            log.info("request %s: region %s does not answer: %s", question.request, region, error or "in time")
            return None
        if isinstance(answer, Failed):
            log.info("request %s: region %s refuses: %s", question.request, region, answer.message)
            return None
        return answer


def _with_better_source(placement: Placement, other: Placement) -> Placement:
    """With the source of `other`, if that has more of the prompt."""
    has = max(sum(placement.expected_hit.values()), placement.source_tokens)
    if not other.source or other.source_tokens <= has:
        return placement
    return replace(placement, **source_of(other))


def source_of(placement: Placement) -> dict[str, Any]:
    """The fields that name a source, which a GenerateRequest has too."""
    return {name: getattr(placement, name) for name in ("source", "source_tokens", "source_addresses", "source_seal")}


async def retry_wait() -> None:
    """Spread, so that requests that were lost together do not retry together."""
    await asyncio.sleep(RETRY_WAIT_S * (0.75 + random.random() / 2))


def read_answer(data: bytes) -> Placement | Failed:
    """Placement's answer on `kvf.place`. Raises CodecError."""
    if len(data) > 1 and not codec.is_map_marker(data[1]):
        for frame in codec.decode_frames(data):
            if isinstance(frame, Failed):
                return frame
        raise CodecError("neither a placement nor a failure")
    return codec.decode(Placement, data)


def refusal(failed: Failed) -> KvfleetError:
    return from_code(failed.code, failed.message, field=failed.field, retry_after_s=failed.retry_after_s)
