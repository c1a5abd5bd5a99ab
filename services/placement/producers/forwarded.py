"""One reader of a bare producer's request, and what placement and workers are asked for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvfleet.placement.events import Cancel, Fail, GenerateAsked, TellReturn
from kvproto.messages import (
    CancelRequest,
    Capsule,
    Encoding,
    Failed,
    GenerateRequest,
    PlaceRequest,
    ProducerRequest,
    ReturnExpected,
    Sampling,
    Watch,
)
from kvproto.subjects import request_inbox
from kvservice.return_times import said_span

SAMPLING = tuple({one.name for one in fields(Sampling)} & {one.name for one in fields(ProducerRequest)})  # named alike


@dataclass(slots=True)
class Forwarded:
    """`key` tells readers of one request apart: the first one's is the request's id, further ones' have a suffix.
    `attempt` and `worker` are those of the present offer, or of the accepted one."""

    key: str
    tenant: str
    request: str
    inbox: str
    encoding: Encoding
    attempt: int
    body: GenerateRequest | None = None  # of the next offer; None: there will be none
    asked_at: float = 0.0
    max_wait_s: float | None = None
    worker: str = ""
    tried: list[str] = field(default_factory=list)
    attached: bool = False  # to the attempt of another reader's request
    offer: GenerateRequest | None = None  # the present one
    unheard: bool = False  # its answer may have been lost
    offered_at: float = 0.0
    due: float = 0.0  # of its present state: acknowledgement, next question, or end of the grace
    epoch: str = ""  # the life of the worker that accepted
    asks: int = 0  # questions since the worker's last word
    retry_after_s: float | None = None  # the least that a worker which refused has said
    carried_until: float | None = None  # of a capsule: when the search for a successor ends
    let_go: Cancel | None = None  # the worker that handed it over waits for this
    successor: str = ""  # whom that worker has named
    session: str = ""
    expect_return_s: float | None = None  # from its end to its conversation's next turn, as the producer says

    def reply(self, inbox_prefix: str) -> str:
        """The attempt tells the server's 503s apart, which carry nothing else."""
        return request_inbox(inbox_prefix, self.key, self.attempt)

    def fail(self, failed: Failed) -> Fail:
        return Fail(self.inbox, failed, self.encoding)

    def take_back(self) -> Cancel:
        return Cancel(self.worker, CancelRequest(self.request, self.attempt, self.inbox))

    def left_ms(self, now: float) -> int | None:
        assert self.body is not None
        limit_ms = self.body.deadline_ms
        return None if limit_ms is None else limit_ms - int((now - self.asked_at) * 1000)

    def capsule(self, now: float) -> Capsule | None:
        """For another replica to carry on, if it was handed over and no worker has accepted it."""
        if self.carried_until is None or self.body is None or self.let_go is None:
            return None
        left_ms = self.left_ms(now)
        body = replace(self.body, attempt=self.attempt, deadline_ms=None if left_ms is None else max(left_ms, 0))
        return Capsule(self.tenant, self.let_go.worker, body, self.let_go.cancel.attempt)

    def tell_return(self) -> list[TellReturn]:
        """Its turn has ended well."""
        if self.expect_return_s is None or self.attached:
            return []
        span = said_span(self.expect_return_s)
        return [TellReturn(self.worker, ReturnExpected(self.tenant, self.request, self.attempt, self.session, *span))]

    def release_source(self) -> list[Cancel]:
        """Tell the worker that handed it over to let go, once."""
        told, self.let_go = self.let_go, None
        return [] if told is None else [told]

    def watch(self) -> Watch:
        return Watch(self.tenant, self.request, self.attempt, self.worker, self.epoch, self.inbox, self.encoding)


def body_of(asked: GenerateAsked, model: str, watcher: str, max_priority: int) -> GenerateRequest:
    """All but the attempt, the rest of the deadline, and the worker to pull from. Any tenant's producer can name a
    priority, and higher ones send others' waiting requests away: it gets `max_priority` at most."""
    ask = asked.ask
    sampling: dict[str, Any] = {name: getattr(ask, name) for name in SAMPLING}
    sampling |= {"seed": asked.seed, "overflow": ask.context_overflow}
    return GenerateRequest(
        request=asked.request,
        attempt=0,
        model=model,
        sampling=Sampling(**sampling),
        inbox=asked.inbox,
        prompt_ids=ask.prompt_ids,
        prompt=ask.prompt,
        encoding=asked.encoding,
        session=ask.session or (asked.chat.conversation if asked.chat else None),
        priority=min(ask.priority, max_priority),
        deadline_ms=ask.deadline_ms,
        expires_unix_ms=None if ask.deadline_ms is None else min(asked.unix_ms + ask.deadline_ms, 2**53),
        traceparent=ask.traceparent,
        watcher=watcher,
        exact=ask.exact,
        chat=asked.chat,
    )


def question_of(
    body: GenerateRequest, attempt: int, excluded: tuple[str, ...], max_wait_s: float | None
) -> PlaceRequest:
    """The tokens generated already are part of the prompt."""
    return PlaceRequest(
        request=body.request,
        model=body.model,
        prompt_ids=body.prompt_ids + body.output_ids if body.prompt_ids else (),
        prompt=body.text,
        session=body.session,
        attempt=attempt,
        excluded=excluded,
        max_tokens=body.sampling.max_tokens * body.sampling.at_once,
        priority=body.priority,
        max_wait_s=max_wait_s,
        reusable=None if body.sampling.prompt_logprobs is None else max(body.scored, 1) - 1,
    )
