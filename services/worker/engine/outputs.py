"""What a step of the engine says to the outside. Pure: values that cross from the engine thread to the loop.

A sequence is one choice of one attempt at a request. Per accepted one: `SequenceStarted` once, `Tokens` any number of
times, then exactly one of `SequenceFinished` and `SequenceFailed`. One that fails before it is scheduled has no
`SequenceStarted`. An id is held back for as long as its text is (it may begin a stop string, or end within a
character), so no text is ever left without an id to travel with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvproto.errors import KvfleetError
from kvproto.messages import FinishReason, KvEvents, Tier, TierEvents, Tokens
from kvservice.event_log import IDLE_PERIOD_S, EventLog


@dataclass(frozen=True, slots=True)
class SequenceStarted:
    """First scheduled; `cached_tokens` were found in the pool: of several choices all but the first find there what
    that one computed. `prompt_tokens`: what the model saw at first, less than was asked where the prompt was
    truncated."""

    request: str
    attempt: int
    prompt_tokens: int
    cached_tokens: int
    queue_seconds: float
    choice: int = 0
    restored: dict[Tier, int] = field(default_factory=dict)  # of the cached tokens, those brought from below for it
    recomputed_tokens: int = 0  # of a continued attempt: prompt and outputs that an earlier one had computed already

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Of the prompt at most all, though a continued attempt may find its own outputs too. What was not brought from
        below was on the device."""
        hit, cached = min(self.cached_tokens, self.prompt_tokens), {}
        for tier, tokens in self.restored.items():
            if count := min(tokens, hit):
                cached[tier.value] = count
                hit -= count
        return {Tier.DEVICE.value: hit} | cached if hit else cached


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """Terminal. `output_tokens` includes those of earlier attempts; a stop token is not counted."""

    request: str
    attempt: int
    reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    choice: int = 0


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """Terminal. Cancelled sequences end with `kvproto.errors.Cancelled`."""

    request: str
    attempt: int
    error: KvfleetError
    choice: int = 0


SequenceOutput = SequenceStarted | Tokens | SequenceFinished | SequenceFailed


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, and what changed in each tier, in its order."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    changes: list[TierEvents] = field(default_factory=list)
    fed_tokens: int = 0  # tokens the model was run on
    prefill_tokens: int = 0  # those of them that belong to prompts
    sequences: int = 0  # that took part
    seconds: float = 0.0


class KvPublisher(EventLog):
    """What steps did to the worker's blocks, as events. Pure; one owner per worker: the loop.

        a step ran ──▶ one event at once                          (what waited leaves with it)
        nothing ran ──▶ changes wait ──`due`──▶ one event         (no sooner than 50 ms after the last)

    A step that ran nothing costs next to nothing (all it scheduled failed, say), so there may be thousands in a second:
    without the wait each could be a message.
    """

    def batch(self, results: Iterable[StepResult], now: float, *, hold: bool = True) -> KvEvents | None:
        """One event for what the steps changed, in their order; None if that is nothing, or if it waits. `hold` False:
        nothing waits, so every digest the engine may name has an event."""
        ran = False
        for result in results:
            ran = ran or result.sequences > 0
            self.note(result.changes)
        if ran or not hold or now >= self._last_at + IDLE_PERIOD_S:
            return self.flush(now)
        return None
