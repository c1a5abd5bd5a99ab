"""How far what the index says of a worker can be believed, from what its requests really found. Pure.

    exact ──a fifth of what was expected is missing──▶ approximate: believed in proportion
      ▲                                                    │ ▲
      └── expectations come true, or time passes ──────────┘ └──▶ load only: three fifths missing, believed nothing

A worker that is not believed is still given requests, for its load's sake, and what they find is compared all the same:
so it comes back by itself. What is held against it fades with time too, in case it is given none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

NEWEST = 0.1  # weight of one request
FADE_S = 60.0
APPROXIMATE_ABOVE, EXACT_BELOW = 0.2, 0.1
LOAD_ONLY_ABOVE, APPROXIMATE_BELOW = 0.6, 0.4
LEAST_REQUESTS = 5  # before anything is concluded


class Belief(Enum):
    EXACT = "exact"
    APPROXIMATE = "approximate"
    LOAD_ONLY = "load_only"


@dataclass(slots=True)
class Experience:
    """With one life of one worker."""

    missing: float = 0.0  # mean share of the expected tokens that was not there
    requests: int = 0
    belief: Belief = Belief.EXACT
    updated_at: float = 0.0
    predicted_tokens_total: int = 0
    missing_tokens_total: int = 0
    unpredicted_tokens_total: int = 0


class Feedback:
    """Owned by the core. `now` never goes back."""

    def __init__(self) -> None:
        self.of: dict[str, Experience] = {}

    def forget(self, worker: str) -> None:
        self.of.pop(worker, None)

    def observe(self, worker: str, predicted: int, actual: int, now: float) -> float:
        """A request that was said to find `predicted` tokens found `actual`; returns the worker's credit now."""
        known = self.of.setdefault(worker, Experience(updated_at=now))
        self._fade(known, now)
        known.unpredicted_tokens_total += max(actual - predicted, 0)
        if predicted > 0:
            missing = max(predicted - actual, 0)
            known.predicted_tokens_total += predicted
            known.missing_tokens_total += missing
            known.missing += NEWEST * (missing / predicted - known.missing)
            known.requests += 1
        return self._judge(known)

    def tick(self, now: float) -> dict[str, float]:
        """Credits of those who are not fully believed."""
        changed = {}
        for worker, known in self.of.items():
            if known.belief is not Belief.EXACT:
                self._fade(known, now)
                changed[worker] = self._judge(known)
        return changed

    def belief(self, worker: str) -> Belief:
        known = self.of.get(worker)
        return Belief.EXACT if known is None else known.belief

    def _fade(self, known: Experience, now: float) -> None:
        known.missing *= math.exp((known.updated_at - now) / FADE_S)
        known.updated_at = now

    def _judge(self, known: Experience) -> float:
        missing = known.missing if known.requests >= LEAST_REQUESTS else 0.0
        if known.belief is Belief.LOAD_ONLY and missing < APPROXIMATE_BELOW:
            known.belief = Belief.APPROXIMATE
        if known.belief is Belief.APPROXIMATE and missing < EXACT_BELOW:
            known.belief = Belief.EXACT
        if missing > LOAD_ONLY_ABOVE:
            known.belief = Belief.LOAD_ONLY
        elif missing > APPROXIMATE_ABOVE and known.belief is Belief.EXACT:
            known.belief = Belief.APPROXIMATE
        return {Belief.EXACT: 1.0, Belief.APPROXIMATE: 1.0 - missing, Belief.LOAD_ONLY: 0.0}[known.belief]
