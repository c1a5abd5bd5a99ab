"""How many prompt tokens a step may carry beside running streams. Pure: durations in, allowances out.

    seconds of a step  =  decode part  +  sum over prompt tokens of (base + slope x position)

The decode part is what steps without prompt tokens take; base and slope come from what steps with some took beyond it,
by a regression that forgets. The allowance is the number of tokens for which this stays below

    max(ITL target, FACTOR x decode part, SHORT_S)    beside streams, MIN_CHUNK tokens at least, so that prompts advance
    STEP_S                                            without any, so that arrivals and cancels are heard soon enough;
                                                      half as much again where that ends the prompt

While every step carries prompt tokens nobody sees what a step without would take, so one in PROBE_EVERY carries none.
Single outliers (another process had the cores) move an estimate by a bounded share; a change that lasts is followed.
"""

from __future__ import annotations

from math import inf, sqrt

from kvfleet.worker.schedule.step_memory import TokenBudget

FACTOR = 2.5
UNMEASURED_TOKENS_PER_S = 1000.0
SHORT_S = 0.004  # no reader minds
STEP_S = 1.0
MIN_CHUNK = 16
MIN_LONE_CHUNK = 256
REST = 1.5  # of what a step without streams carries: a prompt with that much left is not cut once more
TELLING = (
    64  # prompt tokens without streams from which on a step's seconds are theirs, not those of reading the weights
)
PROBE_EVERY = 16
DECODE_WEIGHT = 0.3  # of the newest decode step
KEPT = 0.96  # share of the past that each step with prompt tokens leaves
SURE_AFTER = 3  # observations from which on a wild one is cut
LEAST_SHARE = 0.05  # of a mixed step that counts as its prompt tokens', however quick it was
POSITION_SPREAD = 64.0  # positions closer together than that tell little about the slope


class Allowance:
    """One step's: `tokens` at most, and `seconds` of prompt work. `least` tokens are granted whatever they take."""

    __slots__ = ("_base", "_rest", "_slope", "least", "seconds", "tokens")

    def __init__(
        self, tokens: int, seconds: float, least: int, base: float, slope: float, *, rest: float = 1.0
    ) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.least = min(least, tokens)
        self._base = base
        self._slope = slope
        self._rest = rest

    def grant(self, position: int, remaining: int = 1) -> int:
        """How many of `remaining` tokens of a prompt at `position` may be fed now; 0 for any if 0 at position 0."""
        granted = self._grant(position)
        return min(remaining, self.tokens if remaining <= granted * self._rest else granted)

    def _grant(self, position: int) -> int:
        at_position = self._base + self._slope * position
        if self.tokens <= 0:
            return 0
        if self.seconds == inf or not at_position:
            return self.tokens
        if self.seconds <= 0:
            return self.least
        # n x at_position + slope x n^2 / 2 = seconds
        root = sqrt(at_position * at_position + 2 * self._slope * self.seconds)
        return min(self.tokens, max(self.least, int(2 * self.seconds / (at_position + root))))

    def spend(self, position: int, tokens: int) -> None:
        self.tokens -= tokens
        self.least = max(0, self.least - tokens)
        self.seconds -= tokens * (self._base + self._slope * (position + tokens / 2))


class StepPacer:
    """`max_tokens` of a step at most; `itl_target_s` 0 paces by FACTOR alone."""

    def __init__(self, max_tokens: int, itl_target_s: float = 0.0) -> None:
        self.budget = TokenBudget(max_tokens)
        self.itl_target_s = itl_target_s
        self._decode_seconds = 0.0
        self._decodes = 0
        self._mixed_in_row = 0
        self._observed = 0
        # sums over steps with prompt tokens: weight, mean position, its square, seconds per token, their product
        self._n = self._p = self._pp = self._s = self._sp = 0.0

    @property
    def decode_seconds(self) -> float:
        """Of a step without prompt tokens; 0 until measured."""
        return self._decode_seconds

    def allowance(self, decodes: int) -> Allowance:
        """For a step in which so many streams decode."""
        tokens = max(1, self.budget.tokens - decodes)
        base, slope = self._cost()
        if not decodes:
            return Allowance(tokens, STEP_S if base else inf, MIN_LONE_CHUNK, base, slope, rest=REST)
        if not self._decode_seconds:  # nothing to compare with yet: see first, if there is a clock to see with
            return Allowance(0 if self._observed else tokens, inf, 0, 0.0, 0.0)
        if self._mixed_in_row >= PROBE_EVERY - 1:
            return Allowance(0, 0.0, 0, base, slope)
        limit = max(self.itl_target_s, FACTOR * self._decode_seconds, SHORT_S)
        if not base:
            return Allowance(min(tokens, MIN_CHUNK), inf, MIN_CHUNK, 0.0, 0.0)
        return Allowance(tokens, limit - self._decode_seconds, MIN_CHUNK, base, slope)

    def seconds(self, position: int, tokens: int) -> float:
        """What so many prompt tokens from a position on are expected to take."""
        base, slope = self._cost()
        return tokens * (base + slope * (position + tokens / 2)) if base else tokens / UNMEASURED_TOKENS_PER_S

    def observe(self, decodes: int, prompt_tokens: int, position_sum: float, seconds: float) -> None:
        """A step took `seconds`; `position_sum` is that of its prompt tokens' positions."""
        if decodes or prompt_tokens:
            self.budget.fitted()
        if seconds <= 0:
            return
        self._observed += 1
        if not prompt_tokens:
            if decodes:
                self._observe_decodes(decodes, seconds)
            return
        if not decodes and prompt_tokens < TELLING:
            return
        if decodes:
            self._mixed_in_row += 1
            seconds = max(seconds - self._decode_seconds, LEAST_SHARE * seconds)
        self._observe_prompts(position_sum / prompt_tokens, seconds / prompt_tokens)

    def _observe_decodes(self, decodes: int, seconds: float) -> None:
        self._mixed_in_row = 0
        known = self._decode_seconds
        if not known or not self._decodes / 2 <= decodes <= self._decodes * 2:
            self._decode_seconds, self._decodes = seconds, decodes
            return
        seconds = min(max(seconds, known / 2), known * 2)
        self._decode_seconds = known + DECODE_WEIGHT * (seconds - known)
        self._decodes = decodes

    def _observe_prompts(self, position: float, per_token: float) -> None:
        if self._n >= SURE_AFTER:
            base, slope = self._cost()
            expected = base + slope * position
            per_token = min(max(per_token, expected / 3), expected * 3)
        self._n = KEPT * self._n + 1
        self._p = KEPT * self._p + position
        self._pp = KEPT * self._pp + position * position
        self._s = KEPT * self._s + per_token
        self._sp = KEPT * self._sp + position * per_token

    def _cost(self) -> tuple[float, float]:
        """Seconds of a prompt token at position 0, and what each position adds. 0 until measured, then positive."""
        if not self._n:
            return 0.0, 0.0
        position, mean = self._p / self._n, self._s / self._n
        variance = max(self._pp / self._n - position * position, 0.0)
        together = self._sp / self._n - position * mean
        slope = max(together / (variance + POSITION_SPREAD * POSITION_SPREAD), 0.0)
        base = mean - slope * position
        if base < mean / 5:  # prompts begin at position 0, and there it costs something too
            base = mean / 5
            slope = (mean - base) / position if position else 0.0
        return base, slope
