"""Log probabilities in OpenAI's two forms: chat's list of tokens, and the four parallel lists of completions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvfleet.ingress.http.answer_types import Described, Natural
from kvfleet.ingress.prompts.token_spelling import TokenSpelling
from kvproto.logprobs import floored
from kvproto.messages import TokenLogprobs


class RankedToken(Described):
    token: str
    logprob: float
    bytes: list[Natural]


class ScoredToken(RankedToken):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Described):
    content: list[ScoredToken]
    refusal: None


class CompletionLogprobs(Described):
    """`top_logprobs` has the token itself beside the asked alternatives where it is none of them; `text_offset` counts
    the characters of the choice's text before each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Natural]


def chat_logprobs(spelling: TokenSpelling, ids: Sequence[int], logprobs: Iterable[TokenLogprobs]) -> ChatLogprobs:
    text_of, bytes_of = spelling.text_of, spelling.bytes_of
    content = []
    for token, scores in zip(ids, map(floored, logprobs), strict=True):
        tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
        top = [RankedToken(text_of(one), value, list(bytes_of(one))) for one, value in tops]
        content.append(ScoredToken(text_of(token), scores.logprob, list(bytes_of(token)), top))
    return ChatLogprobs(content, None)


def completion_logprobs(
    spelling: TokenSpelling,
    ids: Sequence[int],
    pieces: Sequence[str],
    logprobs: Iterable[TokenLogprobs],
    offset: int = 0,
) -> CompletionLogprobs:
    """`offset`: characters of the choice's text before these."""
    tokens, values, tops, offsets = [], [], [], []
    for token, piece, scores in zip(ids, pieces, map(floored, logprobs), strict=True):
        tokens.append(spelling.text_of(token))
        values.append(scores.logprob)
        ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
        tops.append({spelling.text_of(one): value for one, value in ranked} | {tokens[-1]: scores.logprob})
        offsets.append(offset)
        offset += len(piece)
    return CompletionLogprobs(tokens, values, tops, offsets)
