"""Traced requests at placement: what is begun, what is carried on to workers, what is told of a decision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from placement_build import a_core, a_generate, accepted, an_ask

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Action, CapsuleHeard, Event, Fail, Forward, PlaceAsked, WorkerAnswered
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvproto.messages import Capsule, GenerateRequest
from kvservice.tracing import NULL
from kvservice.tracing_otel import OtelTracer
from tests.support.kept_spans import Kept

CONTEXT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = CONTEXT.replace("4bf9", "1111")
UNSAMPLED = CONTEXT[:-1] + "0"


class Traced:
    def __init__(self, core: PlacementCore, ratio: float) -> None:
        self.core = core
        self.kept = Kept()
        self.tracer = OtelTracer(service="kvfleet-placement", instance="p1", sample_ratio=ratio, exporter=self.kept)
        self.traces = DecisionTraces(self.tracer, core.ledger)

    def handle(self, event: Event) -> list[Action]:
        return self.core.handle(event, 1.0)

    def forwarded(self, headers: dict[str, str] | None, **fields: object) -> GenerateRequest:
        """What a worker is sent for a bare producer's request."""
        return offer_of(self.traces, self.traces.forward(a_generate(**fields), headers, self.handle))  # type: ignore[arg-type]

    def told(self) -> dict[str, dict[str, object]]:
        """Attributes by name of span."""
        self.tracer.close(2.0)
        return {span.name: dict(span.attributes or {}) for span in self.kept.spans}


def offer_of(traces: DecisionTraces, actions: list[Action]) -> GenerateRequest:
    (forward,) = (one for one in actions if isinstance(one, Forward))
    if forward.request.traceparent is None:
        return forward.request
    return traces.offered(forward.worker, forward.tenant, forward.request)


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced(a_core("w1", "w2"), 0.0)
    yield made
    made.tracer.close(1.0)


def trace_of(request: GenerateRequest) -> str | None:
    return None if request.traceparent is None else request.traceparent[3:35]


def test_a_decision_is_told(traced: Traced) -> None:
    asked = PlaceAsked("_INBOX.x", "acme", an_ask())
    traced.traces.place(asked, {"traceparent": CONTEXT}, traced.handle)
    decide = traced.told()["decide"]
    assert decide["kvfleet.worker.id"] in ("w1", "w2")
    assert decide["kvfleet.placement.policy"] == "bounded_ring"
    assert decide["kvfleet.placement.candidates"] == 2
    assert (decide["kvfleet.tenant"], decide["kvfleet.request.id"], decide["kvfleet.attempt"]) == ("acme", "r1", 0)
    assert decide["gen_ai.usage.input_tokens"] == 3


def test_a_refusal_is_told() -> None:
    traced = Traced(a_core(), 0.0)
    actions = traced.traces.place(PlaceAsked("_INBOX.x", "acme", an_ask()), {"traceparent": CONTEXT}, traced.handle)
    (fail,) = (one for one in actions if isinstance(one, Fail))
    assert traced.told()["decide"]["error.type"] == fail.failed.code


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": UNSAMPLED}, {"traceparent": "garbage"}])
def test_a_clients_question_begins_no_trace(headers: dict[str, str] | None) -> None:
    """Whatever the ratio: it is the client's request, and its trace to begin."""
    traced = Traced(a_core("w1"), 1.0)
    assert traced.traces.place(PlaceAsked("_INBOX.x", "acme", an_ask()), headers, traced.handle)
    assert traced.told() == {}


def test_a_producers_header_goes_before_its_body(traced: Traced) -> None:
    assert trace_of(traced.forwarded({"TraceParent": CONTEXT}, request="r1", traceparent=OTHER)) == CONTEXT[3:35]
    assert trace_of(traced.forwarded(None, request="r2", traceparent=OTHER)) == OTHER[3:35]


@pytest.mark.parametrize("given", [None, "garbage", UNSAMPLED])
def test_what_is_no_sampled_context_goes_to_no_worker(traced: Traced, given: str | None) -> None:
    headers = None if given is None else {"traceparent": given}
    assert traced.forwarded(headers, request="r1").traceparent is None
    assert traced.forwarded(None, request="r2", traceparent=given).traceparent is None
    assert traced.told() == {}


def test_a_producers_request_may_begin_a_trace() -> None:
    traced = Traced(a_core("w1"), 1.0)
    assert trace_of(traced.forwarded(None, request="r1")) is not None
    assert traced.forwarded({"traceparent": UNSAMPLED}, request="r2").traceparent is None, (
        "it says that it does not want one"
    )
    assert set(traced.told()) == {"forward", "decide"}


def test_without_a_tracer_the_context_is_handed_on_as_it_is() -> None:
    core = a_core("w1")
    traces = DecisionTraces(NULL, core.ledger)
    actions = traces.forward(a_generate(), {"traceparent": CONTEXT}, lambda event: core.handle(event, 1.0))
    assert offer_of(traces, actions).traceparent == CONTEXT
    actions = traces.forward(a_generate("r2", traceparent="garbage"), None, lambda event: core.handle(event, 1.0))
    assert offer_of(traces, actions).traceparent is None


def test_what_a_draining_worker_hands_over_stays_in_its_trace(traced: Traced) -> None:
    """Its capsule has the context that the worker was sent; the next one goes on below it."""
    first = traced.forwarded({"traceparent": CONTEXT})
    traced.core.handle(WorkerAnswered(accepted("r1", 0, "w1"), "r1"), 1.0)
    moved = CapsuleHeard("_wrk.w1.reply", Capsule("public", "w1", first))
    second = offer_of(traced.traces, traced.handle(moved))
    assert (second.handed_over, trace_of(second)) == (True, CONTEXT[3:35])
    traced.tracer.close(2.0)
    parents = {format(span.context.span_id, "016x"): span.parent for span in traced.kept.spans}
    assert first.traceparent is not None
    assert second.traceparent is not None
    above = parents[second.traceparent[36:52]]
    assert above is not None
    assert format(above.span_id, "016x") == first.traceparent[36:52]
