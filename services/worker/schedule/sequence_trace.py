"""What a traced sequence came to inside the engine: timestamps and counts. Plain state, of no meaning to decisions.

The engine's thread fills it; the loop reads it once the sequence has ended, and makes spans of it. Times are of the
engine's clock. Sequences that are not traced have none, and nothing here is touched per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvproto.messages import Tier


@dataclass(frozen=True, slots=True)
class Restored:
    """One tier's part of one restore; `blocks` came of `wanted`."""

    tier: Tier
    began: float
    ended: float
    wanted: int
    blocks: int
    nbytes: int
    failure: str = ""


@dataclass(slots=True)
class SequenceTrace:
    enqueued: float | None = None
    admitted: float | None = None  # into the first step that it runs in
    prefilled: float | None = None  # its first new token was drawn
    ended: float | None = None
    chunks: int = 0  # of prompt, and of what was computed anew after a preemption
    fed_tokens: int = 0  # in them
    drawn_tokens: int = 0  # by this attempt
    steps: int = 0  # of the engine between the first token and the end
    preemptions: int = 0
    restores: list[Restored] = field(default_factory=list)
    steps_before: int = 0  # the engine's count at the first token

    def drawn(self, now: float, steps: int) -> None:
        self.prefilled, self.steps_before = now, steps

    def leaves(self, now: float, steps: int, tokens: int) -> None:
        self.ended, self.drawn_tokens = now, tokens
        if self.prefilled is not None:
            self.steps = steps - self.steps_before
