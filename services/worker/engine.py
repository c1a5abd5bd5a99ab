"""The engine: continuous batching over a paged KV pool. Read `step` first.

Owns all sequences of one model and carries out what the scheduler decides. It knows no torch (a runner computes), no
NATS, no threads: whoever calls it calls from one thread, `services.worker.engine_thread`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import count
from typing import Any

from kvproto.block_hash import Root, chain
from kvproto.errors import (
    Cancelled,
    ContextLengthExceeded,
    EngineFailure,
    InvalidRequest,
    KvfleetError,
    OutOfMemory,
)
from kvproto.messages import FinishReason, Load, Rates
from services.worker.block_pool import BlockPool
from services.worker.detokenizer import Detokenizer
from services.worker.model.base import Drawn, ModelRunner, Scored
from services.worker.outputs import (
    SequenceFailed,
    SequenceFinished,
    SequenceOutput,
    SequenceStarted,
    SequenceTokens,
    StepResult,
)
from services.worker.scheduler import Scheduler
from services.worker.sequence import Sequence, SequenceSpec, State
from services.worker.step_plan import StepPlan
from services.worker.step_rates import StepRates
from services.worker.stopping import StopStrings
from services.worker.text_stream import NOTHING, Released, TextStream

logger = logging.getLogger(__name__)


class Engine:
    """Sequences in by `add`, their tokens out by `step`. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        runner: ModelRunner,
        pool: BlockPool,
        scheduler: Scheduler,
        detokenizer: Detokenizer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (pool.num_blocks, pool.block_size) != (runner.num_blocks, runner.block_size):
            raise ValueError("block pool and runner differ in the number or the size of their blocks")
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self._detokenizer = detokenizer
        self._clock = clock
        self._eos_ids = frozenset(runner.eos_ids)
        self._arrivals = count()
        self._sequences: dict[tuple[str, int], Sequence] = {}
        self._outputs: list[SequenceOutput] = []
        self._rates = StepRates()
        self._prompt_tokens = self._hit_tokens = self._fed_tokens = self._generated_tokens = 0

    # ------------------------------------------------------------------ requests

    def add(self, spec: SequenceSpec) -> None:
        """Accept a sequence: from here on it ends in exactly one terminal output.

        Raises InvalidRequest or ContextLengthExceeded, naming the field and its limit, or OutOfMemory.
        """
        self._validate(spec)
        eos_ids: frozenset[int] = frozenset() if spec.sampling.ignore_eos else self._eos_ids
        sequence = Sequence(
            spec,
            self.pool.block_size,
            arrival=next(self._arrivals),
            enqueued=self._clock(),
            max_outputs=spec.sampling.max_tokens,
            stop_ids=eos_ids.union(spec.sampling.stop_ids),
            text=self._text(spec),
        )
        self._sequences[sequence.key] = sequence
        self.scheduler.enqueue(sequence)
        if (reason := sequence.end) is not None:  # the earlier attempt had all of it
            self._start(sequence, self._clock())
            self._finish(sequence, reason)

    def cancel(self, request: str, attempt: int | None = None) -> None:
        """End a request's sequences with Cancelled, in the next step's outputs; unknown ones are ignored."""
        for sequence in self._find(request, attempt):
            self._fail(sequence, Cancelled("the request was cancelled"))

    def pause(self, request: str, attempt: int | None = None) -> None:
        """Park a request: its blocks become evictable until `resume`, which finds again what survived."""
        for sequence in self._find(request, attempt):
            if sequence.state in (State.WAITING, State.RUNNING):
                self.scheduler.pause(sequence)

    def resume(self, request: str, attempt: int | None = None) -> None:
        """Let a paused request go on, at its old place among the waiting ones."""
        for sequence in self._find(request, attempt):
            if sequence.state is State.PAUSED:
                self.scheduler.enqueue(sequence)

    def abandon(self, error: KvfleetError) -> StepResult:
        """The last outputs of an engine that will not step again: every sequence fails with `error`.

        Looks at no scheduler and no pool, so it works whatever state an exception left them in.
        """
        outputs, self._outputs = self._outputs, []
        outputs.extend(SequenceFailed(*key, error) for key in self._sequences)
        self._sequences = {}
        return StepResult(outputs)

    # ------------------------------------------------------------------ the step

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._outputs)

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
        """Draws of the plan's slices, in order; None where a slice draws nothing or was not run."""
        if not plan.slices:
            return []
        try:
            self.runner.copy_blocks(plan.copies)
            return self.runner.run(plan.slices)
        except OutOfMemory as error:
            largest = max(range(len(plan.slices)), key=lambda at: len(plan.slices[at].ids))
            logger.warning("a step of %d tokens ran out of memory: %s", plan.fed_tokens, error)
            self._fail(plan.sequences[largest], error)
            plan.slices, plan.sequences, plan.prefill_tokens = [], [], 0  # nothing is committed: run again next step
            return []

    def _commit(self, plan: StepPlan, drawn: list[Drawn]) -> None:
        for sequence, part, token in zip(plan.sequences, plan.slices, drawn, strict=True):
            if isinstance(token, KvfleetError):
                self._fail(sequence, token, keep_tail=False)
                continue
            sequence.computed = part.end
            self._fill_blocks(sequence)
            if token is not None:
                self._advance(sequence, token.token if isinstance(token, Scored) else token)

    def _fill_blocks(self, sequence: Sequence) -> None:
        """Make the blocks that became full findable, prompt and generated tokens alike."""
        size = self.pool.block_size
        for at in range(sequence.filled, sequence.computed // size):
            sequence.blocks[at] = self.pool.fill(
                sequence.blocks[at], sequence.parent_of(at), sequence.block_ids(at, size), sequence.hashes[at]
            )
            sequence.filled = at + 1

    def _advance(self, sequence: Sequence, token: int) -> None:
        """A token was drawn: emit what may leave, and see whether the sequence ends."""
        stopped = token in sequence.stop_ids
        if not stopped:
            sequence.append(token, self.pool.block_size)
            self._generated_tokens += 1
        try:
            released = NOTHING if stopped else sequence.text.push(token)
            reason = FinishReason.STOP if stopped else sequence.end
            if reason is not None:
                released = released.then(sequence.text.finish())
                reason = FinishReason.STOP if sequence.text.stopped else reason
        except Exception as error:  # a tokenizer's bug is that request's alone
            logger.exception("request %s: token %d could not be made text", sequence.spec.request, token)
            self._fail(sequence, EngineFailure(f"token {token} could not be made text: {error}"))
            return
        self._emit(sequence, released)
        if reason is not None:
            self._finish(sequence, reason)

    # ------------------------------------------------------------------ outputs

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.started = True
        self._prompt_tokens += len(sequence.ids)
        self._hit_tokens += sequence.cached_tokens
        request, attempt = sequence.key
        cached = sequence.cached_tokens
        in_blocks = cached - cached % self.pool.block_size
        self._outputs.append(
            SequenceStarted(request, attempt, sequence.num_prompt, cached, in_blocks, now - sequence.enqueued)
        )

    def _emit(self, sequence: Sequence, released: Released) -> None:
        if released.ids:
            request, attempt = sequence.key
            index = sequence.text.next_index - len(released.ids)
            self._outputs.append(SequenceTokens(request, attempt, index, released.ids, released.text))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._leave(sequence)
        request, attempt = sequence.key
        self._outputs.append(
            SequenceFinished(
                request, attempt, reason, sequence.num_prompt, sequence.num_outputs, sequence.cached_tokens
            )
        )

    def _fail(self, sequence: Sequence, error: KvfleetError, *, keep_tail: bool = True) -> None:
        self._leave(sequence, keep_tail=keep_tail)
        self._outputs.append(SequenceFailed(*sequence.key, error))

    def _leave(self, sequence: Sequence, *, keep_tail: bool = True) -> None:
        if sequence.state is not State.FINISHED:
            self.scheduler.finish(sequence, keep_tail=keep_tail)
        del self._sequences[sequence.key]

    def _result(self, plan: StepPlan, began: float) -> StepResult:
        outputs, self._outputs = self._outputs, []
        changes = self.pool.take_changes()
        fed, seconds = plan.fed_tokens, self._clock() - began
        self._fed_tokens += fed
        self._rates.observe(plan.prefill_tokens, fed - plan.prefill_tokens, seconds)
        return StepResult(outputs, changes.stored, changes.removed, fed, plan.prefill_tokens, len(plan.slices), seconds)

    # ------------------------------------------------------------------ queries

    def load(self) -> Load:
        """Requests, blocks and tokens now; `*_total` count since the start."""
        scheduler, pool = self.scheduler, self.pool
        queued = sum(len(s.ids) for s in scheduler.waiting) + sum(
            s.remaining for s in scheduler.running if s.remaining > 1
        )
        return Load(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            slots=scheduler.slots,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_total=pool.num_blocks,
            blocks_addressed=pool.addressed,
            queued_prefill_tokens=queued,
            prompt_tokens_total=self._prompt_tokens,
            hit_tokens_total=self._hit_tokens,
            fed_tokens_total=self._fed_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=scheduler.preemptions,
            evictions_total=pool.evictions,
        )

    def rates(self) -> Rates:
        """Measured from steps; 0 until measured."""
        return Rates(self._rates.prefill_tokens_per_s, self._rates.decode_steps_per_s, self._rates.decode_tokens_per_s)

    @property
    def digest(self) -> int:
        """XOR over the first 8 bytes (little endian) of every hash ever stored or removed."""
        return self.pool.digest

    def cached_hashes(self) -> list[bytes]:
        """Content addresses of all full blocks, parents before children."""
        return self.pool.hashes()

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

    def check_integrity(self) -> None:
        """Raises AssertionError if engine, scheduler and pool disagree."""
        self.scheduler.check_integrity()
        queued = {s.key for s in (*self.scheduler.waiting, *self.scheduler.running)}
        paused = {key for key, s in self._sequences.items() if s.state is State.PAUSED}
        assert queued | paused == set(self._sequences)

    # ------------------------------------------------------------------ inside

    def _text(self, spec: SequenceSpec) -> TextStream:
        """The sequence's text, rebuilt from what an earlier attempt generated. Raises EngineFailure if it cannot be."""
        try:
            text = TextStream(self._detokenizer.stream(spec.prompt_ids), StopStrings(spec.sampling.stop))
            text.replay(spec.output_ids, spec.text_sent)
        except Exception as error:  # a tokenizer's bug is that request's alone
            logger.exception("request %s: its tokens could not be made text", spec.request)
            raise EngineFailure(f"the request's tokens could not be made text: {error}") from error
        return text

    def _find(self, request: str, attempt: int | None) -> list[Sequence]:
        if attempt is not None:
            sequence = self._sequences.get((request, attempt))
            return [sequence] if sequence else []
        return [sequence for key, sequence in self._sequences.items() if key[0] == request]

    def _validate(self, spec: SequenceSpec) -> None:
        runner, sampling = self.runner, spec.sampling
        if (spec.request, spec.attempt) in self._sequences:
            raise InvalidRequest("this attempt is running already", field="request")
        if not spec.prompt_ids:
            raise InvalidRequest("the prompt is empty, at least 1 token is needed", field="prompt_ids")
        room = runner.context_length - len(spec.prompt_ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(spec.prompt_ids)} tokens, the context of {runner.context_length} tokens "
                f"leaves room for at most {runner.context_length - 1}",
                field="prompt_ids",
            )
        if sampling.max_tokens > room:
            raise ContextLengthExceeded(
                f"{sampling.max_tokens} is more than the {room} tokens that the context of {runner.context_length} "
                f"leaves after a prompt of {len(spec.prompt_ids)}",
                field="max_tokens",
            )
        for field, ids in (("prompt_ids", spec.prompt_ids), ("output_ids", spec.output_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < runner.vocab_size):
                raise InvalidRequest(f"token ids must lie in 0 to {runner.vocab_size - 1}", field=field)
        if sampling.max_tokens < 1:
            raise InvalidRequest("must be at least 1", field="max_tokens")
        if not sampling.temperature >= 0:
            raise InvalidRequest("must be at least 0", field="temperature")
        if not 0 <= sampling.top_p <= 1:
            raise InvalidRequest("must lie in 0 to 1", field="top_p")
        if sampling.top_k < 0:
            raise InvalidRequest("must be at least 0", field="top_k")
        needed = self.pool.blocks_for(len(spec.prompt_ids) + len(spec.output_ids))
        if needed > self.pool.num_blocks:
            raise OutOfMemory(f"{needed} blocks are needed, this worker has {self.pool.num_blocks}")
