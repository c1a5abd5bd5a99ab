"""The live sequences by attempt and choice, and what makes a request acceptable. The engine's thread owns them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count

from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.port.acceptance import check_spec, stop_ids_of, text_of, watch_of
from kvfleet.worker.port.capacity import Attempt
from kvfleet.worker.port.sequence_spec import Key, SequenceSpec, SequenceTrace
from kvfleet.worker.port.tenant_costs import TenantCosts
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import BeamGroup, Sequence, SequenceState
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.detokenizer import Detokenizer
from kvproto.errors import InvalidRequest, OutOfMemory
from kvsampling.beam_search import BeamSearch
from kvsampling.grammar import Grammars, Matcher

_ELSEWHERE = (SequenceState.RESTORING, SequenceState.PAUSED, SequenceState.FOLLOWING)


@dataclass(eq=False)
class LiveSequences:
    runner: ModelRunner
    scheduler: Scheduler
    detokenizer: Detokenizer
    costs: TenantCosts
    grammars: Grammars
    _arrivals: Iterator[int] = field(default_factory=count)
    _choices: dict[Attempt, list[Sequence]] = field(default_factory=dict)  # live ones of each attempt
    _counted: set[Attempt] = field(default_factory=set)  # attempts with a started choice

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._choices.values())

    def accept(self, spec: SequenceSpec, now: float) -> Sequence:
        """Raises InvalidRequest, ContextLengthExceeded, OutOfMemory, or EngineFailure if its text cannot be rebuilt."""
        attempt = spec.request, spec.attempt
        siblings = self._choices.get(attempt, [])
        if any(sibling.spec.choice == spec.choice for sibling in siblings):
            raise InvalidRequest("this attempt is running already", field="request")
        check_spec(spec, self.runner.vocab_size)
        sampling, blocks, prompt = spec.sampling, self.runner.num_blocks, len(spec.prompt_ids)
        window = ContextWindow.of(prompt, sampling.max_tokens, self.runner.context_length, sampling.overflow)
        total = prompt + len(spec.output_ids)
        needed = self.scheduler.tables.at_once(total - window.start(total))
        if sampling.beams is not None:
            needed += sampling.at_once  # a tail of each
            if sampling.at_once > self.scheduler.slots:
                why = f"this worker runs at most {self.scheduler.slots} beams, got {sampling.at_once}"
                raise InvalidRequest(why, field="best_of")
        if needed > blocks:
            raise OutOfMemory(f"{needed} blocks are needed, this worker has {blocks}")
        if siblings and siblings[0].spec.prompt_ids != spec.prompt_ids:
            raise InvalidRequest("all choices of an attempt must have the same prompt", field="prompt_ids")
        stop_ids, text = stop_ids_of(spec, self.runner.eos_ids), text_of(spec, self.detokenizer)
        told: tuple[int, ...] = ()
        beams, state = None, SequenceState.WAITING
        if sampling.beams is not None:  # it begins with the prompt, whatever was told of what it will find
            told, spec = spec.output_ids, replace(spec, output_ids=(), text_sent=0)
            if any(sibling.beams is not None for sibling in siblings):
                state = SequenceState.FOLLOWING
            else:
                watch = watch_of(spec, self.detokenizer)
                beams = BeamGroup(BeamSearch(sampling.beams, window.max_tokens, stop_ids, watch))
        sequence = Sequence(
            spec,
            self.runner.block_size,
            (next(self._arrivals), now),
            window=window,
            stop_ids=stop_ids,
            text=text,
            siblings=siblings,
            account=self.costs.of(spec.tenant),
            matcher=None if sampling.grammar is None else Matcher(self.grammars, sampling.grammar),
            beams=beams,
            told=told,
            state=state,
        )
        if spec.trace is not None:
            spec.trace.enqueued = now
        self._choices[attempt] = siblings
        siblings.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        attempt = sequence.key[:2]
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._choices[attempt]
            self._counted.discard(attempt)

    def clear(self) -> list[Key]:
        keys = [sequence.key for sequence in self]
        self._choices = {}
        return keys

    def find(self, request: str, attempt: int) -> list[Sequence]:
        return list(self._choices.get((request, attempt), ()))

    def has(self, sequence: Sequence) -> bool:
        return sequence in self._choices.get(sequence.key[:2], ())

    def is_first_start(self, sequence: Sequence) -> bool:
        attempt = sequence.key[:2]
        is_first = attempt not in self._counted
        self._counted.add(attempt)
        return is_first

    def check_integrity(self) -> None:
        queued = {s.key for s in (*self.scheduler.waiting, *self.scheduler.running)}
        elsewhere = {s.key for s in self if s.state in _ELSEWHERE}
        assert queued | elsewhere == {s.key for s in self}
        assert all(s in s.siblings and self._choices[s.key[:2]] is s.siblings for s in self)


@dataclass(slots=True)
class TracedDraws:
    """When traced sequences draw their first token. `steps` counts steps that drew a token."""

    steps: int = 0
    undrawn: list[tuple[Sequence, SequenceTrace]] = field(default_factory=list)  # have started and drawn nothing yet

    def started(self, sequence: Sequence, trace: SequenceTrace, now: float) -> None:
        trace.admitted = now
        self.undrawn.append((sequence, trace))

    def left(self, sequence: Sequence, trace: SequenceTrace, now: float) -> None:
        self.note(now)
        trace.ended, trace.drawn_tokens = now, sequence.num_outputs - len(sequence.spec.output_ids)
        if trace.prefilled is not None:
            trace.steps = self.steps - trace.steps_before

    def note(self, now: float) -> None:
        undrawn, self.undrawn = self.undrawn, []
        for sequence, trace in undrawn:
            if sequence.drawn > len(sequence.spec.output_ids):
                trace.prefilled, trace.steps_before = now, self.steps
            elif not sequence.has_ended:
                self.undrawn.append((sequence, trace))
