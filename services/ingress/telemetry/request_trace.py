"""The spans of one sampled HTTP request and of its attempts, without texts. Owned by the event loop; docs/tracing.md.

POST /v1/chat/completions                   the exchange: until the answer is complete
 ├─ tokenise                                history, tokenizer, chat template, ids
 └─ stream                                  kvproto.Client's part, over as many attempts as it takes
     ├─ place ─▶ placement                  each time placement is asked for a worker
     └─ attempt ─▶ worker                   each worker that was asked; each links to the one before
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.runs.jobs import Job, Prepare
from kvfleet.ingress.runs.runs import Run
from kvproto.errors import KvfleetError
from kvproto.messages import Placement
from kvproto.streams.generation import Generation
from kvproto.trace_context import Trail
from kvservice.tracing import Attributes, Span, Tracer, Value, by_nats, unix_ns, work_for

CLIENT_LEFT = 499


def begin(tracer: Tracer, exchange: Exchange, route: str) -> RequestTrace | None:
    """Goes on with the caller's trace if it is sampled; without one this may begin one. The task's log lines and the
    answer name it from here on."""
    if not tracer.enabled:
        return None
    path = exchange.path  # generating routes have one path each
    span = tracer.begin(
        f"POST {path}",
        exchange.header(b"traceparent"),
        {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "url.scheme": "http",
            "gen_ai.operation.name": "text_completion" if route in ("completions", "generate") else "chat",
            "gen_ai.provider.name": "kvfleet",
        },
        kind="server",
        root=True,
    )
    work_for(span)
    if span is None:
        return None
    if exchange.callers_id is not None:
        span.set({"kvfleet.request.callers_id": exchange.callers_id})
    exchange.trace = trace = RequestTrace(span)
    return trace


@dataclass(eq=False, slots=True)
class RequestTrace:
    span: Span
    error: KvfleetError | None = None  # what the caller was told
    names_session: bool = False
    carried: bool = False
    trails: list[RequestTrail] = field(default_factory=list)  # of its streams

    def tokenising(self, prepare: Prepare) -> Prepare:
        async def traced() -> Job:
            span = self.span.child("tokenise")
            try:
                job = await prepare()
            except KvfleetError as error:
                span.end(error=error.code)
                raise
            span.set({"gen_ai.usage.input_tokens": len(job.generation.prompt_ids)})
            span.end()
            return job

        return traced

    def trail(self, generation: Generation) -> RequestTrail:
        """For a stream that begins, perhaps again after the client left and came back."""
        said = about(generation, names_session=self.names_session)
        self.span.set(said)
        trail = RequestTrail(self, said)
        self.trails.append(trail)
        return trail

    def has_carried(self, runs: Sequence[Run], arrived_at: float, *, found: bool) -> None:
        """The caller has all but the end of its answer, or has left. `found`: another request began the run."""
        self.carried = True
        begun = [run.first_token_at for run in runs if run.first_token_at is not None]
        if begun:
            seconds = {"gen_ai.response.time_to_first_chunk": min(begun) - arrived_at}
            on = self.trails[0].stream if self.trails else self.span
            on.event("first_token", {} if found else seconds, at=unix_ns(min(begun)))
        ends = [end for run in runs if (end := run.transcript.finished) is not None]
        if ends:
            self.span.set(
                {
                    "gen_ai.usage.input_tokens": sum(end.prompt_tokens for end in ends),
                    "gen_ai.usage.output_tokens": sum(end.output_tokens for end in ends),
                    "gen_ai.usage.cache_read.input_tokens": sum(end.cached_tokens for end in ends),
                    "gen_ai.response.finish_reasons": [end.reason.value for end in ends],
                }
            )
        for trail in self.trails:
            trail.end()

    def end(self, request: str, status: int) -> None:
        self.span.set(
            {"http.response.status_code": status, "gen_ai.response.id": request, "kvfleet.request.id": request}
        )
        error = self.error.code if self.error is not None else str(status) if status >= 400 else None
        if error is not None and 400 <= status < 500 and status != CLIENT_LEFT:
            self.span.set({"error.type": error})  # the caller's mistake: this server did as it should
            error = None
        self.span.end(error=error)


@dataclass(eq=False)
class RequestTrail(Trail):
    """Of one stream. The span `stream` ends when the stream has, but not before its first token was noted."""

    trace: RequestTrace
    said: Attributes
    place: Span | None = None
    attempt: Span | None = None
    last: str | None = None  # the attempt before
    ended_at: int | None = None
    error: str | None = None
    stream: Span = field(init=False)

    def __post_init__(self) -> None:
        self.stream = self.trace.span.child("stream", self.said)
        self.traceparent = self.stream.traceparent

    def placing(self, attempt: int) -> str | None:
        self.place = self.stream.child("place", _sent("place", self.said) | {"kvfleet.attempt": attempt}, kind="client")
        return self.place.traceparent

    def placed(self, placement: Placement) -> None:
        if self.place is not None:
            self.place.set(placed(placement))
            self.place.end()
            self.place = None

    def unplaced(self, error: KvfleetError) -> None:
        if self.place is not None:
            self.place.end(error=error.code)
            self.place = None

    def attempting(self, worker: str, attempt: int) -> str | None:
        said: dict[str, Value] = {"kvfleet.attempt": attempt, "kvfleet.worker.id": worker}
        self.attempt = self.stream.child("attempt", _sent("generate", self.said) | said, kind="client")
        self.attempt.link(self.last)
        self.last = self.attempt.traceparent
        return self.last

    def attempt_ended(self, error: KvfleetError | None, *, moved: bool) -> None:
        if self.attempt is not None:
            if moved:
                self.attempt.event("moved")
            if error is not None:
                self.stream.event("attempt_failed", {"error.type": error.code})
            self.attempt.end(error=None if error is None else error.code)
            self.attempt = None

    def closed(self, error: KvfleetError | None) -> None:
        code = None if error is None else error.code
        for span in (self.place, self.attempt):
            if span is not None:
                span.end(error=code)
        self.ended_at, self.error = time.time_ns(), code
        if self.trace.carried:
            self.end()

    def end(self) -> None:
        if self.ended_at is not None:
            self.stream.end(error=self.error, at=self.ended_at)


def about(generation: Generation, *, names_session: bool) -> dict[str, Value]:
    """The attributes of a request, without a conversation that the caller did not name."""
    sampling = generation.sampling
    said: dict[str, Value] = {
        "gen_ai.request.model": generation.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": sampling.n,
        "kvfleet.tenant": generation.tenant,
    }
    if generation.request is not None:
        said["kvfleet.request.id"] = generation.request
    if names_session and generation.session is not None:
        said["gen_ai.conversation.id"] = generation.session
    return said


def placed(placement: Placement) -> dict[str, Value]:
    said: dict[str, Value] = {
        "kvfleet.worker.id": placement.worker,
        "kvfleet.placement.policy": placement.policy,
        "kvfleet.placement.fallback": not placement.placement,  # placement did not answer: by the ring
    }
    return said | {f"kvfleet.expected_hit.{tier}_tokens": count for tier, count in placement.expected_hit.items()}


def _sent(operation: str, said: Attributes) -> dict[str, Value]:
    request = said.get("kvfleet.request.id", "")
    return by_nats(operation, "send", said["gen_ai.request.model"], said["kvfleet.tenant"], request)
