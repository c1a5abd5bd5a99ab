"""The spans of traced requests at placement. Only a bare producer's request may begin a trace here.

a Client's place ─▶ decide
a producer's generate ─▶ forward ─▶ decide (one for each offer) ─▶ the worker
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvfleet.placement.events import Action, Answer, Event, Fail, GenerateAsked, PlaceAsked
from kvfleet.placement.record.ledger import Ledger
from kvproto.messages import GenerateRequest
from kvproto.trace_context import in_headers, sampled
from kvservice.tracing import Span, Tracer, Value, by_nats, within

Headers = Mapping[str, str] | None
Handle = Callable[[Event], list[Action]]


@dataclass(frozen=True, slots=True)
class DecisionTraces:
    """Owned by the placement loop."""

    tracer: Tracer
    ledger: Ledger

    def place(self, asked: PlaceAsked, headers: Headers, handle: Handle) -> list[Action]:
        ask = asked.ask
        said = by_nats("place", "process", ask.model, asked.tenant, ask.request) | {"kvfleet.attempt": ask.attempt}
        span = self.tracer.begin("decide", in_headers(headers), said, kind="server")
        if span is None:
            return handle(asked)
        with within(span):
            actions = handle(asked)
        answered = next((one.placement for one in actions if isinstance(one, Answer)), None)
        if answered is not None:
            span.set(self._decided(asked.tenant, asked.ask.request, answered.attempt))
        _end(span, actions)
        return actions

    def forward(self, asked: GenerateAsked, headers: Headers, handle: Handle) -> list[Action]:
        """Offer a producer's request. The trace context of its header goes before that of its body."""
        given = in_headers(headers) or asked.ask.traceparent
        span: Span | None = None
        if self.tracer.enabled:
            said = by_nats("generate", "process", asked.ask.model or asked.model_token, asked.tenant, asked.request)
            said["gen_ai.request.max_tokens"] = asked.ask.max_tokens
            span = self.tracer.begin("forward", given, said, kind="consumer", root=True)
        if span is None:
            carried = sampled(given)
            if carried == asked.ask.traceparent:
                return handle(asked)
            return handle(replace(asked, ask=replace(asked.ask, traceparent=carried)))
        with within(span):
            actions = handle(replace(asked, ask=replace(asked.ask, traceparent=span.traceparent)))
        _end(span, actions)
        return actions

    def offered(self, worker: str, tenant: str, request: GenerateRequest) -> GenerateRequest:
        """The request for a worker, with its trace below the decision."""
        said = self._decided(tenant, request.request, request.attempt)
        said |= by_nats("generate", "send", request.model, tenant, request.request) | {
            "kvfleet.attempt": request.attempt,
            "kvfleet.worker.id": worker,
            "kvfleet.handed_over": request.handed_over,
        }
        span = self.tracer.begin("decide", request.traceparent, said, kind="client")
        if span is None:
            return replace(request, traceparent=sampled(request.traceparent))
        span.end()
        return replace(request, traceparent=span.traceparent)

    def _decided(self, tenant: str, request: str, attempt: int) -> dict[str, Value]:
        decisions = self.ledger.explain(request, tenant) if self.tracer.enabled else ()
        made = next((one for one in decisions if one.attempt == attempt), None)
        if made is None:
            return {}
        said: dict[str, Value] = {
            "kvfleet.worker.id": made.worker,
            "kvfleet.placement.policy": made.policy,
            "kvfleet.placement.candidates": made.candidates_total,
            "gen_ai.usage.input_tokens": made.prompt_tokens,
        }
        if made.expected_ttft_s is not None:
            said["kvfleet.expected_ttft"] = made.expected_ttft_s
        if made.source:
            said["kvfleet.source.id"] = made.source
        return said | {f"kvfleet.expected_hit.{tier}_tokens": count for tier, count in made.expected_hit.items()}


def _end(span: Span, actions: list[Action]) -> None:
    """The first answer is the request's own: others may have become due meanwhile."""
    refused = next((one.failed for one in actions if isinstance(one, Fail)), None)
    span.end(error=None if refused is None else refused.code)
