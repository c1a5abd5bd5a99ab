"""What is asked of a sampler, and its answer, for one row of logits. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Scored:
    token: int
    logprobs: TokenLogprobs


Drawn = int | Scored | KvfleetError | None  # a token, why this sequence cannot have one, or: nothing was to be drawn


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Scores of a prompt's tokens, and what was drawn after them."""

    logprobs: tuple[TokenLogprobs, ...]
    drawn: int | Scored | None


Ran = Drawn | ScoredPrompt  # what came of one sequence's part of a step
