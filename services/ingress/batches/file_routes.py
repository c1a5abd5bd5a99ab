"""Routes of files, as OpenAI's. Those of other tenants do not exist here. A batch's own files are its results."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field, replace

import orjson

from kvfleet.ingress.answers.batch_answers import (
    ERRORS,
    OUTPUT,
    FileAnswer,
    FileDeleted,
    FileList,
    file_answer,
    output_answer,
    output_id,
    result_lines,
    unanswered_line,
)
from kvfleet.ingress.batches.batch_input import chunks_of, lines_of, read_form, read_line
from kvfleet.ingress.batches.batch_records import BatchRecords, StoredBatch, no_file
from kvfleet.ingress.http.exchange import Exchange, integer_query
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.requests.batches import MOST_FILES
from kvproto.errors import InvalidRequest, NotFound, SessionBusy
from kvproto.messages import BatchHead

UPLOADS = 2  # bodies of files in memory
SHORTEST_S, LONGEST_S = 3600, 30 * 86_400
OF_BATCH = re.compile(rf"([a-z2-7]{{20,30}})-({OUTPUT}|{ERRORS})")


@dataclass(eq=False, slots=True)
class FileRoutes:
    """Owned by the event loop."""

    parts: IngressParts
    records: BatchRecords
    _uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADS))

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/files: a multipart form with `file` and `purpose`."""
        caller, config = await self.parts.metered(exchange), self.parts.config
        async with self._uploads:
            data = await exchange.read_body(config.batches.max_file_bytes + 64 * 1024, config.body_timeout_s)
            form = await asyncio.to_thread(read_form, data, exchange.header(b"content-type"))
            file, purpose = form.get("file"), form.get("purpose")
            if file is None or file.file_name is None:
                raise InvalidRequest("missing: the file itself", field="file")
            if purpose is None or purpose.value != b"batch":
                raise InvalidRequest("must be batch", field="purpose")
            expires = 0
            if (after := form.get("expires_after[seconds]")) is not None:
                seconds = int(after.value) if after.value.isdigit() and len(after.value) < 10 else 0
                if not SHORTEST_S <= seconds <= LONGEST_S:
                    raise InvalidRequest(f"must be within [{SHORTEST_S}, {LONGEST_S}]", field="expires_after.seconds")
                expires = int(time.time()) + seconds
            chunks = await asyncio.to_thread(chunks_of, file.value)
            head = await self.records.store_file(caller.tenant, file.file_name[:255], chunks, expires)
        await exchange.respond(200, orjson.dumps(file_answer(head)))

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/files?purpose&order&after&limit: what was uploaded."""
        caller = await self.parts.metered(exchange)
        files = await self.records.files(caller.tenant)
        answers = [file_answer(one) for one in files if one.ready]
        purpose, order = exchange.query_value("purpose"), exchange.query_value("order") or "desc"
        if order not in ("asc", "desc"):
            raise InvalidRequest("must be asc or desc", field="order")
        if purpose not in (None, "batch"):
            answers = []
        answers = answers if order == "desc" else answers[::-1]
        limit, answers = integer_query(exchange, "limit", MOST_FILES), after_id(exchange, answers)
        if not 1 <= limit <= MOST_FILES:
            raise InvalidRequest(f"must be within [1, {MOST_FILES}], got {limit}", field="limit")
        page = answers[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        await exchange.respond(200, orjson.dumps(FileList("list", page, first, last, len(answers) > len(page))))

    async def retrieve(self, exchange: Exchange) -> None:
        tenant, file = await self._named(exchange)
        if (of_batch := OF_BATCH.fullmatch(file)) is None:
            answer = file_answer(await self.records.find_file(tenant, file))
        else:
            stored, which = await self._batch(tenant, of_batch[1], of_batch[2]), of_batch[2]
            answer = output_answer(stored.head, which, len(await self._output(stored, which)))
        await exchange.respond(200, orjson.dumps(answer))

    async def content(self, exchange: Exchange) -> None:
        tenant, file = await self._named(exchange)
        if (of_batch := OF_BATCH.fullmatch(file)) is None:
            head = await self.records.find_file(tenant, file)
            data = b"".join([chunk async for chunk in self.records.chunks(tenant, head)])
        else:
            data = await self._output(await self._batch(tenant, of_batch[1], of_batch[2]), of_batch[2])
        await exchange.respond(200, data, content_type=b"application/jsonl")

    async def delete(self, exchange: Exchange) -> None:
        """A batch that has not ended keeps its files."""
        tenant, file = await self._named(exchange)
        if (of_batch := OF_BATCH.fullmatch(file)) is not None:
            await self._drop_output(await self._batch(tenant, of_batch[1], of_batch[2]), of_batch[2])
        else:
            head = await self.records.find_file(tenant, file)
            users = [one.head for one in await self.records.batches(tenant) if one.head.input_file == file]
            if any(not one.status.is_end for one in users):
                raise SessionBusy("it is the input of a batch that has not ended", field="file_id")
            await self.records.drop_file(tenant, head)
        await exchange.respond(200, orjson.dumps(FileDeleted(f"file-{file}", "file", True)))

    async def _named(self, exchange: Exchange) -> tuple[str, str]:
        caller = await self.parts.metered(exchange)
        return caller.tenant, exchange.path_params["file_id"].removeprefix("file-")

    async def _batch(self, tenant: str, batch: str, which: str) -> StoredBatch:
        try:
            stored = await self.records.find(tenant, batch)
        except NotFound:
            raise no_file(f"{batch}-{which}") from None
        gone = stored.head.no_output if which == OUTPUT else stored.head.no_errors
        if gone or not stored.head.started_unix:
            raise no_file(f"{batch}-{which}")
        return stored

    async def _output(self, stored: StoredBatch, which: str) -> bytes:
        """What is there now. Lines without a result, of a batch that has ended, are errors."""
        head = stored.head
        results = await self.records.results(stored.tenant, head.batch)
        told = [(line, one) for line, one in results if one.is_good == (which == OUTPUT)]
        data = await asyncio.to_thread(result_lines, head.batch, told)
        if which == OUTPUT or not head.status.is_end or len(results) >= head.total:
            return data
        return data + await self._unanswered(stored.tenant, head, {line for line, _ in results})

    async def _unanswered(self, tenant: str, head: BatchHead, answered: set[int]) -> bytes:
        try:
            file = await self.records.find_file(tenant, head.input_file)
        except NotFound:
            return b""  # who they were went with the input
        out: list[bytes] = []
        line = 0
        async for chunk in self.records.chunks(tenant, file):
            for said in lines_of(chunk):
                if line not in answered:
                    out.append(unanswered_line(head, line, read_line(said, head.endpoint).custom_id))
                line += 1
        return b"".join(out)

    async def _drop_output(self, stored: StoredBatch, which: str) -> None:
        head = stored.head
        if not head.status.is_end:
            raise SessionBusy(f"batch {output_id(head, which)} has not ended", field="file_id")
        results = await self.records.results(stored.tenant, head.batch)
        dropped = [line for line, one in results if one.is_good == (which == OUTPUT)]
        kept = 0 if head.no_output or head.no_errors else head.result_bytes * (len(results) - len(dropped))
        left = kept // max(len(results), 1)
        no_output, no_errors = head.no_output or which == OUTPUT, head.no_errors or which == ERRORS
        await self.records.change(stored, replace(head, result_bytes=left, no_output=no_output, no_errors=no_errors))
        await self.records.drop_results(stored.tenant, head.batch, dropped)


def after_id(exchange: Exchange, answers: list[FileAnswer]) -> list[FileAnswer]:
    """Those after the query's `after`. Raises InvalidRequest for one that is not there."""
    after = exchange.query_value("after")
    if after is None:
        return answers
    at = next((at for at, one in enumerate(answers) if one.id == after), None)
    if at is None:
        raise InvalidRequest(f"there is none of that name: {after[:80]!r}", field="after")
    return answers[at + 1 :]
