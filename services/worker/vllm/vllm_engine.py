"""Loop: a vLLM server as a worker's engine. The worker's event loop owns it; what comes in one round goes on together.

submit ──▶ VllmSequence ──task──▶ TokenRoutes ──▶ tokens ──text, stop strings──▶ outputs ─┐
connector's news ──▶ started with the real hit, steps, preemptions ───────────────────────┼─▶ on_result
KV events ──▶ ForeignBlocks ──▶ changes ──────────────────────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvfleet.worker.port.capacity import Attempt, full
from kvfleet.worker.port.engine_port import EngineFacts, EnginePort
from kvfleet.worker.port.outputs import SequenceFailed
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.text.grammar_guard import GrammarGuard
from kvfleet.worker.vllm.chain_evictions import SETTLE_S, ChainEvictions
from kvfleet.worker.vllm.live_vllm_sequences import LiveVllmSequences
from kvfleet.worker.vllm.no_tiers import StoreTiers
from kvfleet.worker.vllm.result_queue import ResultQueue
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.token_routes import NextTokens
from kvfleet.worker.vllm.vllm_calls import VllmCalls
from kvfleet.worker.vllm.vllm_holdings import VllmHoldings
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvfleet_vllm.wire import EngineStep, Scheduled
from kvproto.block_hash import Root, chain
from kvproto.errors import Cancelled, DeadlineExceeded, EngineFailure, InvalidRequest, KvfleetError
from kvproto.messages import (
    ChoiceFinished,
    FinishReason,
    Grammar,
    Inspection,
    Load,
    PromptScores,
    Rates,
    Tier,
    TierEvents,
    Tokens,
)
from kvproto.tasks import end
from kvservice.distribution import Distribution

log = logging.getLogger(__name__)

NEWS_S = 2.0  # for the news that a sequence was scheduled, once its first token is here


@dataclass(eq=False)
class VllmEngine(EnginePort):
    """It is not ready until `came`. `prefix` begins the names that vLLM has its requests under."""

    live: LiveVllmSequences
    facts: EngineFacts
    server: VllmCalls
    results: ResultQueue
    on_state: Callable[[], None]
    tiers: StoreTiers
    step_rates: StepRates
    prefix: str
    cancel_to_free: Distribution = field(default_factory=Distribution)
    preemptions_total: int = 0
    is_ready: bool = False
    _is_unsure: bool = False  # the last that vLLM was asked for was withdrawn, and it has told nothing since
    _asked: dict[str, VllmSequence] = field(default_factory=dict)  # by the name that vLLM has
    _numbers: count[int] = field(default_factory=count)
    _aside: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.model, self.blocks, self.counters = self.live.model, self.live.blocks, self.live.counters
        self.kv = VllmHoldings(self.blocks, self.tiers)
        told = self.on_changes, self._later, self.erase
        self._evictions = ChainEvictions(self.blocks, self.server, self.step_rates, *told)
        self._guard = GrammarGuard(self.live.grammars)

    # What it is asked.

    @property
    def measured(self) -> tuple[Load, Rates]:  # type: ignore[override]
        load = self.live.load(self.preemptions_total, self.tiers.loads(), time.monotonic())
        return load, self.step_rates.rates

    @property
    def step_age_s(self) -> float:
        return self.step_rates.age(time.monotonic()) if self._asked else 0.0

    @property
    def silence_s(self) -> float:
        """The same; it goes on where those who waited have left, until vLLM tells something."""
        return self.step_rates.age(time.monotonic()) if self._asked or self._is_unsure else 0.0

    @property
    def is_idle(self) -> bool:
        """Nothing is asked of vLLM."""
        return not self._asked

    async def learn(self, grammar: Grammar, tenant: str) -> None:
        await self._guard.check(grammar, tenant)
        await asyncio.to_thread(self.server.sockets.tell_tokenizer, self.live.grammars.to_json)

    def submit(self, spec: SequenceSpec) -> None:
        try:
            if not self.is_ready:
                raise EngineFailure("vLLM is away")
            sequence = self.live.accept(spec, time.monotonic())
        except KvfleetError as error:
            self.results.tell(SequenceFailed(spec.request, spec.attempt, error, spec.choice))
            return
        if (reason := sequence.end) is not None:  # the earlier attempt had all of it
            self._start(sequence, Scheduled("", 0, 0))
            self._finish(sequence, reason)
        else:
            self._go_on(sequence)

    def cancel(self, request: str, attempt: int, received: Sequence[int] = ()) -> None:
        for sequence in self.live.find(request, attempt):
            choice = sequence.spec.choice
            told = received[choice] if choice < len(received) else None
            self._fail(sequence, Cancelled("the request was cancelled"), told=told)

    def pause(self, request: str, attempt: int) -> None:
        for sequence in self.live.find(request, attempt):
            if not sequence.is_paused:
                self._withdraw(sequence)
                sequence.is_paused = True

    def resume(self, request: str, attempt: int) -> None:
        for sequence in self.live.find(request, attempt):
            if sequence.is_paused:
                sequence.is_paused = False
                self._go_on(sequence)

    def make_room(self, request: str, attempt: int, count: int) -> asyncio.Future[frozenset[Attempt]]:
        shed = self.live.giving_way(request, attempt, count)
        ahead, rate = self.live.queued_before(shed), self.step_rates.rates.prefill_tokens_per_s
        for sequence in shed:
            self._fail(sequence, full(ahead / rate if rate else 0.0))
        return self.results.answer(frozenset(sequence.key[:2] for sequence in shed))

    async def let_go(self, attempts: Sequence[Attempt], *, keep: bool) -> None:
        leaving = [sequence for attempt in set(attempts) for sequence in self.live.find(*attempt)]
        aborts = [self._leave(sequence) for sequence in leaving]
        self.results.flush()
        await asyncio.gather(*(abort for abort in aborts if abort is not None))
        await asyncio.gather(*(self._keep(sequence) for sequence in leaving))  # found in vaults by those who go on
        if keep or not self.tiers.lends:
            await self.tiers.settled()

    def holdings(self) -> asyncio.Future[tuple[Mapping[Tier, Sequence[bytes]], int]]:
        return self.results.answer(self.kv.holdings())

    async def inspect(self, root: Root, ids: Sequence[int]) -> Inspection:
        await self._evictions.settled()
        return await self.results.answer(self.kv.inspect(root, ids))

    async def erase(self, root: Root, ids: Sequence[int], keep: int) -> int:
        names, gone = self.kv.erasable(root, ids, keep)
        await self._evictions.evict(names)
        return gone

    async def read_kv(self, root: Root, ids: Sequence[int], layer: int) -> tuple[Any, Any]:
        raise InvalidRequest("a vLLM worker does not show its keys and values", field="command")

    def discard(self, block: bytes) -> None:
        """Its content is wrong, and so is what continues it: who computes on it begins anew."""
        for sequence in self.live:
            if block in chain(sequence.root, sequence.ids, self.blocks.block_size):
                self._fail(sequence, EngineFailure("a block that was restored for it is wrong"))
        self._evictions.discard(block)

    # What its server tells.

    def came(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self.tiers.back()
            self.on_state()

    def went(self, reason: str) -> None:
        """The server is gone or hangs: all sequences go on elsewhere."""
        was_up, self.is_ready = self.is_ready, False
        for sequence in self.live:
            self._fail(sequence, EngineFailure(reason))
        self.tiers.away()
        if was_up:
            self.on_state()

    def on_scheduled(self, told: Scheduled) -> None:
        sequence = self._asked.get(told.request)
        if sequence is None:
            return
        sequence.is_running = True
        sequence.restored = self.tiers.restored(told.request, told.restored)
        sequence.cached_tokens = told.cached + told.restored
        sequence.account.step_tokens += max(sequence.length - sequence.cached_tokens, 0)
        if not sequence.started:
            self._start(sequence, told)
        sequence.scheduled.set()

    def on_step(self, told: EngineStep) -> None:
        self.on_answer()
        self.step_rates.observe(told, time.monotonic())
        self.counters.stepped(told.sequences, told.tokens, told.seconds)
        self.preemptions_total += len(told.preempted)
        for name in told.preempted:
            if (sequence := self._asked.get(name)) is not None:
                sequence.is_running = False

    def on_answer(self) -> None:
        """vLLM lives, or was idle so far."""
        self.step_rates.alive(time.monotonic())
        self._is_unsure = False

    def on_changes(self, changes: Sequence[TierEvents]) -> None:
        self.results.changed(changes)

    async def stop(self) -> None:
        self.results.is_over = True
        self._guard.stop()
        self.went("the worker ends")
        self.results.flush()
        await end([*self._aside])

    # Sequences.

    def _go_on(self, sequence: VllmSequence) -> None:
        sequence.task = asyncio.create_task(self._run(sequence), name="vllm-sequence")

    async def _run(self, sequence: VllmSequence) -> None:
        left = None if sequence.spec.deadline is None else sequence.spec.deadline - time.monotonic()
        try:
            if left is not None and left <= 0:
                raise TimeoutError
            async with asyncio.timeout(left):
                leader = sequence.siblings[0]
                if leader is not sequence and not sequence.outputs and not leader.outputs:
                    await leader.begun.wait()
                if not sequence.is_scored and await self._score(sequence):
                    return
                while not await self._ask(sequence):
                    pass  # its context was full, and slid
        except TimeoutError:
            took = time.monotonic() - sequence.enqueued
            self._fail(sequence, DeadlineExceeded(f"deadline passed {took:.3f} s after arrival"))
        except KvfleetError as error:
            self._fail(sequence, error)
        except Exception as error:  # a task's top: a bug is that request's alone
            about = {"request": sequence.spec.request}
            log.exception("request %s could not be served", sequence.spec.request, extra=about)
            self._fail(sequence, EngineFailure(f"the request could not be served: {type(error).__name__}: {error}"))

    async def _ask(self, sequence: VllmSequence) -> bool:
        """Generate as far as one request of vLLM's goes. Returns whether it has ended. Raises KvfleetError."""
        self._name(sequence)
        finish = None
        asked = sequence.spec.sampling.logprobs or 0
        body = sequence.body(self.model.name, self.server.sockets, await self.tiers.prepare(sequence))
        async with contextlib.aclosing(self.server.generate(body, asked)) as answer:
            async for part in answer:
                self.on_answer()
                await self._until_scheduled(sequence)
                if self._take(sequence, part):
                    return True
                finish = part.finish or finish
        self._withdrawn(sequence)
        if finish != "length" or sequence.window.limit is None:
            raise EngineFailure(f"vLLM ended it early: {finish}")
        return False

    async def _score(self, sequence: VllmSequence) -> bool:
        """Returns whether it has ended, as nothing is to be generated. Raises KvfleetError."""
        self._name(sequence)
        scores = await self.server.score(sequence.scoring_body(self.model.name, self.server.sockets))
        await self._until_scheduled(sequence)
        self._withdrawn(sequence)
        request, attempt, _ = sequence.key
        self.results.tell(PromptScores(request, attempt, sequence.scored, scores[sequence.scored - 1 :]))
        sequence.scored = sequence.num_prompt
        if (reason := sequence.end) is not None:
            self._finish(sequence, reason, by_vllm=True)
        return reason is not None

    def _name(self, sequence: VllmSequence) -> None:
        sequence.name = name = f"{self.prefix}{next(self._numbers)}"
        sequence.scheduled.clear()
        if not self._asked:
            self.on_answer()
        self._asked[name] = sequence

    async def _until_scheduled(self, sequence: VllmSequence) -> None:
        """The news comes over another socket than the tokens, at about the same time."""
        if sequence.scheduled.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):  # until Python 3.12 `wait_for` may swallow that it was cancelled
                await sequence.scheduled.wait()
        if not sequence.scheduled.is_set():
            log.warning("vLLM's connector did not tell that request %s was scheduled", sequence.spec.request)
            self.on_scheduled(Scheduled(sequence.name, 0, 0))

    def _take(self, sequence: VllmSequence, part: NextTokens) -> bool:
        """Whether the sequence ends with it. Raises KvfleetError for a token that the sampler could not draw."""
        for at, token in enumerate(part.ids):
            if sequence.is_drawn and (failure := self.server.failure_of(sequence.name, len(sequence.outputs))):
                raise failure
            sequence.account.step_tokens += 1
            released, reason = sequence.take(token, part.logprobs[at] if part.logprobs else None)
            if not sequence.begun.is_set():
                sequence.begun.set()
                if (trace := sequence.spec.trace) is not None:
                    trace.prefilled = time.monotonic()
            if released.ids:
                index = sequence.text.next_index - len(released.ids)
                self.results.tell(Tokens(*sequence.key, index, *released))
            if reason is not None:
                self._finish(sequence, reason, by_vllm=part.finish is not None)
                return True
        return False

    def _start(self, sequence: VllmSequence, told: Scheduled) -> None:
        now = time.monotonic()
        sequence.started = True
        waited = now - sequence.enqueued
        if not any(sibling.started for sibling in sequence.siblings if sibling is not sequence):
            self.counters.started(sequence.account, sequence.length, sequence.cached_tokens, told.restored, waited)
        if (trace := sequence.spec.trace) is not None:
            trace.admitted = now
        self.results.tell(sequence.start_after(waited))

    def _finish(self, sequence: VllmSequence, reason: FinishReason, *, by_vllm: bool = False) -> None:
        self._leave(sequence, by_vllm=by_vllm)
        self._later(self._keep(sequence))
        ended = len(sequence.outputs), sequence.text.stop, sequence.stop_token
        self.results.tell(ChoiceFinished(*sequence.key, reason, *ended))

    def _fail(self, sequence: VllmSequence, error: KvfleetError, told: int | None = None) -> None:
        """`told`: how many tokens its reader has, if fewer than have left."""
        self._leave(sequence)
        told = sequence.text.next_index if told is None else min(told, sequence.text.next_index)
        known = max(len(sequence.spec.prompt_ids) + told - sequence.start, 0)
        if self.is_ready and known < sequence.length:
            self._evictions.forget(sequence.root, sequence.ids, known)
        request, attempt, choice = sequence.key
        self.results.tell(SequenceFailed(request, attempt, error, choice))

    async def _keep(self, sequence: VllmSequence) -> None:
        """Have vaults keep its chain. vLLM saves its last blocks a moment later."""
        await asyncio.sleep(SETTLE_S)
        self.tiers.keep(chain(sequence.root, sequence.ids, self.blocks.block_size))

    def _leave(self, sequence: VllmSequence, *, by_vllm: bool = False) -> asyncio.Task[None] | None:
        """It is no longer ours. `by_vllm`: nor vLLM's. Returns vLLM's abort, if there is one."""
        aborting = None if by_vllm else self._withdraw(sequence)
        if by_vllm:
            self._withdrawn(sequence)
        sequence.begun.set()
        self.live.remove(sequence)
        if (trace := sequence.spec.trace) is not None:
            trace.ended = time.monotonic()
            trace.drawn_tokens = len(sequence.outputs) - len(sequence.spec.output_ids)
        return aborting

    def _withdraw(self, sequence: VllmSequence) -> asyncio.Task[None] | None:
        """Have vLLM drop it, if it has it."""
        name, task = sequence.name, sequence.task
        was_asked = self._withdrawn(sequence)
        self._is_unsure = self._is_unsure or was_asked
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if not was_asked or not self.is_ready:
            return None
        return self._later(self._abort(name))

    def _withdrawn(self, sequence: VllmSequence) -> bool:
        sequence.is_running = False
        self.tiers.over(sequence.name)
        return self._asked.pop(sequence.name, None) is not None

    async def _abort(self, name: str) -> None:
        began = time.monotonic()
        await self.server.abort(name)
        self.cancel_to_free.observe(time.monotonic() - began)

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def quietly() -> None:
            with contextlib.suppress(EngineFailure):  # what vLLM is to drop is gone with it
                await work

        task = asyncio.create_task(quietly())
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task
