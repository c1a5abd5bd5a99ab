"""What makes a sequence acceptable to any engine, and the text that it begins with. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.text.detokenizer import Detokenizer
from kvfleet.worker.text.text_stream import StopStrings, StopWatch, TextStream
from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import Overflow

logger = logging.getLogger(__name__)


def stop_ids_of(spec: SequenceSpec, eos_ids: Iterable[int]) -> frozenset[int]:
    """A grammar's end is the output's, whatever else is wanted."""
    goes_on = spec.sampling.ignore_eos and spec.sampling.grammar is None
    return frozenset(() if goes_on else eos_ids).union(spec.sampling.stop_ids)


def text_of(spec: SequenceSpec, detokenizer: Detokenizer) -> TextStream:
    """Goes on where the earlier attempt's text ended. Raises EngineFailure if that cannot be rebuilt."""
    try:
        spelling = detokenizer if spec.sampling.skip_special_tokens else detokenizer.whole
        text = TextStream(spelling.stream(spec.prompt_ids), StopStrings(spec.sampling.stop))
        text.replay(spec.output_ids, spec.text_sent)
    except Exception as error:  # a tokenizer's bug is that request's alone
        about = {"request": spec.request}
        logger.exception("request %s: its tokens could not be made text", spec.request, extra=about)
        raise EngineFailure(f"the request's tokens could not be made text: {error}") from error
    return text


def watch_of(spec: SequenceSpec, detokenizer: Detokenizer) -> StopWatch | None:
    """Of the beams' texts, for stop strings; None without any."""
    stops = StopStrings(spec.sampling.stop)
    spelling = detokenizer if spec.sampling.skip_special_tokens else detokenizer.whole
    return StopWatch(spelling.stream(spec.prompt_ids), stops) if stops.longest else None


def check_spec(spec: SequenceSpec, vocab_size: int) -> None:
    """Raises InvalidRequest. `context_window` checks lengths. NaN fails every comparison, so each says what holds."""
    sampling = spec.sampling
    if not spec.prompt_ids:
        raise InvalidRequest("the prompt is empty, at least 1 token is needed", field="prompt_ids")
    for name, ids in (("prompt_ids", spec.prompt_ids), ("output_ids", spec.output_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise InvalidRequest(f"token ids must lie in 0 to {vocab_size - 1}", field=name)
    if sampling.max_tokens < 0:
        raise InvalidRequest("must be at least 0", field="max_tokens")
    if sampling.prompt_logprobs is not None and sampling.overflow in (Overflow.TRUNCATE_LEFT, Overflow.SLIDING):
        raise InvalidRequest("a prompt is scored as a whole, or not at all", field="context_overflow")
    if (beams := sampling.beams) is not None:
        if beams.width < sampling.n:
            raise InvalidRequest(f"{sampling.n} choices of {beams.width} beams", field="best_of")
        if not sampling.max_tokens:
            raise InvalidRequest("must be at least 1 for beam search", field="max_tokens")
        if sampling.grammar is not None:
            raise InvalidRequest("beam search follows no grammar", field=sampling.grammar.said)
        if sampling.prompt_logprobs is not None:
            raise InvalidRequest("beam search scores no prompt", field="prompt_logprobs")
        if sampling.overflow is Overflow.SLIDING:
            raise InvalidRequest("beams cannot slide", field="context_overflow")
    if not sampling.temperature >= 0:
        raise InvalidRequest("must be at least 0", field="temperature")
    if not 0 <= sampling.top_p <= 1:
        raise InvalidRequest("must lie in 0 to 1", field="top_p")
    if sampling.top_k < 0:
        raise InvalidRequest("must be at least 0", field="top_k")
