"""Loop: carries a run to one client, as server-sent events or as one answer.

    run.step ──▶ transcript ──▶ writer ──▶ send      the caller sends the last events, when all is released
      │  nothing for a while: a comment keeps the connection; the client leaves: its run loses a reader

All tokens of one read of the stream become one send, for tokens that come faster than it can send; no object is made
per token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from kvfleet.ingress.http.error_bodies import Headers
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.runs.event_ids import Position
from kvfleet.ingress.runs.jobs import EventReader
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.errors import Cancelled
from kvproto.ids import is_token
from kvproto.messages import Started


async def relay(exchange: Exchange, run: Run, at: Position, *, id_lines: bool, keepalive_s: float) -> list[bytes]:
    """Write a run as events from the client's position on, and return the last ones. Raises the run's KvfleetError,
    InvalidRequest for a position that it cannot have, Cancelled when the client leaves."""
    async with _watched(exchange, run):
        while run.form is None and not exchange.gone:
            if run.error is not None:
                raise run.error
            await _get_on(run)
        if run.form is not None:
            writer = run.form.writer(at, id_lines=id_lines)
            exchange.error_event = writer.failed
            async with kept_alive(exchange, writer.ids.comment, keepalive_s):
                return await _relay(exchange, run, EventReader(writer))
    raise Cancelled("the client left")


async def _relay(exchange: Exchange, run: Run, reader: EventReader) -> list[bytes]:
    out: list[bytes] = []
    while not exchange.gone:
        if run.finished:
            reader.finish(run.transcript, out)
            return out
        seen = run.steps
        reader.advance(run.transcript, out)
        if out:
            if not exchange.started:
                await exchange.start_events(placement_headers(run.transcript.started))
            await exchange.write(b"".join(out))
            out = []
            if run.over or run.busy or run.steps != seen or exchange.gone:
                continue  # there is an end to write, others have read meanwhile, or the client has left
        elif run.error is not None:
            raise run.error
        elif run.busy:
            await run.changed()
            continue
        await run.step()  # the hot path: once for each read of the stream
    raise Cancelled("the client left")


async def complete(exchange: Exchange, transcript: Transcript, last: list[bytes]) -> None:
    if not exchange.started:
        if not last:
            await exchange.respond_empty()  # the client has it all: browsers do not come back after a 204
            return
        await exchange.start_events(placement_headers(transcript.started))
    await exchange.end(b"".join(last))


async def gather(exchange: Exchange, run: Run) -> None:
    """Run to the end for an answer that is sent whole. Raises as `relay` does."""
    async with _watched(exchange, run):
        while not exchange.gone:
            if run.finished:
                return
            if run.error is not None:
                raise run.error
            await _get_on(run)
    raise Cancelled("the client left")


async def beside(exchange: Exchange, runs: Sequence[Run], tell: Callable[[], Awaitable[None]]) -> None:
    """Run several to their ends, which no other client reads. `tell` is awaited whenever there is something new, and no
    run reads on meanwhile. The first error is raised, Cancelled when the client leaves: all of them end then."""
    news, may_go_on = asyncio.Event(), asyncio.Event()

    async def drive(run: Run) -> None:
        await may_go_on.wait()
        while exchange in run.readers and not run.over:
            try:
                await run.step()
            finally:
                news.set()
            await may_go_on.wait()

    driving = [asyncio.create_task(drive(run), name=f"run-{run.request}") for run in runs]
    async with _watched(exchange, *runs):
        try:
            while not exchange.gone:
                if (failed := next((run.error for run in runs if run.error is not None), None)) is not None:
                    raise failed
                all_over = all(run.finished for run in runs)  # more may come while this is told
                await tell()
                if all_over:
                    return
                may_go_on.set()
                await news.wait()
                news.clear()
                may_go_on.clear()
        finally:
            await asyncio.gather(*(run.leave(exchange) for run in runs))
            may_go_on.set()
            await asyncio.gather(*driving)  # raises an internal fault
    raise Cancelled("the client left")


async def _get_on(run: Run) -> None:
    await (run.changed() if run.busy else run.step())


def placement_headers(started: Started | None) -> Headers:
    """For debugging with curl."""
    if started is None or not is_token(started.worker):
        return []
    cached = (b"x-kvfleet-cached-tokens", b"%d" % started.cached_tokens)
    return [(b"x-kvfleet-worker", started.worker.encode()), cached]


@contextlib.asynccontextmanager
async def _watched(exchange: Exchange, *runs: Run) -> AsyncIterator[None]:
    """The exchange leaves its runs as soon as the client leaves."""

    leaving = False

    async def watch() -> None:
        nonlocal leaving
        await exchange.until_gone()
        if exchange.gone:
            leaving = True
            await asyncio.gather(*(run.leave(exchange) for run in runs))

    watcher = asyncio.create_task(watch(), name=f"disconnect-{runs[0].request}")
    try:
        yield
    finally:
        if not leaving:
            watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


@contextlib.asynccontextmanager
async def kept_alive(exchange: Exchange, comment: Callable[[bytes], bytes], period_s: float) -> AsyncIterator[None]:
    """Sends a comment whenever nothing was written for a period. A task beside the stream, so that it costs nothing per
    token."""

    async def send_comments() -> None:
        while True:
            seen = exchange.writes
            await asyncio.sleep(period_s)
            if exchange.writes == seen:
                waiting = exchange.started
                if not waiting:
                    await exchange.start_events()
                await exchange.write(comment(b"waiting" if waiting else b"queued"))

    sending = asyncio.create_task(send_comments(), name="sse-comment")
    try:
        yield
    finally:
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
