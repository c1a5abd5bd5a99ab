"""The engine: continuous batching over a paged KV pool, with tiers below it. Read `step` first, then `maintain`.

Where a runner's device computes by itself, a step's tokens become text during the next step:

    step n      plan ─ launch ─ text of n - 1 ─ wait ─ tokens        a stop string in it: what n draws for the sequence
    step n + 1  plan ─ launch ─ text of n     ─ wait ─ tokens        is dropped, and so is its KV

Carries out what the scheduler decides. It knows no torch (a runner computes), no NATS and no threads: only
`engine_thread` calls it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

from kvfleet.worker.blocks.block_pool import BlockPool
from kvfleet.worker.blocks.pool_integrity import PoolAudit
from kvfleet.worker.engine.beam_answers import answer_all
from kvfleet.worker.engine.engine_load import load_of
from kvfleet.worker.engine.kv_holdings import KvHoldings
from kvfleet.worker.engine.live_sequences import LiveSequences, TracedDraws
from kvfleet.worker.model.base import ModelRunner, StepAborted
from kvfleet.worker.port.capacity import full
from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.giving_way import giving_way
from kvfleet.worker.port.outputs import SequenceFailed, SequenceOutput, SequenceStarted, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Sequence, SequenceState
from kvfleet.worker.schedule.step_pacer import run_step
from kvfleet.worker.schedule.step_plan import StepPlan
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.text.text_stream import NOTHING
from kvfleet.worker.tiers.host import HostTier
from kvfleet.worker.tiers.tiers import Tiers, Verifier
from kvproto.codec import floored
from kvproto.errors import Cancelled, EngineFailure, KvfleetError, OutOfMemory
from kvproto.messages import (
    ChoiceFinished,
    FinishReason,
    Load,
    PromptScores,
    Rates,
    StopToken,
    Tier,
    TierEvents,
    TokenLogprobs,
    Tokens,
)
from kvsampling.draw import Candidates, Ran, ScoredPrompt
from kvsampling.grammar import Grammars

logger = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        scheduler: Scheduler,
        detokenizer: Detokenizer,
        clock: Callable[[], float] = time.monotonic,
        tiers: Tiers | None = None,
    ) -> None:
        if (pool.num_blocks, pool.block_size) != (runner.num_blocks, runner.block_size):
            raise ValueError("block pool and runner differ in the number or the size of their blocks")
        window = scheduler.tables.window
        if window is not None and (runner.window is None or window < runner.window):
            raise ValueError(f"the scheduler lets go of blocks after {window} tokens, the runner reads {runner.window}")
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        if tiers is None:  # no host memory for blocks, no vaults
            tiers = Tiers(pool, runner.memory, HostTier(memoryview(b""), runner.bytes_per_block, pool.block_size), None)
        self.tiers = tiers
        self._times = times = scheduler.pacer.times
        scheduler.claims = lambda sequence, match, spare: tiers.claims(sequence, match, spare, times.prompt_seconds)
        scheduler.on_preempt = tiers.offloader.save
        tiers.pauses.prompt_seconds = times.prompt_seconds
        self._verifier = Verifier(runner, tiers)
        self.counters = EngineCounters()
        self.grammars = Grammars(lambda: detokenizer.to_json(), runner.vocab_size, runner.eos_ids)
        self.sequences = LiveSequences(runner, scheduler, detokenizer, self.counters.costs, self.grammars)
        self.kv = KvHoldings(runner, tiers, self.sequences, scheduler.tables.slots)
        self._audit = PoolAudit(pool)
        self._clock = clock
        self.deliver: Callable[[StepResult], None] | None = None  # takes outputs before a step has ended
        runner.meanwhile = self._tell_now
        self._outputs: list[SequenceOutput] = []
        self._untold: list[tuple[Sequence, int, TokenLogprobs | None]] = []  # one of a sequence
        self._traced = TracedDraws()

    def add(self, spec: SequenceSpec) -> None:
        """The sequence ends in exactly one terminal output. Raises what `LiveSequences.accept` does."""
        now = self._clock()
        sequence = self.sequences.accept(spec, now)
        if sequence.state is SequenceState.WAITING:
            self.scheduler.enqueue(sequence)
        if sequence.beams is None and (reason := sequence.end) is not None:  # the earlier attempt had all of it
            self._start(sequence, now)
            self._finish(sequence, reason)

    def cancel(self, request: str, attempt: int, received: Items[int] = ()) -> int:
        """End an attempt's sequences with Cancelled, in the next step's outputs, and free their blocks. KV past the
        tokens of a choice that its last reader has `received` is forgotten: no erase could name it. Returns how many
        sequences there were."""
        self.runner.abort.obeyed(request, attempt)
        found = self.sequences.find(request, attempt)
        for sequence in found:
            choice = sequence.spec.choice
            told = received[choice] if choice < len(received) else None
            self._fail(sequence, Cancelled("the request was cancelled"), told=told)
        return len(found)

    def make_room(self, request: str, attempt: int, count: int) -> frozenset[tuple[str, int]]:
        """Fail `count` fresh sequences of lower priority, or else this attempt if fresh. Returns the attempts."""
        found = self.sequences.find(request, attempt)
        if not found:
            return frozenset()
        shed = giving_way(self.scheduler.waiting, found[0].spec.priority, count)
        if not shed and not any(sequence.started for sequence in found):
            shed = found
        if shed:
            rate, least = self._times.prefill_tokens_per_s, min(s.spec.priority for s in shed)
            ahead = sum(tokens for s, tokens in self.scheduler.queued() if s.spec.priority >= least) if rate else 0
            error = full(ahead / rate if rate else 0.0)
            for sequence in shed:
                self._fail(sequence, error)
        return frozenset(sequence.key[:2] for sequence in shed)

    def give_up(self, request: str, attempt: int) -> None:
        """From any thread, before `cancel`: abort a step that runs only for this."""
        self.runner.abort.ask(request, attempt)

    def let_go(self, attempts: Items[tuple[str, int]], *, keep: bool) -> None:
        """Drop attempts without an output: they go on elsewhere. Peers can fetch their blocks; with `keep` they go to
        vaults as well."""
        for attempt in attempts:
            for sequence in self.sequences.find(*attempt):
                if keep and not sequence.has_ended:
                    self.tiers.paused(sequence)
                self._leave(sequence)

    def pause(self, request: str, attempt: int) -> None:
        """The attempt's blocks become evictable; `resume` finds again what survived."""
        self._tell_now()
        for sequence in self.sequences.find(request, attempt):
            if sequence.state in (SequenceState.WAITING, SequenceState.RESTORING, SequenceState.RUNNING):
                self.tiers.paused(sequence)
                self.scheduler.pause(sequence)

    def resume(self, request: str, attempt: int) -> None:
        for sequence in self.sequences.find(request, attempt):
            if sequence.state is SequenceState.PAUSED:
                self.scheduler.enqueue(sequence)

    def abandon(self, error: KvfleetError) -> StepResult:
        """The last outputs: every sequence fails with `error`. Works whatever state an exception left the scheduler and
        the pool in."""
        outputs, self._outputs, self._untold = self._outputs, [], []
        gone = self.sequences.clear()
        outputs.extend(SequenceFailed(request, attempt, error, choice) for request, attempt, choice in gone)
        return StepResult(outputs)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._outputs or self._untold)

    def maintain(self) -> StepResult | None:
        """The tiers' work between steps, also when there is no step to run. Returns what changed."""
        for sequence in self.tiers.maintain():
            self.scheduler.requeue(sequence)
        if self.tiers.protector is not None:
            self.tiers.protector.maintain(self._clock(), self.sequences, self._times.prefill_tokens_per_s)
        changes = self._take_changes()
        return StepResult([], changes) if changes else None

    def verify(self) -> bool:
        """If idle, compute one restored block again. Returns whether there was one."""
        if self.has_work or not self._verifier.has_work:
            return False
        self._verifier.check_one()
        return True

    def step(self) -> StepResult:
        now = self._clock()
        plan = self.scheduler.schedule(now)
        if plan.failed:
            self._tell_text()
        for sequence, error in plan.failed:
            self._fail(sequence, error)
        for sequence in plan.started:
            self._start(sequence, now)
        self._commit(plan, self._run(plan))
        return self._result(plan, now)

    def _run(self, plan: StepPlan) -> list[Ran]:
        """What came of the plan's slices. A slice that does not fit into memory alone fails and leaves the plan; an
        aborted step empties it."""
        if plan.slices:
            self.runner.copy_blocks(plan.copies)
        self.runner.copy_states(plan.state_copies)
        self.tiers.copied()
        if not plan.slices:
            self._tell_text()
            return []
        abort = self.runner.abort
        abort.begin(plan.sequences)
        try:
            ran = run_step(self.runner.run, plan.slices, self.scheduler.pacer.budget)
        except StepAborted:
            self.counters.steps_aborted_total += 1
            self.scheduler.spoil(plan)
            plan.slices, plan.sequences, plan.decodes = [], [], 0
            return []
        finally:
            abort.end()
            self._tell_text()
        for at in reversed(range(len(ran))):
            if isinstance(error := ran[at], OutOfMemory) and not plan.sequences[at].has_ended:
                del ran[at]
                self._fail(plan.drop(at).whole, error)
        return ran

    def _commit(self, plan: StepPlan, ran: list[Ran]) -> None:
        self._traced.steps += bool(ran)
        self.scheduler.settled()
        advance, size = self.scheduler.tables.advance, self.pool.block_size
        windowed = self.scheduler.tables.window is not None
        for sequence, part, came in zip(plan.sequences, plan.slices, ran, strict=True):
            if sequence.has_ended:  # by the text of the step before, or by another beam
                continue
            if isinstance(came, KvfleetError):
                self._fail(sequence.whole, came, keep_tail=False)
                continue
            token = came.drawn if isinstance(came, ScoredPrompt) else came
            count = len(part.ids)
            sequence.account.step_tokens += count
            end = part.start + count
            if windowed or sequence.snapshots or end - sequence.filled * size >= size:
                advance(sequence, end)
            else:
                sequence.computed = end
            if token is not None and count > 1:
                self.tiers.offloader.offer(sequence, self._times.prefill_tokens_per_s)
            if isinstance(came, ScoredPrompt):
                self._score(sequence, came.logprobs)
            if isinstance(token, Candidates):
                self._search(sequence.whole, token)
            elif isinstance(token, int):
                self._advance(sequence, token, None)
            elif token is not None:
                self._advance(sequence, token.token, token.logprobs)

    def _score(self, sequence: Sequence, logprobs: tuple[TokenLogprobs, ...]) -> None:
        request, attempt, _ = sequence.key
        self._outputs.append(PromptScores(request, attempt, sequence.scored, logprobs))
        sequence.scored += len(logprobs)
        if (reason := sequence.end) is not None:  # nothing is to be generated
            self._finish(sequence, reason)

    def _search(self, lead: Sequence, candidates: Candidates) -> None:
        if not self.scheduler.beams.take(lead, candidates):
            return
        try:
            answers = answer_all(lead)
            self.scheduler.beams.publish(lead)
            for choice, tokens, reason in answers:
                if not choice.started:
                    self._start(choice, self._clock())
                self._outputs += tokens
                self._finish(choice, reason)
        except KvfleetError as error:
            self._fail(lead, error)

    def _advance(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        stopped = token in sequence.stop_ids
        if stopped and logprobs is not None:
            sequence.stop_token = StopToken(token, floored(logprobs))
        if not stopped:
            sequence.append(token, self.pool.block_size)
            sequence.account.generated_tokens += 1
        if self.runner.overlaps and not (stopped or sequence.end or sequence.is_full):
            self._untold.append((sequence, token, logprobs))
        else:
            self._tell(sequence, token, logprobs, stopped=stopped)

    def _tell_text(self) -> None:
        untold, self._untold = self._untold, []
        for sequence, token, logprobs in untold:
            if self.sequences.has(sequence):
                self._tell(sequence, token, logprobs)

    def _tell_now(self) -> None:
        """Also while a step runs."""
        self._tell_text()
        if self.deliver is not None and self._outputs:
            outputs, self._outputs = self._outputs, []
            self.deliver(StepResult(outputs))

    def _tell(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, *, stopped: bool = False) -> None:
        """The token becomes text, or held text leaves, or the sequence ends."""
        try:
            released = NOTHING if stopped else sequence.text.push(token, logprobs)
            reason = FinishReason.STOP if stopped else sequence.end
            if reason is not None:
                released = released.then(sequence.text.finish())
                reason = FinishReason.STOP if sequence.text.stop else reason
        except Exception as error:  # a tokenizer's bug is that request's alone
            request = sequence.spec.request
            logger.exception("request %s: token %d could not be made text", request, token, extra={"request": request})
            self._fail(sequence, EngineFailure(f"token {token} could not be made text: {error}"))
            return
        if released.ids:
            index = sequence.text.next_index - len(released.ids)
            self._outputs.append(Tokens(*sequence.key, index, *released))
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.is_full:
            self.scheduler.slide(sequence)

    def _start(self, sequence: Sequence, now: float) -> None:
        saved_s = 0.0
        if self.sequences.is_first_start(sequence):
            restored, waited = sum(sequence.restored.values()), now - sequence.enqueued
            self.counters.started(sequence.account, len(sequence.ids), sequence.cached_tokens, restored, waited)
            saved_s = self.tiers.started(sequence)
        sequence.started = True
        if (trace := sequence.spec.trace) is not None:
            self._traced.started(sequence, trace, now)
        request, attempt, choice = sequence.key
        prompt, cached, waited = sequence.num_prompt, sequence.cached_tokens, now - sequence.enqueued
        again = len(sequence.ids) - cached if sequence.num_outputs else 0
        started = SequenceStarted(request, attempt, prompt, cached, waited, choice, sequence.restored, again, saved_s)
        self._outputs.append(started)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        ended = sequence.num_outputs, sequence.text.stop, sequence.stop_token
        self._outputs.append(ChoiceFinished(*sequence.key, reason, *ended))

    def _fail(
        self, sequence: Sequence, error: KvfleetError, *, keep_tail: bool = True, told: int | None = None
    ) -> None:
        """`told`: how many tokens its reader has, if fewer than have left. Choices of a beam search fail together."""
        if not self.sequences.has(sequence):
            return
        if sequence.beams is not None:
            for other in [one for one in sequence.siblings if one.state is SequenceState.FOLLOWING]:
                self._fail(other, error)
        self._leave(sequence, keep_tail=keep_tail)
        told = min(told, sequence.text.next_index) if told is not None else sequence.text.next_index
        known = max(len(sequence.spec.prompt_ids) + told - sequence.start, 0)
        if known < len(sequence.ids):
            self.tiers.erase(sequence.root, sequence.hashes, sequence.ids, known)
        request, attempt, choice = sequence.key
        self._outputs.append(SequenceFailed(request, attempt, error, choice))

    def _leave(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        if not sequence.has_ended:
            self.tiers.leaves(sequence, self._times.prefill_tokens_per_s)
            self.scheduler.finish(sequence, keep_tail=keep_tail)
        if (trace := sequence.spec.trace) is not None:
            self._traced.left(sequence, trace, self._clock())
        self.sequences.remove(sequence)

    def _result(self, plan: StepPlan, began: float) -> StepResult:
        outputs, self._outputs = self._outputs, []
        now = self._clock()
        (prefill, positions), seconds, count = plan.prefill, now - began, len(plan.slices)
        fed = plan.decodes + prefill
        self.counters.stepped(count, fed, seconds)
        paced = self.runner.take_device_seconds()
        self.scheduler.pacer.observe(plan.decodes, prefill, positions, seconds if paced is None else paced, now)
        if self._traced.undrawn:
            self._traced.note(now)
        return StepResult(outputs, self._take_changes(), fed, prefill, count, seconds)

    def _take_changes(self) -> list[TierEvents]:
        return self.pool.take_changes(Tier.DEVICE) + self.tiers.host.take_changes() + self.kv.state_changes()

    def load(self) -> Load:
        return load_of(self.scheduler, self.tiers, self.counters, self._clock())

    def rates(self) -> Rates:
        return self._times.rates(self.tiers.rates())

    def audit(self) -> None:
        """Check some blocks of device and host, others each time. Raises AssertionError."""
        self._audit.look([*(one.blocks for one in self.scheduler.holders()), *self.tiers.held()])
        self.tiers.audit()

    def check_integrity(self) -> None:
        self.scheduler.check_integrity(self.tiers.held())
        self.tiers.check_integrity()
        self.sequences.check_integrity()
