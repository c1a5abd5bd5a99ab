"""The spans of one traced attempt at this worker. Owned by the event loop; made when the attempt ends.

    generate                       accepted until its terminal frame
     ├─ queue                      until it was first scheduled; restores lie in it
     ├─ restore                    each tier that blocks came from
     ├─ prefill                    until its first token was drawn
     ├─ decode                     until it ended
     ├─ hand_over                  of one that moved: since the worker began to let go
     └─ look, fetch ─▶ vault, peer   begun on transfer threads (`tiers`)

Phases are of the first choice, tokens of all. Only `generate` lives while the request runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvfleet.worker.port.sequence_spec import SequenceTrace
from kvproto.messages import Failed, Finished, GenerateRequest, Moved, Started
from kvservice.tracing import Span, Tracer, Value, by_nats, unix_ns


def begin(tracer: Tracer, worker: str, request: GenerateRequest, tenant: str) -> AttemptTrace | None:
    """None unless its sender traces it."""
    if request.traceparent is None:
        return None
    sampling = request.sampling
    said = by_nats("generate", "process", request.model, tenant, request.request) | {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvfleet",
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.choice.count": sampling.n,
        "kvfleet.worker.id": worker,
        "kvfleet.attempt": request.attempt,
        "kvfleet.priority": request.priority,
        "kvfleet.handed_over": request.handed_over,
    }
    span = tracer.begin("generate", request.traceparent, said, kind="server")
    return None if span is None else AttemptTrace(span)


@dataclass(eq=False, slots=True)
class AttemptTrace:
    """The engine fills `sequence`."""

    span: Span
    sequence: SequenceTrace = field(default_factory=SequenceTrace)
    moving_since: int | None = None  # Unix nanoseconds

    def end(self, started: Started | None, output_tokens: int, terminal: Finished | Failed | Moved) -> None:
        now, span = time.time_ns(), self.span
        said: dict[str, Value] = {"gen_ai.usage.output_tokens": output_tokens}
        if started is not None:
            said["gen_ai.usage.input_tokens"] = started.prompt_tokens
            said["gen_ai.usage.cache_read.input_tokens"] = started.cached_tokens
            said["kvfleet.recomputed_tokens"] = started.recomputed_tokens
            said |= {f"kvfleet.cached.{tier}_tokens": count for tier, count in started.cached.items()}
        span.set(said)
        self._phases(self.sequence, now)
        if self.moving_since is not None:
            moved = {"kvfleet.hand_over.moved": isinstance(terminal, Moved)}
            span.child("hand_over", moved, at=self.moving_since).end(at=now)
        if isinstance(terminal, Finished):
            span.set({"gen_ai.response.finish_reasons": [terminal.reason.value]})
        elif isinstance(terminal, Moved):
            span.event("moved")
        span.end(error=terminal.code if isinstance(terminal, Failed) else None, at=now)

    def _phases(self, came: SequenceTrace, now: int) -> None:
        if came.enqueued is None:
            return
        span, enqueued = self.span, unix_ns(came.enqueued)
        ended = now if came.ended is None else unix_ns(came.ended)
        admitted = ended if came.admitted is None else unix_ns(came.admitted)
        span.child("queue", at=enqueued).end(at=admitted)
        for restored in came.restores:
            about = {
                "kvfleet.tier": restored.tier.value,
                "kvfleet.blocks": restored.wanted,
                "kvfleet.blocks.hit": restored.blocks,
                "kvfleet.bytes": restored.nbytes,
            }
            restore = span.child("restore", about, at=unix_ns(restored.began))
            restore.end(error=restored.failure or None, at=unix_ns(restored.ended))
        if came.admitted is None:
            return
        prefilled = ended if came.prefilled is None else unix_ns(came.prefilled)
        fed = {"kvfleet.prefill.chunks": came.chunks, "kvfleet.prefill.tokens": came.fed_tokens}
        span.child("prefill", fed, at=admitted).end(at=prefilled)
        if came.prefilled is None:
            return
        span.event("first_token", at=prefilled)
        drawn = {
            "gen_ai.usage.output_tokens": came.drawn_tokens,
            "kvfleet.decode.steps": came.steps,
            "kvfleet.preemptions": came.preemptions,
        }
        span.child("decode", drawn, at=prefilled).end(at=ended)
