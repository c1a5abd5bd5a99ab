"""The live sequences of a vLLM worker by attempt and choice, how they come, and the load that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain as flat
from itertools import count

from kvfleet.worker.port.acceptance import check_spec, stop_ids_of, text_of
from kvfleet.worker.port.capacity import Attempt
from kvfleet.worker.port.engine_counters import EngineCounters
from kvfleet.worker.port.giving_way import by_priority, giving_way
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks
from kvfleet.worker.vllm.vllm_sequence import VllmSequence
from kvproto.block_hash import chain
from kvproto.errors import InvalidRequest, OutOfMemory
from kvproto.messages import Load, TierLoad
from kvsampling.grammar import Grammars


@dataclass(frozen=True, slots=True)
class VllmModel:
    """`name` is vLLM's for it. `slots`: sequences that it runs at once; `blocks`: of ours, that its cache holds."""

    name: str
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    slots: int
    blocks: int


@dataclass(eq=False, slots=True)
class LiveVllmSequences:
    model: VllmModel
    blocks: ForeignBlocks
    detokenizer: Detokenizer
    counters: EngineCounters
    grammars: Grammars = field(init=False)
    _arrivals: Iterator[int] = field(default_factory=count)
    _choices: dict[Attempt, list[VllmSequence]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grammars = Grammars(lambda: self.detokenizer.to_json(), self.model.vocab_size, self.model.eos_ids)

    def __iter__(self) -> Iterator[VllmSequence]:
        return iter([*flat.from_iterable(self._choices.values())])

    def find(self, request: str, attempt: int) -> list[VllmSequence]:
        return list(self._choices.get((request, attempt), ()))

    def accept(self, spec: SequenceSpec, now: float) -> VllmSequence:
        """Raises InvalidRequest, ContextLengthExceeded, OutOfMemory, or EngineFailure if its text cannot be rebuilt."""
        attempt, size, prompt = (spec.request, spec.attempt), self.blocks.block_size, len(spec.prompt_ids)
        siblings = self._choices.get(attempt, [])
        if any(sibling.spec.choice == spec.choice for sibling in siblings):
            raise InvalidRequest("this attempt is running already", field="request")
        check_spec(spec, self.model.vocab_size)
        sampling = spec.sampling
        if sampling.beams is not None:
            raise InvalidRequest("vLLM's workers search no beams", field="use_beam_search")
        window = ContextWindow.of(prompt, sampling.max_tokens, self.model.context_length, sampling.overflow)
        total = prompt + len(spec.output_ids)
        if (needed := -(-(total - window.start(total)) // size)) > self.model.blocks:
            raise OutOfMemory(f"{needed} blocks are needed, this worker has {self.model.blocks}")
        if siblings and siblings[0].spec.prompt_ids != spec.prompt_ids:
            raise InvalidRequest("all choices of an attempt must have the same prompt", field="prompt_ids")
        sequence = VllmSequence(
            spec,
            window=window,
            stop_ids=stop_ids_of(spec, self.model.eos_ids),
            text=text_of(spec, self.detokenizer),
            siblings=siblings,
            arrival=next(self._arrivals),
            enqueued=now,
            account=self.counters.costs.of(spec.tenant),
        )
        sequence.cached_tokens = self.blocks.depth(chain(sequence.root, sequence.ids, size)) * size
        if spec.trace is not None:
            spec.trace.enqueued = now
        self._choices[attempt] = siblings
        siblings.append(sequence)
        return sequence

    def remove(self, sequence: VllmSequence) -> None:
        sequence.siblings.remove(sequence)
        if not sequence.siblings:
            del self._choices[sequence.key[:2]]

    def giving_way(self, request: str, attempt: int, count: int) -> list[VllmSequence]:
        """`count` fresh ones of lower priority than the attempt's, or else these if fresh."""
        if not (found := self.find(request, attempt)):
            return []
        waiting = [one for one in self if not (one.is_running or one.is_paused)]
        shed = giving_way(waiting, found[0].spec.priority, count)
        return shed or ([] if any(one.started or one.is_running for one in found) else found)

    def queued_before(self, some: Sequence[VllmSequence]) -> int:
        """Tokens to be computed before all of them are, as priorities say."""
        least = min((one.spec.priority for one in some), default=0)
        return sum(one.queued_tokens for one in self if one.spec.priority >= least) if some else 0

    def load(self, preemptions: int, tiers: Mapping[str, TierLoad], now: float) -> Load:
        live, accounts = [one for one in self if not one.is_paused], self.counters.costs.accounts.values()
        waiting = [one for one in live if not one.is_running]
        queued = [(one, one.queued_tokens) for one in live if one.queued_tokens]
        size = self.blocks.block_size
        used = sum(-(-one.length // size) for one in live if one.is_running)
        return Load(
            waiting=len(waiting),
            running=len(live) - len(waiting),
            slots=self.model.slots,
            blocks_used=min(used, self.model.blocks),
            blocks_cached=max(len(self.blocks) - used, 0),
            blocks_total=self.model.blocks,
            blocks_addressed=len(self.blocks),
            queued_prefill_tokens=sum(tokens for _, tokens in queued),
            priorities=by_priority(queued),
            prompt_tokens_total=sum(account.prompt_tokens for account in accounts),
            hit_tokens_total=sum(account.cached_tokens for account in accounts),
            fed_tokens_total=self.counters.fed_tokens_total,
            generated_tokens_total=sum(account.generated_tokens for account in accounts),
            preemptions_total=preemptions,
            evictions_total=self.blocks.evictions_total,
            tiers=dict(tiers),
            oldest_wait_s=max((now - one.enqueued for one in waiting if not one.started), default=0),
        )
