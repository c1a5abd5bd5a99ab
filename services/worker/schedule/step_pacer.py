"""How many prompt tokens a step may carry beside running streams. Pure: what steps took in, allowances out.

The allowance is the number of tokens for which a step is expected (`step_times`) to stay below

    max(ITL target, FACTOR x decode part, SHORT_S)    beside streams, MIN_CHUNK tokens at least, so that prompts advance
    STEP_S                                            without any, so that arrivals and cancels are heard soon enough;
                                                      half as much again where that ends the prompt

While every step carries prompt tokens nobody sees what a step without would take, so one in PROBE_EVERY carries none.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from kvfleet.worker.schedule.step_memory import TokenBudget
from kvfleet.worker.schedule.step_times import StepTimes

FACTOR = 2.5
SHORT_S = 0.004  # no reader minds
STEP_S = 1.0
MIN_CHUNK = 16
MIN_LONE_CHUNK = 256
REST = 1.5  # of what a step without streams carries: a prompt with that much left is not cut once more
PROBE_EVERY = 16


@dataclass(slots=True)
class Allowance:
    """One step's: `tokens` at most, and `seconds` of prompt work. `least` tokens are granted whatever they take.
    A token takes `base` seconds at position 0, and each position adds `slope`."""

    tokens: int
    seconds: float
    least: int
    base: float = 0.0
    slope: float = 0.0
    rest: float = 1.0

    def grant(self, position: int, remaining: int = 1) -> int:
        """How many of `remaining` tokens of a prompt at `position` may be fed now; 0 for any if 0 at position 0."""
        granted = self._grant(position)
        return min(remaining, self.tokens if remaining <= granted * self.rest else granted)

    def _grant(self, position: int) -> int:
        at_position = self.base + self.slope * position
        if self.tokens <= 0:
            return 0
        if self.seconds == inf or not at_position:
            return self.tokens
        if self.seconds <= 0:
            return min(self.least, self.tokens)
        # n x at_position + slope x n^2 / 2 = seconds
        root = sqrt(at_position * at_position + 2 * self.slope * self.seconds)
        return min(self.tokens, max(self.least, int(2 * self.seconds / (at_position + root))))

    def spend(self, position: int, tokens: int) -> None:
        self.tokens -= tokens
        self.least = max(0, self.least - tokens)
        self.seconds -= tokens * (self.base + self.slope * (position + tokens / 2))


class StepPacer:
    """`max_tokens` of a step at most; `itl_target_s` 0 paces by FACTOR alone."""

    def __init__(self, max_tokens: int, itl_target_s: float = 0.0) -> None:
        self.budget = TokenBudget(max_tokens)
        self.itl_target_s = itl_target_s
        self.times = StepTimes()
        self._mixed_in_row = 0
        self._has_clock = False  # a step has taken time

    def allowance(self, decodes: int) -> Allowance:
        """For a step in which so many streams decode."""
        tokens = max(1, self.budget.tokens - decodes)
        base, slope = self.times.prompt_cost
        if not decodes:
            return Allowance(tokens, STEP_S if base else inf, MIN_LONE_CHUNK, base, slope, REST)
        decode_seconds = self.times.decode_seconds
        if not decode_seconds:  # nothing to compare with yet: see first, if there is a clock to see with
            return Allowance(0 if self._has_clock else tokens, inf, 0)
        if self._mixed_in_row >= PROBE_EVERY - 1:
            return Allowance(0, 0.0, 0, base, slope)
        limit = max(self.itl_target_s, FACTOR * decode_seconds, SHORT_S)
        if not base:
            return Allowance(min(tokens, MIN_CHUNK), inf, MIN_CHUNK)
        return Allowance(tokens, limit - decode_seconds, MIN_CHUNK, base, slope)

    def observe(self, decodes: int, prompt_tokens: int, position_sum: float, seconds: float, now: float = 0.0) -> None:
        """As `StepTimes.observe`, of every step once."""
        if decodes or prompt_tokens:
            self.budget.fitted()
        if seconds > 0:
            self._has_clock = True
            if decodes:
                self._mixed_in_row = self._mixed_in_row + 1 if prompt_tokens else 0
        self.times.observe(decodes, prompt_tokens, position_sum, seconds, now)
