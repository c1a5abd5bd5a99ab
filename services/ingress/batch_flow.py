"""The life of a request of several prompts: a run for each, admitted together, answered as one.

    admit all ─▶ tokenise each ─▶ charge their sum ─▶ runs, side by side ─▶ one answer
                                                        └─ the first that fails ends all, and its error is told

Nobody can come back to it, so it takes no name: no Idempotency-Key, no Last-Event-ID.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfleet.ingress.answers.openai_batches import batch_body, batch_end
from kvfleet.ingress.answers.openai_events import OpenAiForm
from kvfleet.ingress.http.error_bodies import loggable
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.sse import beside, kept_alive
from kvfleet.ingress.limits.limiter import RunUsage
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.request_reader import Call, now
from kvfleet.ingress.requests.bodies import CompletionAsk
from kvfleet.ingress.run_opener import RunOpener
from kvfleet.ingress.runs.event_ids import START
from kvfleet.ingress.runs.jobs import EventReader, Prepare
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.errors import InvalidRequest, KvfleetError

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class BatchFlow:
    """Owned by the event loop; holds no state of a request between its awaits."""

    parts: IngressParts
    opener: RunOpener

    async def serve(self, exchange: Exchange, calls: Sequence[Call[CompletionAsk]], jobs: Sequence[Prepare]) -> None:
        """One of each for each prompt, all of one request. Raises the first error."""
        call = calls[0]
        if call.name.named:
            why = f"names the request of one prompt, and here are {len(calls)}: send each with a name of its own"
            raise InvalidRequest(why, field=call.name.header)
        usage = self.parts.admission.limiter.usage_of(call.caller)
        exchange.usage = usage
        with self._admitted(exchange, calls, jobs, usage) as runs:
            tally = self.parts.metrics.tally
            tally.active_streams += len(runs)
            try:
                await self._carry(exchange, call, runs, usage)
            except KvfleetError as error:
                about = {"request": call.name.request, "tenant": call.caller.tenant, "callers_id": exchange.callers_id}
                log.info("request %s ended: %s", call.name.request, loggable(error), extra=about)
                raise
            finally:
                tally.active_streams -= len(runs)
                if call.trace is not None:
                    call.trace.has_carried(runs, call.arrived_at, found=False)
                for one, run in zip(calls, runs, strict=True):
                    self.opener.observe(one, run)
            told = [(form, run.transcript) for run in runs if isinstance(form := run.form, OpenAiForm)]
        exchange.outcome = runs[0].transcript.choices[0].reason or ""
        await _end(exchange, told, streams=call.ask.stream)

    async def _carry(self, exchange: Exchange, call: Call[CompletionAsk], runs: list[Run], usage: RunUsage) -> None:
        """All but the end."""
        for run in runs:
            await run.step()  # which makes its job
            if run.error is not None:
                raise run.error
            await asyncio.sleep(0)  # a short prompt is tokenised at once: others have their turn
        prompts = sum(len(run.job.generation.prompt_ids) for run in runs if run.job is not None)
        self.parts.admission.charge(usage, prompts, now())
        if not call.ask.stream:
            await beside(exchange, runs, lambda: asyncio.sleep(0))
            return
        writers = [run.form.writer(START, id_lines=False) for run in runs if run.form is not None]
        readers = [EventReader(writer) for writer in writers]
        exchange.error_event = writers[0].failed
        over: set[int] = set()

        async def tell() -> None:
            out: list[bytes] = []
            for at, (run, reader) in enumerate(zip(runs, readers, strict=True)):
                if not run.finished:
                    reader.advance(run.transcript, out)
                elif at not in over:
                    over.add(at)
                    reader.finish(run.transcript, out)
            if out:
                if not exchange.started:
                    await exchange.start_events()
                await exchange.write(b"".join(out))

        async with kept_alive(exchange, writers[0].ids.comment, self.parts.config.keepalive_s):
            await beside(exchange, runs, tell)

    @contextlib.contextmanager
    def _admitted(
        self, exchange: Exchange, calls: Sequence[Call[CompletionAsk]], jobs: Sequence[Prepare], usage: RunUsage
    ) -> Iterator[list[Run]]:
        """Each prompt counts as a request, and each of its choices. Raises as `Admission.admit` does."""
        caller, admission = calls[0].caller, self.parts.admission
        choices, requests = calls[0].ask.sampling.at_once * len(calls), len(calls)
        admission.admit(caller, now(), choices=choices, requests=requests)
        runs: list[Run] = []
        try:
            for call, job in zip(calls, jobs, strict=True):
                runs.append(run := self.opener.open(call, job, usage))
                run.join(exchange)
            yield runs
        finally:
            for run in runs:
                self.parts.runs.drop(run)
            admission.release(caller, choices=choices, requests=requests)


async def _end(exchange: Exchange, told: Sequence[tuple[OpenAiForm, Transcript]], *, streams: bool) -> None:
    if not streams:
        await exchange.respond(200, await asyncio.to_thread(batch_body, told))
    else:
        if not exchange.started:
            await exchange.start_events()
        await exchange.end(batch_end(told))
