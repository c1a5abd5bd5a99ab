"""Log probabilities in OpenAI's two forms: chat's list of tokens, and the four parallel lists of completions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvfleet.ingress.prompts.token_spelling import TokenSpelling
from kvproto.codec import floored
from kvproto.messages import TokenLogprobs


def chat_logprobs(spelling: TokenSpelling, ids: Sequence[int], logprobs: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}], "refusal": null}`."""
    content = []
    for token, scores in zip(ids, map(floored, logprobs), strict=True):
        tops = zip(scores.top_ids, scores.top_logprobs, strict=True)
        top = [_scored(spelling, one, value) for one, value in tops]
        content.append({**_scored(spelling, token, scores.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _scored(spelling: TokenSpelling, token: int, logprob: float) -> dict[str, Any]:
    return {"token": spelling.text_of(token), "logprob": logprob, "bytes": list(spelling.bytes_of(token))}


def completion_logprobs(
    spelling: TokenSpelling,
    ids: Sequence[int],
    pieces: Sequence[str],
    logprobs: Iterable[TokenLogprobs],
    offset: int = 0,
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`.

    `top_logprobs` has the token itself beside the asked alternatives where it is none of them; `text_offset` counts the
    characters of the choice's text before each token, from `offset` on.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token, piece, scores in zip(ids, pieces, map(floored, logprobs), strict=True):
        tokens.append(spelling.text_of(token))
        values.append(scores.logprob)
        ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
        tops.append({spelling.text_of(one): value for one, value in ranked} | {tokens[-1]: scores.logprob})
        offsets.append(offset)
        offset += len(piece)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def native_logprobs(spelling: TokenSpelling, scores: TokenLogprobs) -> dict[str, Any]:
    """`{logprob, top_logprobs: [{token, token_id, logprob}]}`, for an event of /generate."""
    scores = floored(scores)
    ranked = zip(scores.top_ids, scores.top_logprobs, strict=True)
    top = [{"token": spelling.text_of(one), "token_id": one, "logprob": value} for one, value in ranked]
    return {"logprob": scores.logprob, "top_logprobs": top}
