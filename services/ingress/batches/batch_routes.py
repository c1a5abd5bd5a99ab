"""Routes of batches, as OpenAI's. Those of other tenants do not exist here."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import orjson

from kvfleet.ingress.answers.batch_answers import BatchList, batch_answer
from kvfleet.ingress.batches.batch_records import BatchRecords, StoredBatch
from kvfleet.ingress.http.exchange import Exchange, integer_query
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.requests.batches import BATCH, MOST_BATCHES, seconds_of
from kvproto.buckets import StaleRevision
from kvproto.errors import InvalidRequest, NotFound, SessionBusy
from kvproto.ids import new_request_id
from kvproto.messages import BatchHead, BatchStatus
from kvservice.fields import parse_body

LISTED = 20
TRIES = 10


@dataclass(eq=False, slots=True)
class BatchRoutes:
    """Owned by the event loop."""

    parts: IngressParts
    records: BatchRecords

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/batches. `completion_window`: 24h as OpenAI's, or any other time up to a week."""
        caller, config = await self.parts.metered(exchange), self.parts.config
        ask = BATCH.read(parse_body(await exchange.read_body(config.max_body_bytes, config.body_timeout_s)))
        try:
            file = await self.records.find_file(caller.tenant, ask.input_file_id.removeprefix("file-"))
        except NotFound as error:
            raise InvalidRequest(error.message, field="input_file_id") from None
        now, window_s = int(time.time()), seconds_of(ask.completion_window)
        head = BatchHead(
            new_request_id(), caller.name, file.file, ask.endpoint, ask.completion_window, now, now + window_s,
            metadata=ask.metadata,
        )  # fmt: skip
        await self.records.begin(caller.tenant, head)
        await exchange.respond(200, orjson.dumps(batch_answer(head)))

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/batches?after&limit, newest first."""
        caller = await self.parts.metered(exchange)
        answers = [batch_answer(one.head) for one in await self.records.batches(caller.tenant)]
        if (after := exchange.query_value("after")) is not None:
            at = next((at for at, one in enumerate(answers) if one.id == after), None)
            if at is None:
                raise InvalidRequest(f"there is no batch {after[:80]!r}", field="after")
            answers = answers[at + 1 :]
        limit = integer_query(exchange, "limit", LISTED)
        if not 1 <= limit <= MOST_BATCHES:
            raise InvalidRequest(f"must be within [1, {MOST_BATCHES}], got {limit}", field="limit")
        page = answers[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        await exchange.respond(200, orjson.dumps(BatchList("list", page, first, last, len(answers) > limit)))

    async def retrieve(self, exchange: Exchange) -> None:
        stored = await self._find(await self.parts.metered(exchange), exchange)
        await exchange.respond(200, orjson.dumps(batch_answer(stored.head)))

    async def cancel(self, exchange: Exchange) -> None:
        """POST /v1/batches/{id}/cancel: what is done stays. One that has ended is answered as it is."""
        caller = await self.parts.metered(exchange)
        for _ in range(TRIES):
            stored = await self._find(caller, exchange)
            head = stored.head
            if not head.status.is_end and head.status is not BatchStatus.CANCELLING:
                head = replace(head, status=BatchStatus.CANCELLING, cancelling_unix=int(time.time()))
                try:
                    await self.records.change(stored, head)
                except StaleRevision:
                    continue  # its leader has counted just now
            await exchange.respond(200, orjson.dumps(batch_answer(head)))
            return
        raise SessionBusy("the batch is changing", retry_after_s=1.0)

    async def _find(self, caller: Caller, exchange: Exchange) -> StoredBatch:
        return await self.records.find(caller.tenant, exchange.path_params["batch_id"].removeprefix("batch_"))
