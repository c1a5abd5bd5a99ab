"""Jobs of responses: from a body, and what came before it; or from the record of one that runs elsewhere, or did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson

from kvchat.message_format import MessageReading
from kvfleet.ingress.answers.response_answers import ReasoningTold
from kvfleet.ingress.answers.response_events import ResponseForm
from kvfleet.ingress.limits.callers import Caller
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.request_flow import RequestFlow, spelling_of
from kvfleet.ingress.request_reader import Call, now
from kvfleet.ingress.requests.bodies import ChatAsk
from kvfleet.ingress.requests.response_items import ItemKind, read_items, request_of, request_of_item
from kvfleet.ingress.requests.responses import ResponseAsk, ResponseFields, read_response
from kvfleet.ingress.responses.response_records import NOTHING, ResponseRecords, StoredResponse, not_found
from kvfleet.ingress.runs.event_ids import START, Position, prompt_digest
from kvfleet.ingress.runs.jobs import HeldTurn, Job
from kvfleet.ingress.runs.repeats import RequestName, digest_of
from kvfleet.ingress.runs.transcript import Transcript
from kvproto.errors import InvalidRequest, KvfleetError, NotFound
from kvproto.messages import (
    ActiveResponse,
    FinishReason,
    ResponseAsked,
    ResponseHead,
    ResponseStatus,
    Sampling,
)

ROUTE = "responses"
MAX_EARLIER = 4096


@dataclass(eq=False, slots=True)
class ResponseTurn(HeldTurn):
    """Stores a response: one in the background before it starts, all when they have ended. `revision`: of its active
    record, 0 while it is another ingress's. `on_open` is called once it may start."""

    records: ResponseRecords
    inner: HeldTurn
    tenant: str
    head: ResponseHead
    asked: ResponseAsked
    active: ActiveResponse | None = None
    revision: int = 0
    on_open: Callable[[], None] = lambda: None

    async def open(self) -> None:
        await self.inner.open()
        if self.active is not None and not self.revision:
            self.revision = await self.records.begin(self.head, self.asked, self.active)
        self.on_open()

    async def commit(self, transcript: Transcript) -> None:
        await self.inner.commit(transcript)
        finished = transcript.finished
        cut = finished is not None and finished.reason is FinishReason.LENGTH
        status = ResponseStatus.INCOMPLETE if cut else ResponseStatus.COMPLETED
        await self._end(status, transcript, regions=transcript.regions)

    async def fail(self, error: KvfleetError) -> None:
        await self._end(ResponseStatus.FAILED, None, code=error.code, message=error.message)

    async def _end(self, status: ResponseStatus, transcript: Transcript | None, **why: Any) -> None:
        head = replace(self.head, status=status, ended_unix=int(time.time()), **why)
        await self.records.end(self.tenant, head, self.asked, transcript)

    async def abandon(self, transcript: Transcript) -> None:
        await self.inner.abandon(transcript)


@dataclass(frozen=True, slots=True)
class ResponseJobs:
    """`ingress` is this one's id."""

    flow: RequestFlow
    records: ResponseRecords
    ingress: str

    async def fresh(self, call: Call[ResponseAsk], on_open: Callable[[], None] = lambda: None) -> Job:
        """Raises InvalidRequest for a response before it that is not stored, or has no output."""
        fields, tenant, request = call.ask.fields, call.caller.tenant, call.name.request
        previous, earlier = await self._before(tenant, fields.previous_response_id)
        named = await self._named(tenant, fields.references)
        created, read_as = int(time.time()), MessageReading()

        def form_of(
            chat: Call[ChatAsk],
            model: ServedModel,
            sampling: Sampling,
            ids: tuple[int, ...],
            reading: MessageReading | None,
        ) -> ResponseForm:
            nonlocal read_as
            read_as, spelling = reading or read_as, spelling_of(model, sampling)
            told, background = told_of(fields, model.name, sampling), fields.background
            return ResponseForm(request, created, told, read_as, background, spelling, prompt_digest(ids), len(body))

        body = orjson.dumps(call.ask.body)
        job = await self.flow.chat_job(call.of(call.ask.chat(earlier, named)), form_of)
        if not fields.store:
            return job
        said = job.generation
        head = ResponseHead(
            request, said.model, ResponseStatus.IN_PROGRESS, created, NOTHING, None, fields.background, previous
        )
        asked = ResponseAsked(
            body,
            said.sampling,
            said.session or "",
            read_as.tools,
            read_as.thinks,
            read_as.own,
            read_as.prompt_end,
            said.prompt_ids,
        )
        active = None
        if fields.background:
            active = ActiveResponse(tenant, request, self.ingress, call.caller.name, call.priority)
        return replace(job, turn=ResponseTurn(self.records, job.turn, tenant, head, asked, active, 0, on_open))

    async def restored(
        self,
        call: Call[ResponseAsk],
        stored: StoredResponse,
        asked: ResponseAsked,
        on_open: Callable[[], None] = lambda: None,
    ) -> Job:
        """Of one that runs elsewhere, or did: it draws the same tokens from the same ids."""
        model = await self.flow.parts.models.get(stored.head.model)
        spelling = spelling_of(model, asked.sampling)
        form = replace(form_of_stored(stored, asked), spelling=spelling, prompt_digest=prompt_digest(asked.prompt_ids))
        of = asked.conversation or None
        job = self.flow.job(call, model, asked.prompt_ids, asked.sampling, form, HeldTurn(), of)
        turn = ResponseTurn(self.records, job.turn, stored.tenant, stored.head, asked, on_open=on_open)
        return replace(job, turn=turn)

    async def form(self, stored: StoredResponse, asked: ResponseAsked) -> ResponseForm:
        """Of one that has ended. Only log probabilities want its model: raises ModelNotFound without it."""
        form = form_of_stored(stored, asked)
        if asked.sampling.logprobs is None:
            return form
        model = await self.flow.parts.models.get(stored.head.model)
        return replace(form, spelling=spelling_of(model, asked.sampling))

    async def prompt_of(self, stored: StoredResponse, asked: ResponseAsked) -> tuple[str, tuple[int, ...]]:
        """The model, and the ids that it was asked with, as far as they can be found again. Raises KvfleetError."""
        ask = read_response(orjson.loads(asked.body))
        _, earlier = await self._before(stored.tenant, ask.fields.previous_response_id)
        chat = ask.chat(earlier, await self._named(stored.tenant, ask.fields.references))
        model = await self.flow.parts.models.get(stored.head.model)
        prompts = self.flow.prompts
        prompt = await prompts.chat(model, stored.tenant, chat.messages, (), chat.template_values, must_fit=False)
        return model.name, prompt.ids

    async def _before(self, tenant: str, previous: str | None) -> tuple[tuple[str, ...], list[ItemKind]]:
        """The requests of all responses before this one, oldest first, and their items."""
        if previous is None:
            return (), []
        field = "previous_response_id"
        try:
            last = await self.records.find(tenant, request_of(previous) or previous.removeprefix("resp_"), field)
            chain = (*last.head.previous, last.head.request)
            if len(chain) > MAX_EARLIER:
                raise InvalidRequest(f"at most {MAX_EARLIER} responses may be before this one", field=field)
            older = await asyncio.gather(*(self.records.find(tenant, one, field) for one in last.head.previous))
            items = await asyncio.gather(*(self.items_of(one, field) for one in (*older, last)))
        except NotFound as error:
            raise InvalidRequest(error.message, field=field) from None
        return chain, [item for its in items for item in its]

    async def items_of(self, stored: StoredResponse, field: str) -> list[ItemKind]:
        """What went in and what came out of one that has ended with an output. Raises InvalidRequest for others."""
        if stored.head.said is None:
            status = stored.head.status.value
            raise InvalidRequest(f"'resp_{stored.head.request}' has no output: it is {status}", field=field)
        asked, transcript = await asyncio.gather(self.records.asked(stored), self.records.said(stored))
        form = form_of_stored(stored, asked)
        output = orjson.loads(orjson.dumps(form.whole(transcript).output))
        ask = read_response(orjson.loads(asked.body))
        named = await self._named(stored.tenant, ask.fields.references)
        return [*(named.get(getattr(one, "id", ""), one) for one in ask.fields.items), *read_items(output)]

    async def _named(self, tenant: str, references: set[str]) -> dict[str, ItemKind]:
        """Items of stored outputs by their ids. Raises NotFound."""
        field = "input"
        requests = {request_of_item(one) for one in references}
        found = await asyncio.gather(*(self.records.find(tenant, request, field) for request in sorted(requests)))
        items = await asyncio.gather(*(self.items_of(stored, field) for stored in found))
        by_id = {item.id: item for its in items for item in its}
        for one in sorted(references - by_id.keys()):
            raise not_found(request_of_item(one), field)
        return {one: by_id[one] for one in references}


def call_of(
    stored: StoredResponse, asked: ResponseAsked, caller: Caller, priority: int = 0, at: Position = START
) -> Call[ResponseAsk]:
    """As its client sent it."""
    body = orjson.loads(asked.body)
    name = RequestName(stored.head.request, at)
    return Call(ROUTE, read_response(body), caller, priority, name, digest_of(ROUTE, body), None, None, now())


def form_of_stored(stored: StoredResponse, asked: ResponseAsked) -> ResponseForm:
    """Without log probabilities."""
    fields, head = read_response(orjson.loads(asked.body)).fields, stored.head
    plan = fields.tool_ask().plan
    callable_ = plan.callable if plan is not None else ()
    reading = MessageReading(asked.format, asked.thinks, asked.own, asked.prompt_end, callable_)
    told = told_of(fields, head.model, asked.sampling)
    return ResponseForm(head.request, head.created_unix, told, reading, head.background, size=len(asked.body))


def told_of(fields: ResponseFields, model: str, sampling: Sampling) -> dict[str, Any]:
    """What an answer repeats of its request."""
    said = fields.reasoning
    text = fields.text.format if fields.text is not None else None
    told_text = {"type": "text"} if text is None else {key: one for key, one in _map(text).items() if one is not None}
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata,
        "model": model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": ReasoningTold(said.effort, said.summary) if said is not None else ReasoningTold(None, None),
        "store": fields.store,
        "temperature": sampling.temperature,
        "text": {"format": told_text},
        "tool_choice": _map(fields.tool_choice) if fields.tool_choice is not None else "auto",
        "tools": [_map(tool) for tool in fields.tools],
        "top_logprobs": sampling.logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": fields.truncation,
        "user": fields.user,
    }


def _map(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))
