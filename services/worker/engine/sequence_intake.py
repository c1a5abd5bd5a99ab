"""What a request must satisfy to be accepted by the engine, and the sequence that is made of it.

It keeps no sequence. The engine's thread owns it.
"""

from __future__ import annotations

import logging
from itertools import count

from kvfleet.worker.model.base import ModelRunner
from kvfleet.worker.schedule.scheduler import Scheduler
from kvfleet.worker.schedule.sequence import Sequence, SequenceArrival, SequenceSpec
from kvfleet.worker.schedule.tenant_costs import TenantCosts
from kvfleet.worker.text.context_window import ContextWindow
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.text.stopping import StopStrings
from kvfleet.worker.text.text_stream import TextStream
from kvproto.errors import EngineFailure, InvalidRequest, OutOfMemory
from kvproto.messages import Sampling

logger = logging.getLogger(__name__)


class SequenceIntake:
    """Sequences are numbered as they come, and cost their tenant what `costs` counts."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, detokenizer: Detokenizer, costs: TenantCosts) -> None:
        self.detokenizer = detokenizer
        self._runner = runner
        self._scheduler = scheduler
        self._costs = costs
        self._eos_ids = frozenset(runner.eos_ids)
        self._arrivals = count()

    def accept(self, spec: SequenceSpec, siblings: list[Sequence], now: float) -> Sequence:
        """Raises InvalidRequest or ContextLengthExceeded, naming the field and its limit, OutOfMemory, or EngineFailure
        if its text cannot be rebuilt."""
        _check(spec, self._runner.vocab_size)
        sampling, blocks = spec.sampling, self._runner.num_blocks
        window = ContextWindow.of(
            len(spec.prompt_ids), sampling.max_tokens, self._runner.context_length, sampling.overflow
        )
        total = len(spec.prompt_ids) + len(spec.output_ids)
        needed = self._scheduler.tables.at_once(total - window.start(total))
        if needed > blocks:
            raise OutOfMemory(f"{needed} blocks are needed, this worker has {blocks}")
        if siblings and siblings[0].spec.prompt_ids != spec.prompt_ids:
            raise InvalidRequest("all choices of an attempt must have the same prompt", field="prompt_ids")
        eos_ids: frozenset[int] = frozenset() if sampling.ignore_eos else self._eos_ids
        sequence = Sequence(
            spec,
            self._runner.block_size,
            arrival=SequenceArrival(next(self._arrivals), now),
            window=window,
            stop_ids=eos_ids.union(sampling.stop_ids),
            text=self._text(spec),
            siblings=siblings,
            account=self._costs.of(spec.tenant),
        )
        if spec.trace is not None:
            spec.trace.enqueued = now
        return sequence

    def _text(self, spec: SequenceSpec) -> TextStream:
        """The sequence's text, rebuilt from what an earlier attempt generated."""
        try:
            text = TextStream(self.detokenizer.stream(spec.prompt_ids), StopStrings(spec.sampling.stop))
            text.replay(spec.output_ids, spec.text_sent)
        except Exception as error:  # a tokenizer's bug is that request's alone
            logger.exception(
                "request %s: its tokens could not be made text", spec.request, extra={"request": spec.request}
            )
            raise EngineFailure(f"the request's tokens could not be made text: {error}") from error
        return text


def _check(spec: SequenceSpec, vocab_size: int) -> None:
    """Lengths against the context are `context_window`'s business."""
    if not spec.prompt_ids:
        raise InvalidRequest("the prompt is empty, at least 1 token is needed", field="prompt_ids")
    for field, ids in (("prompt_ids", spec.prompt_ids), ("output_ids", spec.output_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequest(f"token ids must lie in 0 to {vocab_size - 1}", field=field)
    _check_sampling(spec.sampling)


def _check_sampling(sampling: Sampling) -> None:
    """Not-a-number fails every comparison, so each one says what must hold."""
    if sampling.max_tokens < 1:
        raise InvalidRequest("must be at least 1", field="max_tokens")
    if not sampling.temperature >= 0:
        raise InvalidRequest("must be at least 0", field="temperature")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidRequest("must lie in 0 to 1", field="top_p")
    if sampling.top_k < 0:
        raise InvalidRequest("must be at least 0", field="top_k")
