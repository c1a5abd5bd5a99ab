"""What is asked of a sampler, and its answer, for one row of logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvproto.errors import KvfleetError
from kvproto.messages import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from kvsampling.grammar import Matcher


NOT_FINITE = "the model computed logits that are not finite"
ALL_BANNED = "every token is banned: none can be drawn"


@dataclass(slots=True)
class Draw:
    """How to draw the next token: its random number depends on (sampling.seed, choice, index) alone. `prompt_ids` and
    `output_ids` are for penalties and a grammar, else empty; `output_ids` is the sequence's own, which grows.

    It never changes; freezing it would cost three times as much.
    """

    sampling: Sampling
    choice: int
    index: int
    prompt_ids: Items[int] = ()
    output_ids: Items[int] = ()
    banned: Items[int] = ()
    matcher: Matcher | None = None  # follows `output_ids`
    candidates: int = 0  # the most probable tokens, so many, instead of one: for beam search


@dataclass(frozen=True, slots=True)
class Scored:
    token: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most probable tokens, best first. `scores` are log probabilities, changed as the request asks; `logprobs` the
    model's own, where those are asked for, beside the `top` of all tokens."""

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    top: TokenLogprobs | None = None

    def logprobs_of(self, at: int) -> TokenLogprobs | None:
        return None if self.top is None else replace(self.top, logprob=self.logprobs[at])


# A token or candidates, why this sequence cannot have one, or: nothing was to be drawn.
Drawn = int | Scored | Candidates | KvfleetError | None


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Scores of a prompt's tokens, and what was drawn after them."""

    logprobs: tuple[TokenLogprobs, ...]
    drawn: int | Scored | Candidates | None


Ran = Drawn | ScoredPrompt  # what came of one sequence's part of a step
