"""What an answer tells of its prompt: its text, its tokens and their log probabilities. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from kvfleet.ingress.answers.openai_answers import CompletionLogprobs, PromptLogprobs, RankedLogprob
from kvfleet.ingress.prompts.tokenizer import TokenSpelling
from kvproto.codec import floored
from kvproto.messages import TokenLogprobs

TEXT_BYTES = 16  # of a character, in memory and in JSON, for which orjson takes 8
ID_BYTES = 80


def written(ids: Iterable[int]) -> Any:
    """As JSON: of a list's numbers orjson makes 256 bytes each, and keeps them."""
    return orjson.Fragment(b"[%b]" % b",".join(b"%d" % token for token in ids))


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """`text`, if any, begins each choice's, as do the log probabilities of its tokens, with `logprobs` alternatives;
    `ranked`: as many have those in a list of their own. `tells_ids`: of the prompt, and of each choice."""

    ids: tuple[int, ...]
    spelling: TokenSpelling
    text: str | None = None
    logprobs: int | None = None
    ranked: int | None = None
    tells_ids: bool = False

    @property
    def size(self) -> int:
        """Bytes of memory that a choice's answer takes for it, without the log probabilities."""
        return TEXT_BYTES * len(self.text or "") + (ID_BYTES * len(self.ids) if self.tells_ids else 0)

    def echoed(self, scores: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        """`scores` are of all tokens but the first."""
        if self.logprobs is None:
            return None
        text_of = self.spelling.text_of
        tokens = [text_of(token) for token in self.ids]
        values: list[float | None] = [None]
        tops: list[dict[str, float] | None] = [None]
        for token, one in zip(tokens[1:], map(floored, scores), strict=True):
            ranked = zip(one.top_ids[: self.logprobs], one.top_logprobs, strict=False)
            values.append(one.logprob)
            tops.append({text_of(top): value for top, value in ranked} | {token: one.logprob})
        return CompletionLogprobs(tokens, values, tops, self._offsets())

    def _offsets(self) -> list[int]:
        """Where each token begins in `text`. Those that the tokenizer put in front, which are not in it, begin at 0."""
        text, decoder = self.text or "", codecs.getincrementaldecoder("utf-8")("replace")
        ends, decoded = [0], 0
        for token in self.ids:
            decoded += len(decoder.decode(self.spelling.bytes_of(token)))
            ends.append(decoded)
        before = max(0, decoded - len(text))
        return [min(max(0, end - before), len(text)) for end in ends[:-1]]

    def listed(self, scores: Sequence[TokenLogprobs]) -> PromptLogprobs | None:
        """As vLLM's servers tell them: of each token, and of the most probable ones in its place."""
        if self.ranked is None:
            return None
        told: PromptLogprobs = [None]
        for token, one in zip(self.ids[1:], map(floored, scores), strict=True):
            tops = zip(one.top_ids[: self.ranked], one.top_logprobs, strict=False)
            entry = {str(token): self._ranked(token, one.logprob, one.rank)}
            for rank, (top, value) in enumerate(tops, 1):
                entry[str(top)] = self._ranked(top, value, rank)
            told.append(entry)
        return told

    def _ranked(self, token: int, logprob: float, rank: int) -> RankedLogprob:
        return RankedLogprob(logprob, rank, self.spelling.text_of(token))
