"""Beam search, as vLLM's clients ask for it. Pure.

`best_of` is the number of beams, and `n` how many of them are returned; vLLM's newer servers know `n` alone, which is
then both. `early_stopping` has transformers' values. Beam search draws nothing, so what says how to draw is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

from kvfleet.ingress.requests.asks import MAX_CHOICES, SamplingAsk
from kvproto.errors import InvalidRequest
from kvproto.messages import Beams, EarlyStopping, Overflow
from kvservice.fields import Flag, Number, Whole

MAX_LENGTH_PENALTY = 10.0

_STOPPING = {False: EarlyStopping.FALSE, True: EarlyStopping.TRUE, "never": EarlyStopping.NEVER}


@dataclass(frozen=True, slots=True)
class BeamAsk:
    """Fields of a body."""

    use_beam_search: Flag = False
    best_of: Annotated[int, Whole(1, MAX_CHOICES)] | None = None
    length_penalty: Annotated[Number, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0
    early_stopping: Flag | Literal["never"] = False

    def bind(self, sampling: SamplingAsk) -> SamplingAsk:
        """Call it once all else of the sampling is known. Raises InvalidRequest naming the field."""
        n, best_of = sampling.n, self.best_of
        if not self.use_beam_search:
            if best_of not in (None, 1, n):
                raise InvalidRequest(f"without beam search only n, {n}, is supported, got {best_of}", field="best_of")
            for name, differs in (
                ("length_penalty", self.length_penalty != 1),
                ("early_stopping", self.early_stopping),
            ):
                if differs:
                    raise InvalidRequest("only allowed when use_beam_search is true", field=name)
            return sampling
        if best_of is not None and best_of < n:
            raise InvalidRequest(f"must be at least n, {n}, got {best_of}", field="best_of")
        for name, stands in _without_draws(sampling).items():
            if not stands:
                raise InvalidRequest("not available with use_beam_search", field=name)
        beams = Beams(best_of or n, self.length_penalty, _STOPPING[self.early_stopping])
        return replace(sampling, beams=beams)


NO_BEAMS = BeamAsk()


def _without_draws(asked: SamplingAsk) -> dict[str, bool]:
    """Whether each field is as it must be. A temperature of 0 or 1 changes nothing that is found."""
    grammar = {} if asked.grammar is None else {asked.grammar.said: False}
    return grammar | {
        "temperature": asked.temperature in (None, 0, 1),
        "top_p": asked.top_p in (None, 1),
        "top_k": asked.top_k in (None, 0),
        "min_p": asked.min_p == 0,
        "context_overflow": asked.overflow is not Overflow.SLIDING,
        "max_tokens": asked.max_tokens != 0,
        "prompt_logprobs": asked.prompt_logprobs is None,
    }
