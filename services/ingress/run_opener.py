"""Opens the runs of a call: charged to its caller, counted, traced; and notes how one went when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvfleet.ingress.answers.openai_answers import cached_tokens
from kvfleet.ingress.limits.limiter import RunUsage
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.request_reader import Ask, Call, now
from kvfleet.ingress.runs.jobs import Prepare
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.telemetry.metrics import RequestTally
from kvfleet.ingress.telemetry.request_trace import RequestTrace
from kvproto.client import Generation
from kvproto.messages import Continuation
from kvproto.streams.stream import Stream
from kvproto.trace_context import Trail


@dataclass(eq=False, slots=True)
class RunOpener:
    """Owned by the event loop; holds no state."""

    parts: IngressParts

    def open(self, call: Call[Ask], prepare: Prepare, usage: RunUsage) -> Run:
        """A new one in the table of runs, without a reader."""
        caller, trace, name, runs = call.caller, call.trace, call.name, self.parts.runs
        start = partial(self._start, trace, usage)
        if trace is not None:
            prepare = trace.tokenising(prepare)
        run = Run(caller.tenant, name.request, call.digest, name.keyed, prepare, start, runs.memory, usage=usage)
        run.on_tokens = partial(_count_tokens, self.parts.metrics.tally, usage)
        run.traceparent = trace.span.traceparent if trace is not None else None
        runs.add(run)
        return run

    def _start(
        self, trace: RequestTrace | None, usage: RunUsage, generation: Generation, before: Sequence[Continuation]
    ) -> Stream:
        """Raises LimitExceeded, PayloadTooLarge for a prompt beyond the limits."""
        usage.model = generation.model
        self.parts.admission.charge(usage, len(generation.prompt_ids), now())
        trail = trace.trail(generation) if trace is not None else Trail(generation.traceparent)
        followed = self.parts.courses.follow(generation, trail)
        followed.stream = stream = self.parts.client.generate(generation, before, followed)
        return stream

    def observe(self, call: Call[Ask], run: Run) -> None:
        """Metrics of one run, when its first reader is done."""
        transcript, level = run.transcript, run.level
        ttft_s = itl_s = None
        if run.first_token_at is not None and run.last_token_at is not None:
            ttft_s = run.first_token_at - call.arrived_at
            longest = max(transcript.totals)
            if longest > 1:
                itl_s = (run.last_token_at - run.first_token_at) / (longest - 1)
        if level is not None:
            if ttft_s is not None:
                level.ttft.observe(ttft_s)
            failed = run.error is not None and run.error.http_status >= 500
            if run.finished or failed:
                tokens = sum(transcript.totals)
                level.judge(self.parts.metrics.levels.targets, ttft_s, itl_s, tokens, finished=run.finished)
        if transcript.finished is not None:
            tally = self.parts.metrics.tally
            tally.prompt_tokens_total += transcript.finished.prompt_tokens
            tally.cached_tokens_total += cached_tokens(transcript)
        if run.usage is not None:
            run.usage.cached_tokens += cached_tokens(transcript)


def _count_tokens(tally: RequestTally, usage: RunUsage, count: int) -> None:
    """The hot path: once for each read of the stream."""
    tally.generated_tokens_total += count
    usage.generated(count)
