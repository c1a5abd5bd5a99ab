"""How far the index is believed about a worker, from what its requests really found. Pure.

exact ──a fifth of what was expected is missing──▶ approximate: believed in proportion
  ▲                                                    │ ▲
  └── expectations come true, or time passes ──────────┘ └──▶ load only: three fifths missing, believed nothing
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
    """With one life of one worker. `now` never goes back."""

    missing: float = 0.0  # mean share of the expected tokens that was not there
    requests: int = 0
    belief: Belief = Belief.EXACT
    updated_at: float = 0.0
    predicted_tokens_total: int = 0
    missing_tokens_total: int = 0
    unpredicted_tokens_total: int = 0

    def observe(self, predicted: int, actual: int, now: float) -> float:
        """A request that should find `predicted` tokens found `actual`; returns the worker's credit now."""
        self._fade(now)
        self.unpredicted_tokens_total += max(actual - predicted, 0)
        if predicted > 0:
            missing = max(predicted - actual, 0)
            self.predicted_tokens_total += predicted
            self.missing_tokens_total += missing
            self.missing += NEWEST * (missing / predicted - self.missing)
            self.requests += 1
        return self._judge()

    def heal(self, now: float) -> float:
        """Returns the worker's credit now."""
        self._fade(now)
        return self._judge()

    def _fade(self, now: float) -> None:
        self.missing *= math.exp((self.updated_at - now) / FADE_S)
        self.updated_at = now

    def _judge(self) -> float:
        missing = self.missing if self.requests >= LEAST_REQUESTS else 0.0
        if self.belief is Belief.LOAD_ONLY and missing < APPROXIMATE_BELOW:
            self.belief = Belief.APPROXIMATE
        if self.belief is Belief.APPROXIMATE and missing < EXACT_BELOW:
            self.belief = Belief.EXACT
        if missing > LOAD_ONLY_ABOVE:
            self.belief = Belief.LOAD_ONLY
        elif missing > APPROXIMATE_ABOVE and self.belief is Belief.EXACT:
            self.belief = Belief.APPROXIMATE
        return {Belief.EXACT: 1.0, Belief.APPROXIMATE: 1.0 - missing, Belief.LOAD_ONLY: 0.0}[self.belief]
