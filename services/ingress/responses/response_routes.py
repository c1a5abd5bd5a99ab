"""Routes of responses, as OpenAI's. Those of other tenants do not exist here, not even for admins: records carry the
caller's own tenant."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from kvfleet.ingress.answers.response_answers import InputItems, InputTokens, ResponseDeleted
from kvfleet.ingress.answers.response_events import ResponseForm
from kvfleet.ingress.http.exchange import Exchange, flag_query, integer_query
from kvfleet.ingress.http.sse import complete
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.requests.response_items import request_of
from kvfleet.ingress.requests.responses import read_input, read_response
from kvfleet.ingress.responses.background import Background
from kvfleet.ingress.responses.response_jobs import ROUTE, ResponseJobs, call_of
from kvfleet.ingress.responses.response_records import ResponseRecords, StoredResponse, not_found
from kvfleet.ingress.runs.event_ids import LAST_EVENT_ID, START, Position
from kvfleet.ingress.runs.jobs import EventReader
from kvfleet.ingress.sessions.session_blocks import SessionBlocks
from kvproto.buckets import StaleRevision
from kvproto.errors import Cancelled, InvalidRequest, KvfleetError, SessionBusy, from_code
from kvproto.messages import ResponseAsked, ResponseStatus
from kvservice.fields import parse_body

log = logging.getLogger(__name__)

MOST_LISTED = 100
LISTED = 20
TRIES = 3


@dataclass(eq=False, slots=True)
class ResponseRoutes:
    """Owned by the event loop."""

    jobs: ResponseJobs
    records: ResponseRecords
    background: Background
    blocks: SessionBlocks

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        flow = self.jobs.flow
        call = await flow.reader.read(exchange, ROUTE, read_response)
        make = partial(self.jobs.fresh, call)
        if not call.ask.fields.background:
            await flow.serve(exchange, call, make, streams=call.ask.stream)
            return
        if call.name.at != START and not call.ask.stream:
            raise InvalidRequest("only allowed when the answer is streamed", field=LAST_EVENT_ID)
        keeper = self.background.keep(call, make)
        await keeper.ready()
        if call.ask.stream:
            await flow.serve(exchange, call, make, streams=True)
            return
        assert keeper.run is not None
        form, transcript = keeper.run.form, keeper.run.transcript
        assert isinstance(form, ResponseForm)
        body = form.body(transcript) if keeper.run.finished else orjson.dumps(form.unfinished("queued"))
        await exchange.respond(200, body)

    async def retrieve(self, exchange: Exchange) -> None:
        """GET /v1/responses/{id}: as it is, or its events from a number on, until it ends."""
        caller, stored = await self._stored(exchange)
        streams = flag_query(exchange, "stream")
        after = exchange.query_value("starting_after")
        if after is not None and not streams:
            raise InvalidRequest("only allowed when stream is true", field="starting_after")
        asked = await self.records.asked(stored)
        at = Position(number=integer_query(exchange, "starting_after", 0) if after is not None else -1)
        if not streams:
            await exchange.respond(200, await self._body(stored, asked))
        elif stored.is_over:
            await self._replay(exchange, stored, asked, at)
        else:
            call = call_of(stored, asked, caller, at=at)
            exchange.request_id = stored.head.request
            await self.jobs.flow.serve(exchange, call, partial(self.jobs.restored, call, stored, asked), streams=True)

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/responses/{id}/cancel: of one in the background. One that has ended is answered as it is."""
        for _ in range(TRIES):
            _, stored = await self._stored(exchange)
            if not stored.head.background:
                raise InvalidRequest("only a response in the background can be cancelled", field="response_id")
            if not stored.is_over:
                try:
                    stored = await self.records.cancel(stored, int(time.time()))
                except StaleRevision:
                    continue
            await exchange.respond(200, await self._body(stored, await self.records.asked(stored)))
            return
        raise _changing()

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /v1/responses/{id}: its record, and blocks that no other request shares."""
        for _ in range(TRIES):
            caller, stored = await self._stored(exchange)
            ids = await self._ids_of(stored)
            if ids is not None:  # first: who asks again, as this ended in the middle, has to find the record
                await self.blocks.erase_ids(caller.tenant, *ids, stored.head.regions)
            try:
                await self.records.erase(stored)
            except StaleRevision:
                continue
            told = ResponseDeleted(f"resp_{stored.head.request}", "response", True)
            await exchange.respond(200, orjson.dumps(told))
            return
        raise _changing()

    async def input_items(self, exchange: Exchange) -> None:
        """GET /v1/responses/{id}/input_items?limit=N&order=O&after=ID: what was sent with it."""
        _, stored = await self._stored(exchange)
        asked = await self.records.asked(stored)
        limit, order = integer_query(exchange, "limit", LISTED), exchange.query_value("order") or "desc"
        if not 1 <= limit <= MOST_LISTED:
            raise InvalidRequest(f"must be within [1, {MOST_LISTED}], got {limit}", field="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("must be asc or desc", field="order")
        items = _listed(orjson.loads(asked.body)["input"], stored.head.request)
        items = items if order == "asc" else items[::-1]
        if (after := exchange.query_value("after")) is not None:
            at = next((at for at, one in enumerate(items) if one["id"] == after), None)
            if at is None:
                raise InvalidRequest(f"is no item of this response: {after[:80]!r}", field="after")
            items = items[at + 1 :]
        page = items[:limit]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        await exchange.respond(200, orjson.dumps(InputItems("list", page, first, last, len(items) > limit)))

    async def input_tokens(self, exchange: Exchange) -> None:
        """POST /v1/responses/input_tokens: how many a response would have for input."""
        flow = self.jobs.flow
        caller, config = await flow.parts.metered(exchange), flow.parts.config
        data = await exchange.read_body(config.max_body_bytes, config.body_timeout_s)
        ask = await asyncio.to_thread(lambda: read_input(parse_body(data)))
        model = await flow.parts.models.get(ask.model)
        prompt = await flow.prompts.chat(
            model, caller.tenant, ask.messages, (), ask.template_values, must_fit=False
        )  # fmt: skip
        await exchange.respond(200, orjson.dumps(InputTokens("response.input_tokens", len(prompt.ids))))

    async def _stored(self, exchange: Exchange) -> tuple[Caller, StoredResponse]:
        caller = await self.jobs.flow.parts.metered(exchange)
        said = exchange.path_params["response_id"]
        request = request_of(said)
        if request is None:
            raise not_found(said.removeprefix("resp_"))
        return caller, await self.records.find(caller.tenant, request)

    async def _body(self, stored: StoredResponse, asked: ResponseAsked) -> bytes:
        form = await self.jobs.form(stored, asked)
        transcript = await self.records.said(stored)
        if transcript.finished is not None:
            return form.body(transcript)
        error = _error_of(stored)
        return orjson.dumps(form.unfinished("in_progress") if error is None else form.failed(error))

    async def _replay(self, exchange: Exchange, stored: StoredResponse, asked: ResponseAsked, at: Position) -> None:
        form, out = await self.jobs.form(stored, asked), list[bytes]()
        transcript = await self.records.said(stored)
        writer = form.writer(at)
        if transcript.finished is not None:
            EventReader(writer).finish(transcript, out)
        else:
            error = _error_of(stored)
            assert error is not None
            out.append(writer.failed(error))
        await complete(exchange, transcript, out)

    async def _ids_of(self, stored: StoredResponse) -> tuple[str, tuple[int, ...]] | None:
        """Its model, and all of its tokens; None where they cannot be told any more."""
        with contextlib.suppress(KvfleetError):
            asked, transcript = await asyncio.gather(self.records.asked(stored), self.records.said(stored))
            model, ids = await self.jobs.prompt_of(stored, asked)
            return model, (asked.prompt_ids or ids) + transcript.ids
        log.info("response %s: its blocks are left to be evicted", stored.head.request)
        return None


def _changing() -> SessionBusy:
    return SessionBusy("the response is just ending", retry_after_s=1.0)


def _error_of(stored: StoredResponse) -> KvfleetError | None:
    head = stored.head
    if head.status is ResponseStatus.CANCELLED:
        return Cancelled("the response was cancelled")
    return from_code(head.code, head.message) if head.status is ResponseStatus.FAILED else None


def _listed(said: str | list[dict[str, Any]], request: str) -> list[dict[str, Any]]:
    """Items of a body, each with an id and a type."""
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    items = []
    for at, one in enumerate(said):
        item = {"id": f"item_{request}_{at}", "type": "message", **one}
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item)
    return items
