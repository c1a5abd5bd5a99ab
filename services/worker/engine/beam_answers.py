"""What a beam search found becomes the answers of its choices. Pure.

Nothing of a search is told before its end. Of a choice that an earlier attempt has told in part, as its worker was lost
while it told it, only the rest is: a search finds the same wherever it runs.
"""

from __future__ import annotations

from itertools import chain

from kvfleet.worker.schedule.sequence import Sequence
from kvproto.codec import floored
from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import FinishReason, StopToken, Tokens
from kvsampling.beam_search import Hypothesis

TOKENS_PER_FRAME = 128  # with log probabilities of up to 128 alternatives each


def answer_all(lead: Sequence) -> list[tuple[Sequence, list[Tokens], FinishReason]]:
    """By choice. Raises InvalidRequest if fewer were found than are wanted, EngineFailure."""
    assert lead.beams is not None
    found, choices = lead.beams.search.finished, sorted(lead.siblings, key=lambda one: one.spec.choice)
    if len(found) < lead.spec.sampling.n:
        raise InvalidRequest(f"beam search found {len(found)} sequences that end", field="n")
    return [(choice, *_answer(choice, found[choice.spec.choice])) for choice in choices]


def _answer(choice: Sequence, found: Hypothesis) -> tuple[list[Tokens], FinishReason]:
    output, told, text = found.output, choice.told, choice.text
    if tuple(beam.token for beam in output[: len(told)]) != told:
        raise EngineFailure("beam search found something else than the attempt before, which was told in part")
    choice.num_outputs = len(output)
    choice.account.generated_tokens += len(output) - len(told)
    if choice.beams is None:
        choice.cached_tokens = choice.num_prompt  # the first one's
    if found.by_token and found.last.logprobs is not None:
        choice.stop_token = StopToken(found.last.token, floored(found.last.logprobs))
    try:
        released = [text.push(beam.token, beam.logprobs) for beam in output[len(told) :]]
        released.append(text.finish())
    except Exception as error:  # a tokenizer's bug is that request's alone
        raise EngineFailure(f"the tokens could not be made text: {error}") from error
    ids, pieces, logprobs = (tuple(chain.from_iterable(parts)) for parts in zip(*released, strict=True))
    tokens = []
    for at in range(0, len(ids), TOKENS_PER_FRAME):
        part = slice(at, at + TOKENS_PER_FRAME)
        tokens.append(Tokens(*choice.key, len(told) + at, ids[part], pieces[part], logprobs[part]))
    return tokens, FinishReason.STOP if text.stop else found.reason
