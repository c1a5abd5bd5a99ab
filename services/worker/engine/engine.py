"""The engine: continuous batching over a paged KV pool, with tiers below it. Read `step` first, then `tend`.

Owns all sequences of one model and carries out what the scheduler decides. It knows no torch (a runner computes), no
NATS, no threads: one thread calls it, `kvfleet.worker.engine.engine_thread`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import count
from typing import Any

from kvfleet.worker.blocks.block_pool import BlockPool, Match
from kvfleet.worker.blocks.pool_integrity import PoolAudit
from kvfleet.worker.engine.outputs import (
    SequenceFailed,
    SequenceFinished,
    SequenceOutput,
    SequenceStarted,
    SequenceTokens,
    StepResult,
)
from kvfleet.worker.model.abort import StepAborted
from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.schedule import request_limits
from kvfleet.worker.schedule.giving_way import Queued, by_priority, full, giving_way
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Key, Sequence, SequenceSpec, SequenceState
from kvfleet.worker.schedule.step_memory import run_step
from kvfleet.worker.schedule.step_plan import Drawn, StepPlan
from kvfleet.worker.schedule.step_rates import StepRates, StepTimes
from kvfleet.worker.schedule.tenant_costs import TenantCosts
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.text.stopping import StopStrings
from kvfleet.worker.text.text_stream import NOTHING, TextStream
from kvfleet.worker.tiers.tiers import Tiers
from kvfleet.worker.tiers.verifier import Verifier
from kvproto.block_hash import Root, chain
from kvproto.errors import Cancelled, EngineFailure, InvalidRequest, KvfleetError, OutOfMemory
from kvproto.messages import FinishReason, Load, Rates, Tier, TokenLogprobs
from kvservice.distribution import Distribution

logger = logging.getLogger(__name__)

QUEUE_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Engine:
    """Sequences in by `add`, their tokens out by `step`. Not thread-safe: one thread owns it."""

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
        self.tiers = tiers
        if tiers is not None:
            scheduler.claims = self._claims
            self._verifier = Verifier(runner, tiers)
            scheduler.on_preempt = tiers.preempted
        self._audit = PoolAudit(pool)
        self._detokenizer = detokenizer
        self._clock = clock
        self._eos_ids = frozenset(runner.eos_ids)
        self._arrivals = count()
        self._sequences: dict[Key, Sequence] = {}
        self._choices: dict[tuple[str, int], list[Sequence]] = {}  # of each attempt, those that live
        self._counted: set[tuple[str, int]] = set()  # attempts of which a choice has started
        self._outputs: list[SequenceOutput] = []
        self._rates = StepRates()
        self._step_times = StepTimes()
        self._drawing_steps = 0  # that drew a token
        self._undrawn: list[Sequence] = []  # traced ones that have started and drawn nothing yet
        self.steps_aborted_total = 0  # all of their sequences were cancelled meanwhile
        self.steps_total = 0
        self.busy_seconds_total = 0.0  # in steps
        self.device_hit_tokens_total = 0  # of prompts: found on the device, brought from nowhere
        self.queue_waits = Distribution(QUEUE_WAITS_S)  # of attempts, from their coming to their first step
        self.costs = TenantCosts()
        self._prompt_tokens = self._hit_tokens = self._fed_tokens = self._generated_tokens = 0

    # ------------------------------------------------------------------ requests

    def add(self, spec: SequenceSpec) -> None:
        """Accept a sequence: from here on it ends in exactly one terminal output.

        Raises InvalidRequest or ContextLengthExceeded, naming the field and its limit, or OutOfMemory.
        """
        if (spec.request, spec.attempt, spec.choice) in self._sequences:
            raise InvalidRequest("this attempt is running already", field="request")
        request_limits.check(spec, self.runner.vocab_size)
        sampling = spec.sampling
        window = ContextWindow.of(
            len(spec.prompt_ids), sampling.max_tokens, self.runner.context_length, sampling.overflow
        )
        total = len(spec.prompt_ids) + len(spec.output_ids)
        needed = self.scheduler.tables.at_once(total - window.start(total))
        if needed > self.pool.num_blocks:
            raise OutOfMemory(f"{needed} blocks are needed, this worker has {self.pool.num_blocks}")
        siblings = self._choices.get((spec.request, spec.attempt), [])
        if siblings and siblings[0].spec.prompt_ids != spec.prompt_ids:
            raise InvalidRequest("all choices of an attempt must have the same prompt", field="prompt_ids")
        eos_ids: frozenset[int] = frozenset() if sampling.ignore_eos else self._eos_ids
        sequence = Sequence(
            spec,
            self.pool.block_size,
            arrival=next(self._arrivals),
            enqueued=self._clock(),
            window=window,
            stop_ids=eos_ids.union(sampling.stop_ids),
            text=self._text(spec),
            siblings=siblings,
            account=self.costs.of(spec.tenant),
        )
        siblings.append(sequence)
        self._choices[spec.request, spec.attempt] = siblings
        if spec.trace is not None:
            spec.trace.enqueued = sequence.enqueued
        self._sequences[sequence.key] = sequence
        self.scheduler.enqueue(sequence)
        if (reason := sequence.end) is not None:  # the earlier attempt had all of it
            self._start(sequence, self._clock())
            self._finish(sequence, reason)

    def cancel(self, request: str, attempt: int | None = None, received: Items[int] = ()) -> int:
        """End a request's sequences with Cancelled, in the next step's outputs; unknown ones are ignored.

        They are in no step any more, and their blocks are free. What was computed of a choice past the tokens that its
        last reader has `received` is forgotten: nobody could name it to have it erased. Returns how many there were.
        """
        self.runner.abort.obeyed(request, attempt)
        found = self._find(request, attempt)
        for sequence in found:
            choice = sequence.spec.choice
            told = received[choice] if choice < len(received) else None
            self._fail(sequence, Cancelled("the request was cancelled"), told=told)
        return len(found)

    def make_room(self, request: str, attempt: int, count: int) -> frozenset[tuple[str, int]]:
        """So many sequences of lower priority that wait and have not begun give way to this attempt, or it does.
        Returns the attempts that go."""
        found = self._find(request, attempt)
        if not found:
            return frozenset()
        shed = giving_way(self.scheduler.waiting, found[0].spec.priority, count)
        if not shed and not any(sequence.started for sequence in found):
            shed = found
        if shed:
            rate, least = self._rates.prefill_tokens_per_s, min(s.spec.priority for s in shed)
            ahead = sum(tokens for s, tokens in self._queued() if s.spec.priority >= least) if rate else 0
            error = full(ahead / rate if rate else 0.0)
            for sequence in shed:
                self._fail(sequence, error)
        return frozenset(sequence.key[:2] for sequence in shed)

    def give_up(self, request: str, attempt: int | None = None) -> None:
        """From any thread, before `cancel`: a step that computes for nobody else need not be finished."""
        self.runner.abort.ask(request, attempt)

    def hand_over(self, request: str, attempt: int, *, keep: bool) -> None:
        """Let go of an attempt without a word: it goes on elsewhere. Its blocks stay here for peers to fetch; with
        `keep` they go to vaults as well, as nobody may come before this worker ends."""
        for sequence in self._find(request, attempt):
            if keep and self.tiers is not None and sequence.state is not SequenceState.FINISHED:
                self.tiers.paused(sequence)
            self._leave(sequence)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way to lower tiers."""
        return self.tiers is None or self.tiers.is_settled

    def pause(self, request: str, attempt: int | None = None) -> None:
        """Park a request: its blocks become evictable until `resume`, which finds again what survived."""
        for sequence in self._find(request, attempt):
            if sequence.state in (SequenceState.WAITING, SequenceState.RESTORING, SequenceState.RUNNING):
                if self.tiers is not None:
                    self.tiers.paused(sequence)
                self.scheduler.pause(sequence)

    def resume(self, request: str, attempt: int | None = None) -> None:
        """Let a paused request go on, at its old place among the waiting ones."""
        for sequence in self._find(request, attempt):
            if sequence.state is SequenceState.PAUSED:
                self.scheduler.enqueue(sequence)

    def abandon(self, error: KvfleetError) -> StepResult:
        """The last outputs of an engine that will not step again: every sequence fails with `error`.

        Looks at no scheduler and no pool, so it works whatever state an exception left them in.
        """
        outputs, self._outputs = self._outputs, []
        outputs.extend(SequenceFailed(request, attempt, error, choice) for request, attempt, choice in self._sequences)
        self._sequences, self._choices = {}, {}
        return StepResult(outputs)

    # ------------------------------------------------------------------ the step

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._outputs)

    def maintain(self) -> StepResult | None:
        """What tiers have to do between steps, also when there is no step to run. Returns what changed in them."""
        if self.tiers is None:
            return None
        for sequence in self.tiers.maintain():
            self.scheduler.requeue(sequence)
        if self.tiers.protector is not None:
            rate = self._rates.prefill_tokens_per_s
            self.tiers.protector.maintain(self._clock(), self._sequences.values(), rate)
        device, below = self.pool.take_changes(), self.tiers.take_changes()
        if not (below or device.stored or device.removed):
            return None
        return StepResult([], device.stored, device.removed, below=below)

    def preload(self, root: Root, hashes: Items[bytes], tier: Tier, peer: str, limit_s: float) -> int:
        """Bring a chain to the device before anybody asks for it. Returns how many blocks are on their way."""
        return 0 if self.tiers is None else self.tiers.restorer.preload(root, hashes, tier, peer, limit_s)

    @property
    def preloading(self) -> bool:
        return self.tiers is not None and self.tiers.restorer.preloading

    def verify(self) -> bool:
        """With nothing else to do: compute one restored block again. Whether there was one to be checked."""
        if self.tiers is None or self.has_work or not self._verifier.has_work:
            return False
        self._verifier.check_one()
        return True

    @property
    def due_in(self) -> float | None:
        """Seconds until `tend` is needed though nothing happened."""
        return self.tiers.due_in() if self.tiers is not None else None

    def step(self) -> StepResult:
        """One forward pass over everything that runs."""
        now = self._clock()
        plan = self.scheduler.schedule(now)
        self._announce(plan, now)
        drawn = self._run(plan)
        self._commit(plan, drawn)
        return self._result(plan, now)

    def _announce(self, plan: StepPlan, now: float) -> None:
        for sequence, error in plan.failed:
            self._fail(sequence, error)
        for sequence in plan.started:
            self._start(sequence, now)

    def _run(self, plan: StepPlan) -> list[Drawn]:
        """Draws of the plan's slices, in order. What does not fit into memory alone leaves the plan, its request
        failed; all of it leaves if nobody waits for it any more."""
        if plan.slices:
            self.runner.copy_blocks(plan.copies)
        if self.tiers is not None:
            self.tiers.copied()
        if not plan.slices:
            return []
        abort = self.runner.abort
        abort.begin(plan.sequences)
        try:
            drawn = run_step(self.runner.run, plan.slices, self.scheduler.pacer.budget)
        except StepAborted:
            self.steps_aborted_total += 1
            plan.abandon()
            return []
        finally:
            abort.end()
        for at in reversed(range(len(drawn))):
            if isinstance(error := drawn[at], OutOfMemory):
                del drawn[at]
                self._fail(plan.drop(at), error)
        return drawn

    def _commit(self, plan: StepPlan, drawn: list[Drawn]) -> None:
        self._drawing_steps += bool(drawn)
        advance = self.scheduler.tables.advance
        size = self.pool.block_size
        windowed = self.scheduler.tables.window is not None
        for sequence, part, token in zip(plan.sequences, plan.slices, drawn, strict=True):
            if isinstance(token, KvfleetError):
                self._fail(sequence, token, keep_tail=False)
                continue
            count = len(part.ids)
            sequence.account.step_tokens += count
            end = part.start + count
            if windowed or end - sequence.filled * size >= size:
                advance(sequence, end)
            else:
                sequence.computed = end
            if token is not None and self.tiers is not None and count > 1:
                self.tiers.prefilled(sequence, self._rates.prefill_tokens_per_s)
            if isinstance(token, int):
                self._advance(sequence, token, None)
            elif token is not None:
                self._advance(sequence, token.token, token.logprobs)

    def _advance(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """A token was drawn: emit what may leave, and see whether the sequence ends."""
        stopped = token in sequence.stop_ids
        if not stopped:
            sequence.append(token, self.pool.block_size)
            self._generated_tokens += 1
            sequence.account.generated_tokens += 1
        try:
            released = NOTHING if stopped else sequence.text.push(token, logprobs)
            reason = FinishReason.STOP if stopped else sequence.end
            if reason is not None:
                released = released.then(sequence.text.finish())
                reason = FinishReason.STOP if sequence.text.stopped else reason
        except Exception as error:  # a tokenizer's bug is that request's alone
            logger.exception(
                "request %s: token %d could not be made text",
                sequence.spec.request,
                token,
                extra={"request": sequence.spec.request},
            )
            self._fail(sequence, EngineFailure(f"token {token} could not be made text: {error}"))
            return
        if released.ids:
            spec, (ids, text, scores) = sequence.spec, released
            index = sequence.text.next_index - len(ids)
            self._outputs.append(SequenceTokens(spec.request, spec.attempt, index, ids, text, spec.choice, scores))
        if reason is not None:
            self._finish(sequence, reason)
        elif sequence.is_full:
            self.scheduler.slide(sequence)

    def _claims(self, sequence: Sequence, match: Match, spare: int) -> bool:
        assert self.tiers is not None
        return self.tiers.claims(sequence, match, spare, self.scheduler.pacer.seconds)

    # ------------------------------------------------------------------ outputs

    def _start(self, sequence: Sequence, now: float) -> None:
        request, attempt, choice = sequence.key
        if (request, attempt) not in self._counted:  # once, whatever number of choices it asks for
            self._counted.add((request, attempt))
            self._prompt_tokens += len(sequence.ids)
            self._hit_tokens += sequence.cached_tokens
            self.device_hit_tokens_total += max(sequence.cached_tokens - sum(sequence.restored.values()), 0)
            self.queue_waits.observe(now - sequence.enqueued)
            sequence.account.prompt_tokens += len(sequence.ids)
            sequence.account.cached_tokens += sequence.cached_tokens
            if self.tiers is not None:
                self.tiers.started(sequence)
        sequence.started = True
        if sequence.spec.trace is not None:
            sequence.spec.trace.admitted = now
            self._undrawn.append(sequence)
        cached = sequence.cached_tokens
        in_blocks = cached - cached % self.pool.block_size
        self._outputs.append(
            SequenceStarted(
                request,
                attempt,
                sequence.num_prompt,
                cached,
                in_blocks,
                now - sequence.enqueued,
                choice,
                sequence.restored,
                len(sequence.ids) - cached if sequence.num_outputs else 0,
            )
        )

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        request, attempt, choice = sequence.key
        self._outputs.append(
            SequenceFinished(
                request, attempt, reason, sequence.num_prompt, sequence.num_outputs, sequence.cached_tokens, choice
            )
        )

    def _fail(
        self, sequence: Sequence, error: KvfleetError, *, keep_tail: bool = True, told: int | None = None
    ) -> None:
        """`told`: how many of its tokens its reader has, where that may be fewer than have left."""
        self._leave(sequence, keep_tail=keep_tail)
        told = min(told, sequence.text.next_index) if told is not None else sequence.text.next_index
        known = max(len(sequence.spec.prompt_ids) + told - sequence.start, 0)
        if known < len(sequence.ids):
            self._erase(sequence.root, sequence.hashes, sequence.ids, known)
        request, attempt, choice = sequence.key
        self._outputs.append(SequenceFailed(request, attempt, error, choice))

    def _leave(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        if sequence.state is not SequenceState.FINISHED:
            if self.tiers is not None:
                self.tiers.leaves(sequence, self._rates.prefill_tokens_per_s)
            self.scheduler.finish(sequence, keep_tail=keep_tail)
        if sequence.spec.trace is not None:
            self._note_drawn(now := self._clock())
            drawn = sequence.num_outputs - len(sequence.spec.output_ids)
            sequence.spec.trace.leaves(now, self._drawing_steps, drawn)
        request, attempt, _ = sequence.key
        del self._sequences[sequence.key]
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._choices[request, attempt]
            self._counted.discard((request, attempt))

    def _note_drawn(self, now: float) -> None:
        """For traces: who has drawn a first token, or is gone."""
        waiting, self._undrawn = self._undrawn, []
        for sequence in waiting:
            assert sequence.spec.trace is not None
            if sequence.num_outputs > len(sequence.spec.output_ids):
                sequence.spec.trace.drawn(now, self._drawing_steps)
            elif sequence.state is not SequenceState.FINISHED:
                self._undrawn.append(sequence)

    def _result(self, plan: StepPlan, began: float) -> StepResult:
        outputs, self._outputs = self._outputs, []
        changes = self.pool.take_changes()
        now = self._clock()
        decodes, prefill, seconds = plan.decodes, plan.prefill_tokens, now - began
        self._fed_tokens += decodes + prefill
        self.busy_seconds_total += seconds
        self._rates.observe(prefill, decodes, seconds)
        if plan.slices:
            self._step_times.observe(now, seconds)
            self.steps_total += 1
            self.costs.share(seconds)
        if self._undrawn:
            self._note_drawn(now)
        self.scheduler.pacer.observe(decodes, prefill, plan.prefill_positions, seconds)
        below = self.tiers.take_changes() if self.tiers is not None else []
        return StepResult(
            outputs, changes.stored, changes.removed, decodes + prefill, prefill, len(plan.slices), seconds, below
        )

    # ------------------------------------------------------------------ queries

    def load(self) -> Load:
        """Requests, blocks and tokens now; `*_total` count since the start."""
        scheduler, pool = self.scheduler, self.pool
        queued = self._queued()
        restoring = self.tiers.waiting if self.tiers is not None else 0
        return Load(
            waiting=len(scheduler.waiting) + restoring,
            running=len(scheduler.running),
            slots=scheduler.slots,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.num_blocks,
            blocks_addressed=pool.addressed,
            queued_prefill_tokens=sum(tokens for _, tokens in queued),
            priorities=by_priority(queued),
            prompt_tokens_total=self._prompt_tokens,
            hit_tokens_total=self._hit_tokens,
            fed_tokens_total=self._fed_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=scheduler.preemptions,
            evictions_total=pool.evictions,
            tiers=self.tiers.loads() if self.tiers is not None else {},
            oldest_wait_s=max(
                (self._clock() - one.enqueued for one in scheduler.waiting if not one.started), default=0
            ),
        )

    def _queued(self) -> list[Queued]:
        scheduler, pool = self.scheduler, self.pool
        queued = [  # choices share their prompt
            (s, max(len(s.ids) - pool.depth(s.hashes) * pool.block_size, 1) if s is s.siblings[0] else 0)
            for s in scheduler.waiting
        ]
        return queued + [(s, s.remaining if s.remaining > 1 else 0) for s in scheduler.running]

    def rates(self) -> Rates:
        """Measured from steps; 0 until measured."""
        return Rates(
            self._rates.prefill_tokens_per_s,
            self._rates.decode_steps_per_s,
            self._rates.decode_tokens_per_s,
            self.tiers.rates() if self.tiers is not None else {},
            self._step_times.longest_s,
        )

    @property
    def digest(self) -> int:
        """Of what is held in each tier, as `EventLog.digest` has it."""
        return self.pool.digest ^ (self.tiers.digest if self.tiers is not None else 0)

    def cached_hashes(self) -> list[bytes]:
        """Content addresses of all full blocks, parents before children."""
        return self.pool.hashes()

    def holdings(self) -> dict[Tier, list[bytes]]:
        """The same by tier, of all tiers that `digest` covers."""
        below = self.tiers.holdings() if self.tiers is not None else {}
        return {Tier.DEVICE: self.cached_hashes()} | below

    def erase(self, root: Root, ids: Items[int], keep: int = 0) -> int:
        """Forget what only this token sequence has behind its first `keep` tokens, in every tier. Returns how many
        blocks of this worker went."""
        return self._erase(root, chain(root, ids, self.pool.block_size), ids, keep)

    def _erase(self, root: Root, hashes: Items[bytes], ids: Items[int], keep: int) -> int:
        if self.tiers is None:
            return self.pool.erase(root, hashes, ids, keep)
        return self.tiers.erase(root, hashes, ids, keep)

    def depths(self, root: Root, ids: Items[int]) -> dict[Tier, int]:
        """How many leading tokens of `ids` are cached, by tier of this worker: there or in a faster one."""
        on_device = self.locate(root, ids)[0]
        if self.tiers is None or self.tiers.host is None:
            return {Tier.DEVICE: on_device}
        hashes = chain(root, ids, self.pool.block_size)
        below = self.tiers.host.depth(hashes, 0, len(hashes)) * self.pool.block_size
        return {Tier.DEVICE: on_device, Tier.HOST: max(on_device, below)}

    def locate(self, root: Root, ids: Items[int]) -> tuple[int, list[int]]:
        """How many leading tokens of `ids` are cached, and the blocks that hold them."""
        match = self.pool.match(root, chain(root, ids, self.pool.block_size), ids, limit=len(ids))
        return match.tokens, match.blocks + ([match.donor] if match.donor is not None else [])

    def read_kv(self, root: Root, ids: Items[int], layer: int) -> tuple[Any, Any]:
        """K and V `[len, kv_heads, head_dim]` of the cached part of `ids` in one layer, copied.

        Raises IndexError if the model has no such layer.
        """
        if not 0 <= layer < self.runner.num_layers:
            raise IndexError(f"the model has layers 0 to {self.runner.num_layers - 1}, not {layer}")
        tokens, blocks = self.locate(root, ids)
        return self.runner.read_kv(blocks, tokens, layer)

    def audit(self) -> None:
        """Look at some blocks of the device and of the host, others each time. Raises AssertionError if their books do
        not balance."""
        held = self.tiers.held() if self.tiers is not None else []
        self._audit.look([*(sequence.blocks for sequence in self.scheduler.running), *held])
        if self.tiers is not None:
            self.tiers.audit()

    def check_integrity(self) -> None:
        """Raises AssertionError if engine, scheduler and pool disagree."""
        self.scheduler.check_integrity(self.tiers.held() if self.tiers is not None else ())
        if self.tiers is not None:
            self.tiers.check_integrity()
        queued = {s.key for s in (*self.scheduler.waiting, *self.scheduler.running)}
        queued |= {key for key, s in self._sequences.items() if s.state is SequenceState.RESTORING}
        paused = {key for key, s in self._sequences.items() if s.state is SequenceState.PAUSED}
        assert queued | paused == set(self._sequences)
        assert all(s in s.siblings and self._choices[s.key[:2]] is s.siblings for s in self._sequences.values())
        assert sum(map(len, self._choices.values())) == len(self._sequences)

    # ------------------------------------------------------------------ inside

    def _text(self, spec: SequenceSpec) -> TextStream:
        """The sequence's text, rebuilt from what an earlier attempt generated. Raises EngineFailure if it cannot be."""
        try:
            text = TextStream(self._detokenizer.stream(spec.prompt_ids), StopStrings(spec.sampling.stop))
            text.replay(spec.output_ids, spec.text_sent)
        except Exception as error:  # a tokenizer's bug is that request's alone
            logger.exception(
                "request %s: its tokens could not be made text", spec.request, extra={"request": spec.request}
            )
            raise EngineFailure(f"the request's tokens could not be made text: {error}") from error
        return text

    def _find(self, request: str, attempt: int | None) -> list[Sequence]:
        """All choices of an attempt, or of all attempts."""
        if attempt is not None:
            return list(self._choices.get((request, attempt), ()))
        return [sequence for key, sequence in self._sequences.items() if key[0] == request]
