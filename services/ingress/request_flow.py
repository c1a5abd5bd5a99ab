"""**Read this first.** The life of a generating request, from its bytes to its last event.

    authenticate ─▶ a place ─▶ read, validate ─▶ admit ─┬─▶ tokenise once ─▶ client.generate, write ─▶ commit ─▶ end
                                                        └─▶ a repeat: write what is there, go on where it stopped

`request_reader` does all up to `admit`; each route makes a job of its body; `serve` is the rest, for all routes. The
end is sent after session and limits are released, for a caller that sends its next request at once. Errors are raised
as `KvfleetError` and answered by `app`, as the last event if a stream has begun. `kvproto.Client` handles lost workers,
`runs` clients that leave and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from kvchat.message_format import MessageReading, format_of_message
from kvfleet.ingress.answers.anthropic_answers import ID_HEADERS, message_error
from kvfleet.ingress.answers.anthropic_events import AnthropicForm
from kvfleet.ingress.answers.native_events import NativeForm
from kvfleet.ingress.answers.openai_events import BatchPlace, OpenAiForm
from kvfleet.ingress.answers.prompt_answers import ShownPrompt
from kvfleet.ingress.answers.response_events import ResponseForm
from kvfleet.ingress.batch_flow import BatchFlow
from kvfleet.ingress.http.error_bodies import loggable
from kvfleet.ingress.http.exchange import Exchange
from kvfleet.ingress.http.sse import complete, gather, placement_headers, relay
from kvfleet.ingress.limits.admission import STREAMED, WHOLE, TokenCosts
from kvfleet.ingress.limits.callers import default_max_tokens
from kvfleet.ingress.parts import IngressParts
from kvfleet.ingress.prompts.models import ServedModel
from kvfleet.ingress.prompts.prompts import Prompts
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvfleet.ingress.request_reader import Ask, Call, RequestReader, now, repeat_state
from kvfleet.ingress.requests.anthropic import read_messages
from kvfleet.ingress.requests.asks import plan_sampling, prompt_must_fit, return_of
from kvfleet.ingress.requests.bodies import (
    DEFAULT_MAX_TOKENS,
    ChatAsk,
    CompletionAsk,
    GenerateAsk,
    Prompt,
    read_chat,
    read_completion,
    read_generate,
)
from kvfleet.ingress.requests.responses import ResponseAsk
from kvfleet.ingress.run_opener import RunOpener
from kvfleet.ingress.runs.event_ids import LAST_EVENT_ID, START, prompt_digest, wants_lines
from kvfleet.ingress.runs.jobs import Form, HeldTurn, Job, Prepare
from kvfleet.ingress.runs.repeats import RequestName
from kvfleet.ingress.runs.runs import Run
from kvfleet.ingress.sessions.pauses import PausingTurn
from kvfleet.ingress.sessions.session import Session
from kvfleet.ingress.sessions.session_index import auto_seq_id
from kvfleet.ingress.sessions.turns import ChatTurn, SessionTurn
from kvproto.chats import conversation_of
from kvproto.client import Generation
from kvproto.errors import InvalidRequest, KvfleetError, PromptChanged, SessionBusy, Unavailable
from kvproto.messages import Sampling

log = logging.getLogger(__name__)

INLINE_BYTES = 1024 * 1024  # of memory: such an answer's body is made in some milliseconds, longer ones on a thread

ChatFormOf = Callable[[Call[ChatAsk], ServedModel, Sampling, tuple[int, ...], MessageReading | None], Form]


@dataclass(eq=False, slots=True)
class RequestFlow:
    """Owned by the event loop; holds no state of a request between its awaits."""

    parts: IngressParts
    reader: RequestReader
    prompts: Prompts
    opener: RunOpener = field(init=False)
    batches: BatchFlow = field(init=False)

    def __post_init__(self) -> None:
        self.opener = RunOpener(self.parts)
        self.batches = BatchFlow(self.parts, self.opener)

    async def chat_completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions. Of several choices the first is remembered as the turn."""
        call = await self.reader.read(exchange, "chat_completions", read_chat)
        await self.serve(exchange, call, lambda: self.chat_job(call, _chat_form), streams=call.ask.stream)

    async def messages(self, exchange: Exchange) -> None:
        """POST /v1/messages, as Anthropic's."""
        exchange.error_form, exchange.id_headers = message_error, ID_HEADERS
        call = await self.reader.read(exchange, "messages", read_messages)
        await self.serve(exchange, call, lambda: self.chat_job(call, _messages_form), streams=call.ask.stream)

    async def completions(self, exchange: Exchange) -> None:
        call = await self.reader.read(exchange, "completions", read_completion)
        prompt, *others = call.ask.prompts
        if not others:
            await self.serve(exchange, call, lambda: self._completion_job(call, prompt), streams=call.ask.stream)
            return
        calls, answer = [call, *(self.reader.another(call) for _ in others)], call.name.request
        jobs = [
            partial(self._completion_job, one, said, BatchPlace(answer, at))
            for at, (one, said) in enumerate(zip(calls, call.ask.prompts, strict=True))
        ]
        await self.batches.serve(exchange, calls, jobs)

    async def generate(self, exchange: Exchange) -> None:
        """POST /generate: a turn of a session, which is new unless `seq_id` names a known one."""
        call = await self.reader.read(exchange, "generate", read_generate)
        await self.serve(exchange, call, lambda: self._generate_job(call), streams=True)

    async def chat_job(self, call: Call[ChatAsk], form_of: ChatFormOf) -> Job:
        ask, tenant = call.ask, call.caller.tenant
        self.parts.pauses.came(tenant, ask.messages)
        model = await self.parts.models.get(ask.model)
        session = None
        with contextlib.suppress(Unavailable):
            session = await self.parts.index.sessions.read(tenant, ask.seq_id) if ask.seq_id is not None else None
        history = session.ids if session and session.head and session.head.model == model.name else ()
        must_fit = prompt_must_fit(ask.sampling.overflow)
        special, grammar = model.tokenizer.special, ask.sampling.grammar
        written = format_of_message(ask.tools.plan, model.bundle, special, grammar)
        prompt = await self.prompts.chat(model, tenant, ask.messages, history, ask.template_values, must_fit=must_fit)
        self.parts.metrics.tally.spliced_tokens_total += prompt.spliced
        sampling = self._sampling(call, model, len(prompt.ids), "messages")
        if written is not None:
            sampling = written.bind(sampling, prompt.text)
        spoken = ((one.role, one.content) for one in ask.messages)
        conversation = session.key if session is not None else conversation_of(spoken)
        kept = None
        if session is not None and self.parts.index.sessions.fits(len(prompt.ids) + sampling.max_tokens):
            kept = SessionTurn(self.parts.index, tenant, session, model.name, call.name.request, prompt.ids, None)
        turn = ChatTurn(self.prompts, tenant, model, prompt, kept)
        reading = written.reading(prompt.text) if written is not None else None
        form = form_of(call, model, sampling, prompt.ids, reading)
        size = sys.getsizeof(prompt.text)
        return self.job(call, model, prompt.ids, sampling, form, turn, conversation, size, reading)

    async def _completion_job(self, call: Call[CompletionAsk], prompt: Prompt, batch: BatchPlace | None = None) -> Job:
        ask, text = call.ask, prompt if isinstance(prompt, str) else ""
        field = "prompt" if batch is None else f"prompt[{batch.before}]"
        model = await self.parts.models.get(ask.model)
        if isinstance(prompt, str):
            must_fit = prompt_must_fit(ask.sampling.overflow)
            ids = await self.prompts.plain(model, prompt, begins=True, must_fit=must_fit, field=field)
        else:
            ids = prompt
        sampling = self._sampling(call, model, len(ids), field, default=16)
        if not isinstance(prompt, str):  # after `_sampling`, which refuses prompts that cannot fit
            await self.prompts.check_ids(model, ids, field)
            text = await self.prompts.spelled(model, ids) if ask.echo else ""
        form = replace(_openai_form(call, model, sampling, ids), batch=batch)
        if ask.echo or ask.prompt_logprobs is not None or ask.return_token_ids:
            shown = _shown(ask, model, ids)
            form = replace(form, shown=replace(shown, text=text, logprobs=ask.logprobs) if ask.echo else shown)
        return self.job(call, model, ids, sampling, form, HeldTurn())

    async def _generate_job(self, call: Call[GenerateAsk]) -> Job:
        """Keeps the whole history, also ids that a `context_overflow` policy leaves out of a turn."""
        ask, tenant, request = call.ask, call.caller.tenant, call.name.request
        session = await self._session_of(call)
        model = await self.parts.models.get(self._model_of_turn(session, ask.model), field="model_name")
        must_fit = prompt_must_fit(ask.sampling.overflow)
        tail = await self.prompts.plain(model, ask.prompt, begins=not session.ids, must_fit=must_fit)
        ids = session.ids + tail
        sampling = self._sampling(call, model, len(ids), "prompt", default=DEFAULT_MAX_TOKENS)
        self.parts.index.sessions.check_length(len(ids) + sampling.max_tokens, "prompt")
        turn = SessionTurn(self.parts.index, tenant, session, model.name, request, ids, history=len(session.ids))
        form = NativeForm(request, session.seq_id, ask.prompt, spelling_of(model, sampling), prompt_digest(ids))
        return self.job(call, model, ids, sampling, form, turn, session.key)

    async def chat_answer(self, call: Call[ChatAsk]) -> Job:
        """As `chat_completions`."""
        return await self.chat_job(call, _chat_form)

    async def completion_answer(self, call: Call[CompletionAsk]) -> Job:
        """As `completions`, of one prompt. Raises InvalidRequest for several."""
        if len(call.ask.prompts) != 1:
            raise InvalidRequest("must be one prompt here", field="prompt")
        return await self._completion_job(call, call.ask.prompts[0])

    def _sampling(
        self, call: Call[Ask], model: ServedModel, prompt_tokens: int, field: str, default: int | None = None
    ) -> Sampling:
        if not prompt_tokens:
            raise InvalidRequest("must hold at least 1 token", field=field)
        ask, default = call.ask.sampling, default or self.parts.config.default_max_tokens
        default = default_max_tokens(call.caller, ask.max_tokens, ask.max_tokens_field, default)
        said = plan_sampling(ask, model.bundle, prompt_tokens=prompt_tokens, field=field, default_max_tokens=default)
        self.parts.runs.memory.check_longest(said, _costs(call.ask), ask.max_tokens_field, prompt_tokens)
        return said

    def job(
        self,
        call: Call[Ask],
        model: ServedModel,
        ids: tuple[int, ...],
        sampling: Sampling,
        form: Form,
        turn: HeldTurn,
        conversation: str | None = None,
        turn_bytes: int = 0,
        reading: MessageReading | None = None,
    ) -> Job:
        placement, config = call.ask.placement, self.parts.config
        generation = Generation(
            model=model.name,
            sampling=sampling,
            prompt_ids=ids,
            tenant=call.caller.tenant,
            session=conversation,
            priority=call.priority,
            deadline_s=config.request_deadline_s,
            patience_s=config.no_worker_timeout_s,
            max_wait_s=config.max_wait_s,
            policy=placement.policy,
            worker=placement.worker,
            request=call.name.request,
            traceparent=call.traceparent,
            exact=call.ask.exact,
        )
        level = self.parts.metrics.levels.of(model.name, call.route)
        said_s = return_of(call.ask.kvfleet)
        if said_s is not None or (reading is not None and reading.callable):
            turn = PausingTurn(turn, self.parts.pauses, generation.tenant, conversation or "", reading, said_s)
        return Job(generation, form, turn, turn_bytes, level, _costs(call.ask))

    async def _session_of(self, call: Call[GenerateAsk]) -> Session:
        """If this turn was committed last, the session as it was before."""
        tenant, name, seq_id = call.caller.tenant, call.name, call.ask.seq_id
        if seq_id is None and not name.named:
            return self.parts.index.sessions.fresh(tenant, auto_seq_id(name.request))
        session = await self.parts.index.sessions.read(tenant, seq_id or auto_seq_id(name.request))
        if session.is_last(name.request):
            return session.before_last()
        if name.at != START and session.has_moved_on(name.request):
            raise SessionBusy(f"session {session.seq_id[:80]!r} has had another turn since", field=LAST_EVENT_ID)
        return session

    def _model_of_turn(self, session: Session, said: str | None) -> str:
        if session.head is None or not session.head.turns:
            return said or self.parts.models.default_name()
        if said is not None and said != session.head.model:
            raise InvalidRequest(f"this session is of {session.head.model!r}", field="model_name")
        return session.head.model

    async def serve(self, exchange: Exchange, call: Call[Ask], prepare: Prepare, *, streams: bool) -> None:
        """Admit, run or attach to the repeated run, carry it to the caller, end. Raises the run's error."""
        name = call.name
        if name.at != START and not streams:
            raise InvalidRequest("only allowed when the answer is streamed", field=LAST_EVENT_ID)
        found = self.parts.runs.find(call.caller.tenant, name, call.digest)
        with self._admitted(exchange, call, found, prepare) as run:
            exchange.usage, exchange.repeats = run.usage, found is not None
            about = {"request": name.request, "tenant": call.caller.tenant, "callers_id": exchange.callers_id}
            log.debug("request %s: %s", name.request, call.route, extra=about)
            self.parts.metrics.tally.active_streams += 1
            try:
                last = await self._carry(exchange, call, run, streams=streams)
            except KvfleetError as error:
                log.info("request %s ended: %s", name.request, loggable(error), extra=about)
                if name.named and isinstance(error, InvalidRequest) and error.field == "request":
                    raise _begun_otherwise(name) from error
                raise
            finally:
                self.parts.metrics.tally.active_streams -= 1
                if call.trace is not None:
                    call.trace.has_carried([run], call.arrived_at, found=found is not None)
                if found is None:
                    self.opener.observe(call, run)
                await self.parts.runs.detach(run, exchange)
        exchange.outcome = run.transcript.choices[0].reason or ""
        if streams:
            await complete(exchange, run.transcript, last)
        else:
            assert isinstance(run.form, OpenAiForm | AnthropicForm | ResponseForm)
            body, transcript = run.form.body, run.transcript
            answer = body(transcript) if transcript.size < INLINE_BYTES else await asyncio.to_thread(body, transcript)
            await exchange.respond(200, answer, headers=placement_headers(transcript.started))

    async def follow(self, call: Call[Ask], prepare: Prepare, reader: object, on_run: Callable[[Run], None]) -> None:
        """Carry the request to its end for a reader that takes nothing, or until it leaves. Raises the run's error."""
        found = self.parts.runs.find(call.caller.tenant, call.name, call.digest)
        with self._admitted(reader, call, found, prepare) as run:
            on_run(run)
            try:
                while not run.over and reader in run.readers:
                    await (run.changed() if run.busy else run.step())
            finally:
                if found is None:
                    self.opener.observe(call, run)
                await self.parts.runs.detach(run, reader)
        if run.error is not None:
            raise run.error

    async def _carry(self, exchange: Exchange, call: Call[Ask], run: Run, *, streams: bool) -> list[bytes]:
        """All but the end; returns the last events."""
        if not streams:
            await gather(exchange, run)
            return []
        id_lines = call.name.named or wants_lines(exchange.header(b"accept"))
        return await relay(exchange, run, call.name.at, id_lines=id_lines, keepalive_s=self.parts.config.keepalive_s)

    @contextlib.contextmanager
    def _admitted(self, reader: object, call: Call[Ask], found: Run | None, prepare: Prepare) -> Iterator[Run]:
        """The run of a request, found or new, with one more reader. While it runs it counts once in its key's limits,
        whichever readers are left; a parked one that goes on is not charged again."""
        caller = call.caller
        repeat, returns = repeat_state(found)
        choices = call.ask.sampling.at_once
        self.parts.admission.admit(caller, now(), choices=choices, repeat=repeat, returns=returns)
        run = found
        if run is None:
            run = self.opener.open(call, prepare, self.parts.admission.limiter.usage_of(caller))
        elif call.trace is not None:
            call.trace.span.link(run.traceparent)
        run = self.parts.runs.attach(run, reader)
        if not repeat:
            run.payer = caller
        try:
            yield run
        finally:
            if run.payer is not None and (run.over or not run.readers):
                payer, run.payer = run.payer, None
                self.parts.admission.release(payer, choices=choices)
            else:
                self.parts.admission.release(caller, repeat=True)


def _costs(ask: GenerateAsk | ChatAsk | CompletionAsk | ResponseAsk) -> TokenCosts:
    return STREAMED if isinstance(ask, GenerateAsk) or ask.stream else WHOLE


def _openai_form(
    call: Call[ChatAsk] | Call[CompletionAsk], model: ServedModel, sampling: Sampling, ids: tuple[int, ...]
) -> OpenAiForm:
    return OpenAiForm(
        call.name.request,
        model.name,
        int(time.time()),
        model.fingerprint,
        isinstance(call.ask, ChatAsk),
        sampling.n,
        spelling_of(model, sampling),
        prompt_digest(ids),
        call.ask.include_usage,
    )


def _chat_form(
    call: Call[ChatAsk], model: ServedModel, sampling: Sampling, ids: tuple[int, ...], reading: MessageReading | None
) -> OpenAiForm:
    ask, shown = call.ask, None
    if ask.prompt_logprobs is not None or ask.return_token_ids:
        shown = _shown(ask, model, ids)
    return replace(_openai_form(call, model, sampling, ids), reader=reading, shown=shown)


def _shown(ask: ChatAsk | CompletionAsk, model: ServedModel, ids: tuple[int, ...]) -> ShownPrompt:
    return ShownPrompt(ids, model.tokenizer.spelling, ranked=ask.prompt_logprobs, tells_ids=ask.return_token_ids)


def _messages_form(
    call: Call[ChatAsk], model: ServedModel, sampling: Sampling, ids: tuple[int, ...], reading: MessageReading | None
) -> AnthropicForm:
    return AnthropicForm(call.name.request, model.name, reading or MessageReading(), prompt_digest(ids))


def spelling_of(model: ServedModel, sampling: Sampling) -> TokenSpelling | None:
    """For log probabilities."""
    return model.tokenizer.spelling if sampling.logprobs is not None else None


def _begun_otherwise(name: RequestName) -> PromptChanged:
    """A worker knows another request of this id, begun at another ingress from other prompt ids."""
    return PromptChanged(
        "the request runs already, or did a moment ago, from other prompt ids or another body: another ingress reads "
        f"the conversation differently. Send it there, or again without {name.header}",
        field=name.header,
    )
