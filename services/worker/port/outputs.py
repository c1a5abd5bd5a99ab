"""What a step hands from the engine thread to the loop. Pure.

Per sequence: `SequenceStarted` once it is scheduled, `PromptScores` where they are asked for, `Tokens` any number of
times, then exactly one of `ChoiceFinished` and `SequenceFailed`. An id is held back for as long as its text is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvproto.errors import KvfleetError
from kvproto.messages import ChoiceFinished, KvEvents, PromptScores, Tier, TierEvents, Tokens
from kvservice.event_log import IDLE_PERIOD_S, EventLog


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """First scheduled. Of several choices all but the first find cached what that one computed. `prompt_tokens` are
    those of the request less what was truncated."""

    request: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    choice: int = 0
    restored: dict[Tier, int] = field(default_factory=dict)  # cached tokens brought from below for it
    recomputed_tokens: int = 0  # of a continued attempt: prompt and outputs computed again
    saved_s: float = 0.0  # of restoring, done while its conversation paused

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """At most the prompt, though a continued attempt may find its own outputs too."""
        hit, cached = min(self.cached_tokens, self.prompt_tokens), {}
        for tier, tokens in self.restored.items():
            if count := min(tokens, hit):
                cached[tier.value] = count
                hit -= count
        return {Tier.DEVICE.value: hit} | cached if hit else cached


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """Terminal. Cancelled sequences end with `kvproto.errors.Cancelled`."""

    request: str
    attempt: int
    error: KvfleetError
    choice: int = 0


SequenceOutput = SequenceStarted | PromptScores | Tokens | ChoiceFinished | SequenceFailed


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: list[SequenceOutput] = field(default_factory=list)
    changes: list[TierEvents] = field(default_factory=list)
    fed_tokens: int = 0
    prefill_tokens: int = 0  # of the fed tokens
    sequences: int = 0
    seconds: float = 0.0


class KvPublisher(EventLog):
    """What steps did to the worker's blocks, as events. Pure; the loop owns it.

        a step ran ──▶ one event at once                          (what waited leaves with it)
        nothing ran ──▶ changes wait ──`due`──▶ one event         (no sooner than 50 ms after the last)

    There may be thousands of steps in a second that ran nothing: without the wait each could be a message.
    """

    def batch(self, results: Iterable[StepResult], now: float, *, hold: bool = True) -> KvEvents | None:
        """One event, or None if nothing changed or the changes wait. `hold` False: nothing waits, so every digest that
        the engine may name has an event."""
        ran = False
        for result in results:
            ran = ran or result.sequences > 0
            self.note(result.changes)
        if ran or not hold or now >= self._last_at + IDLE_PERIOD_S:
            return self.flush(now)
        return None
