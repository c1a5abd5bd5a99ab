"""**Read this first.** The life of a generating request, from its bytes to its last event.

    authenticate ─▶ read and validate ─▶ admit ─▶ tokenise once ─▶ client.generate, write ─▶ commit ─▶ end

Each public method is one route and reads as that line. The end is sent when all is let go, so that a caller who sends
its next request at once finds its session free and its own limit unused. Refusals are raised as `KvfleetError` and
answered by `app`, as the last event if a stream has begun. All promises about workers that vanish are kept by
`kvproto.Client`, this file only carries its events to the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvproto.client import Client, Generation, draw_seed
from kvproto.errors import InvalidRequest, KvfleetError, LimitExceeded, SessionBusy, Unavailable
from kvproto.messages import Sampling
from services.ingress.admission import Admission
from services.ingress.config import IngressConfig
from services.ingress.fields import parse_body
from services.ingress.http_exchange import Exchange
from services.ingress.metrics import IngressMetrics
from services.ingress.models import Models, ServedModel
from services.ingress.native_events import NativeEvents
from services.ingress.native_schema import DEFAULT_MAX_TOKENS, GenerateAsk, read_generate
from services.ingress.openai_events import AnswerHead, OpenAiEvents, answer_body, cached_tokens
from services.ingress.openai_schema import ChatAsk, CompletionAsk, check_vocabulary, read_chat, read_completion
from services.ingress.prompts import Prompts, conversation_of
from services.ingress.sampling_ask import SamplingAsk
from services.ingress.sampling_plan import plan_sampling, prompt_must_fit
from services.ingress.session_index import SessionIndex, new_seq_id
from services.ingress.sessions import OpenTurn, Session, Sessions
from services.ingress.sse import (
    ChoiceTranscript,
    EventWriter,
    Transcript,
    complete,
    gather,
    placement_headers,
    relay,
)
from services.ingress.tenancy import ApiKey, Tenancy, require_policy
from services.ingress.token_spelling import TokenSpelling

log = logging.getLogger(__name__)

Ask = ChatAsk | CompletionAsk | GenerateAsk


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was admitted and tokenised: all that is left is to run it."""

    route: str
    generation: Generation
    arrived_at: float
    form: EventWriter | AnswerHead  # events as they come, or one answer


class RequestFlow:
    """The three generating routes. Owned by the event loop; holds no state of a request between its awaits."""

    def __init__(
        self,
        client: Client,
        config: IngressConfig,
        *,
        tenancy: Tenancy,
        admission: Admission,
        models: Models,
        prompts: Prompts,
        sessions: Sessions,
        session_index: SessionIndex,
        metrics: IngressMetrics,
    ) -> None:
        self._client = client
        self._config = config
        self._tenancy = tenancy
        self._admission = admission
        self._models = models
        self._prompts = prompts
        self._sessions = sessions
        self._session_index = session_index
        self._metrics = metrics
        self._tally = metrics.tally

    # ------------------------------------------------------------------ routes

    async def chat_completions(self, exchange: Exchange) -> None:
        """POST /v1/chat/completions. Of several choices the first is the one that is remembered as the turn."""
        arrived_at, caller = _now(), self.authenticate(exchange)
        ask = read_chat(parse_body(await exchange.read_body(self._config.max_body_bytes)))
        require_policy(caller, ask.placement.policy)
        with self._admitted(caller):
            model = await self._models.get(ask.model)
            session = await self._offered_session(caller, ask.seq_id)
            history = session.ids if session and session.head and session.head.model == model.name else ()
            must_fit = prompt_must_fit(ask.sampling.overflow)
            prompt = await self._prompts.chat(model, caller.tenant, ask.messages, history, must_fit=must_fit)
            self._tally.spliced_tokens += prompt.spliced
            sampling = self._sampling(ask.sampling, model, len(prompt.ids), "messages")
            conversation = session.key if session is not None else conversation_of(ask.messages)
            generation = self._generation(exchange, caller, model, prompt.ids, sampling, conversation, ask)
            head = _answer_head(exchange, model, sampling, chat=True)
            form = OpenAiEvents(head, include_usage=ask.include_usage) if ask.stream else head
            job = Job("chat_completions", generation, arrived_at, form)
            async with contextlib.AsyncExitStack() as stack:
                longest = len(prompt.ids) + sampling.max_tokens
                turn = await self._try_turn(stack, session, caller, model, exchange.request_id, longest)
                done = await self._run(exchange, job)
                self._prompts.remember(model, caller.tenant, prompt, done.ids)
                if turn is not None:
                    with _kept_if_possible(turn.session):
                        await self._commit(turn, model, prompt.ids + done.ids, done)
        await self._end(exchange, job, done)

    async def completions(self, exchange: Exchange) -> None:
        """POST /v1/completions."""
        arrived_at, caller = _now(), self.authenticate(exchange)
        ask = read_completion(parse_body(await exchange.read_body(self._config.max_body_bytes)))
        require_policy(caller, ask.placement.policy)
        with self._admitted(caller):
            model = await self._models.get(ask.model)
            if ask.prompt is not None:
                must_fit = prompt_must_fit(ask.sampling.overflow)
                ids = await self._prompts.plain(model, ask.prompt, begins=True, must_fit=must_fit)
            else:
                check_vocabulary(ids := ask.prompt_ids, model.bundle.vocab_size)
            sampling = self._sampling(ask.sampling, model, len(ids), "prompt", default_max_tokens=16)
            generation = self._generation(exchange, caller, model, ids, sampling, None, ask)
            head = _answer_head(exchange, model, sampling, chat=False)
            form = OpenAiEvents(head, include_usage=ask.include_usage) if ask.stream else head
            job = Job("completions", generation, arrived_at, form)
            done = await self._run(exchange, job)
        await self._end(exchange, job, done)

    async def generate(self, exchange: Exchange) -> None:
        """POST /generate: a turn of a session, of a new one unless `seq_id` names a known one.

        The history is kept whole, also what a `context_overflow` policy leaves out of a turn.
        """
        arrived_at, caller = _now(), self.authenticate(exchange)
        ask = read_generate(parse_body(await exchange.read_body(self._config.max_body_bytes)))
        require_policy(caller, ask.placement.policy)
        with self._admitted(caller):
            session = await self._session_of(caller, ask.seq_id)
            model = await self._models.get(self._model_of_turn(session, ask.model), field="model_name")
            must_fit = prompt_must_fit(ask.sampling.overflow)
            tail = await self._prompts.plain(model, ask.prompt, begins=not session.ids, must_fit=must_fit)
            ids = session.ids + tail
            sampling = self._sampling(ask.sampling, model, len(ids), "prompt", default_max_tokens=DEFAULT_MAX_TOKENS)
            self._sessions.check_length(len(ids) + sampling.max_tokens, "prompt")
            if session.head is None:
                await self._session_index.admit(caller.tenant)
            generation = self._generation(exchange, caller, model, ids, sampling, session.key, ask)
            form = NativeEvents(exchange.request_id, session.seq_id, ask.prompt, _spelling(model, sampling))
            job = Job("generate", generation, arrived_at, form)
            async with self._sessions.turn(session, model.name, exchange.request_id) as turn:
                done = await self._run(exchange, job)
                await self._commit(turn, model, ids + done.ids, done)
        await self._end(exchange, job, done)

    def authenticate(self, exchange: Exchange) -> ApiKey:
        """The caller's key. Raises AuthenticationFailed."""
        return self._tenancy.authenticate(exchange.header(b"authorization"), exchange.header(b"x-api-key"))

    # ------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def _admitted(self, caller: ApiKey) -> Iterator[None]:
        self._admission.admit(caller, _now())
        try:
            yield
        finally:
            self._admission.release(caller)

    def _sampling(
        self,
        ask: SamplingAsk,
        model: ServedModel,
        prompt_tokens: int,
        field: str,
        default_max_tokens: int | None = None,
    ) -> Sampling:
        if not prompt_tokens:
            raise InvalidRequest("must hold at least 1 token", field=field)
        default = default_max_tokens or self._config.default_max_tokens
        return plan_sampling(
            ask,
            model.bundle,
            prompt_tokens=prompt_tokens,
            field=field,
            default_max_tokens=default,
            seed=draw_seed(),
        )

    def _generation(
        self,
        exchange: Exchange,
        caller: ApiKey,
        model: ServedModel,
        ids: tuple[int, ...],
        sampling: Sampling,
        conversation: str | None,
        ask: Ask,
    ) -> Generation:
        return Generation(
            model=model.name,
            sampling=sampling,
            prompt_ids=ids,
            tenant=caller.tenant,
            session=conversation,
            deadline_s=self._config.request_deadline_s,
            patience_s=self._config.patience_s,
            policy=ask.placement.policy,
            worker=ask.placement.worker,
            request=exchange.request_id,
            traceparent=_traceparent(exchange),
            exact=ask.exact,
        )

    async def _session_of(self, caller: ApiKey, seq_id: str | None) -> Session:
        if seq_id is None:
            return self._sessions.fresh(caller.tenant, new_seq_id())
        return await self._sessions.read(caller.tenant, seq_id)

    def _model_of_turn(self, session: Session, said: str | None) -> str:
        if session.head is None:
            return said or self._models.default_name(self._config.default_model)
        if said is not None and said != session.head.model:
            raise InvalidRequest(
                f"session {session.seq_id[:80]!r} belongs to the model {session.head.model!r}, not to {said!r}",
                field="model_name",
            )
        return session.head.model

    async def _try_turn(
        self,
        stack: contextlib.AsyncExitStack,
        session: Session | None,
        caller: ApiKey,
        model: ServedModel,
        request: str,
        longest: int,
    ) -> OpenTurn | None:
        """A chat's `seq_id` only offers ids: while another turn runs, or when it grows too long, it is not kept."""
        if session is None or not self._sessions.fits(longest):
            return None
        with _kept_if_possible(session):
            if session.head is None:
                await self._session_index.admit(caller.tenant)
            return await stack.enter_async_context(self._sessions.turn(session, model.name, request))
        return None

    async def _offered_session(self, caller: ApiKey, seq_id: str | None) -> Session | None:
        if seq_id is not None:
            with contextlib.suppress(Unavailable):
                return await self._sessions.read(caller.tenant, seq_id)
        return None

    async def _commit(self, turn: OpenTurn, model: ServedModel, ids: tuple[int, ...], transcript: Transcript) -> None:
        assert transcript.finished is not None
        await self._sessions.commit(turn, model.name, ids, transcript.finished.worker)
        self._tally.session_turns += 1

    # ------------------------------------------------------------------ running

    async def _run(self, exchange: Exchange, job: Job) -> Transcript:
        """Start the generation and carry it to the caller, all but its end. Raises the stream's KvfleetError."""
        transcript = Transcript(choices=[ChoiceTranscript() for _ in range(job.generation.sampling.n)])
        stream = self._client.generate(job.generation)
        self._tally.active_streams += 1
        try:
            if isinstance(job.form, AnswerHead):
                await gather(exchange, stream, transcript, on_tokens=self._count_tokens)
            else:
                keepalive_s = self._config.keepalive_s
                await relay(
                    exchange, stream, job.form, transcript, keepalive_s=keepalive_s, on_tokens=self._count_tokens
                )
        except KvfleetError as error:
            log.info("request %s ended: %s", exchange.request_id, error)
            raise
        finally:
            self._tally.active_streams -= 1
            self._observe(job, transcript)
        return transcript

    async def _end(self, exchange: Exchange, job: Job, done: Transcript) -> None:
        """The last events, or the whole answer."""
        if isinstance(job.form, AnswerHead):
            await exchange.respond(200, answer_body(job.form, done), headers=placement_headers(done.started))
        else:
            await complete(exchange, job.form, done)

    def _count_tokens(self, count: int) -> None:
        self._tally.generated_tokens += count

    def _observe(self, job: Job, transcript: Transcript) -> None:
        """Metrics of one request, when it has ended."""
        if transcript.first_token_at is not None and transcript.last_token_at is not None:
            self._metrics.ttft.labels(job.route).observe(transcript.first_token_at - job.arrived_at)
            longest = max(len(choice.ids) for choice in transcript.choices)  # none before the end
            if longest > 1:
                spread = transcript.last_token_at - transcript.first_token_at
                self._metrics.itl.labels(job.route).observe(spread / (longest - 1))
        if transcript.finished is not None:
            self._tally.prompt_tokens += transcript.finished.prompt_tokens
            self._tally.cached_tokens += cached_tokens(transcript)


@contextlib.contextmanager
def _kept_if_possible(session: Session) -> Iterator[None]:
    """Around the session of a chat: it is a service to the next turn, and never fails this one."""
    try:
        yield
    except (SessionBusy, LimitExceeded, Unavailable) as error:
        log.info("session %s: this chat is not kept: %s", session.key, error)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _answer_head(exchange: Exchange, model: ServedModel, sampling: Sampling, *, chat: bool) -> AnswerHead:
    return AnswerHead(
        exchange.request_id,
        model.name,
        int(time.time()),
        model.fingerprint,
        chat,
        sampling.n,
        _spelling(model, sampling),
    )


def _spelling(model: ServedModel, sampling: Sampling) -> TokenSpelling | None:
    """Needed where log probabilities are asked for."""
    return model.tokenizer.spelling if sampling.logprobs is not None else None


def _traceparent(exchange: Exchange) -> str | None:
    """W3C trace context of the caller, handed on as it is."""
    value = exchange.header(b"traceparent")
    return value if value is not None and len(value) <= 128 else None
