"""What a beam search found becomes the answers of its choices. Pure.

Nothing of a search is told before its end. Of a choice that an earlier attempt has told in part, as its worker was lost
while it told it, only the rest is: a search finds the same wherever it runs.
"""

from __future__ import annotations

from kvfleet.worker.schedule.sequence import Sequence
from kvfleet.worker.text.text_stream import Released
from kvproto.codec import floored
from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import FinishReason, StopToken, TokenLogprobs
from kvsampling.beam_search import Hypothesis


def answer_all(lead: Sequence) -> list[tuple[Sequence, Released, FinishReason]]:
    """By choice. Raises InvalidRequest if fewer were found than are wanted, EngineFailure."""
    assert lead.beams is not None
    found, choices = lead.beams.search.finished, sorted(lead.siblings, key=lambda one: one.spec.choice)
    if len(found) < lead.spec.sampling.n:
        raise InvalidRequest(f"beam search found {len(found)} sequences that end", field="n")
    return [(choice, *_answer(choice, found[choice.spec.choice])) for choice in choices]


def _answer(choice: Sequence, found: Hypothesis) -> tuple[Released, FinishReason]:
    output, told, text = found.output, choice.told, choice.text
    if tuple(beam.token for beam in output[: len(told)]) != told:
        raise EngineFailure("beam search found something else than the attempt before, which was told in part")
    choice.num_outputs = len(output)
    if choice.beams is None:
        choice.cached_tokens = choice.num_prompt  # the first one's
    choice.account.generated_tokens += len(output) - len(told)
    ids: list[int] = []
    pieces: list[str] = []
    logprobs: list[TokenLogprobs] = []
    try:
        for beam in output[len(told) :]:
            released = text.push(beam.token, beam.logprobs)
            ids += released.ids
            pieces += released.text
            logprobs += released.logprobs
        last = text.finish()
    except Exception as error:  # a tokenizer's bug is that request's alone
        raise EngineFailure(f"the tokens could not be made text: {error}") from error
    if found.by_token and found.last.logprobs is not None:
        choice.stop_token = StopToken(found.last.token, floored(found.last.logprobs))
    released = Released(tuple(ids), tuple(pieces), tuple(logprobs)).then(last)
    return released, FinishReason.STOP if text.stop else found.reason
