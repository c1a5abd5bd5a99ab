"""What a sequence must satisfy to be accepted. Pure: raises an error that names the field and its limit, or passes."""

from __future__ import annotations

from kvfleet.worker.schedule.sequence import SequenceSpec
from kvproto.errors import InvalidRequest
from kvproto.messages import Sampling


def check(spec: SequenceSpec, vocab_size: int) -> None:
    """Raises InvalidRequest. Lengths against the context are `context_window`'s business."""
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
