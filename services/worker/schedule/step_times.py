"""How long this engine's steps take, from what its own steps took. Pure: durations in, rates and predictions out.

    seconds of a step  =  decode part  +  sum over prompt tokens of (base + slope x position)

The decode part is what steps without prompt tokens take; base and slope come from what steps with some took beyond it,
by a regression that forgets. Single outliers (another process had the cores) move an estimate by a bounded share; a
change that lasts is followed. Placement prices queues and prefills with the rates, so they come from here as well.
"""

from __future__ import annotations

from collections import deque

UNMEASURED_TOKENS_PER_S = 1000.0
TELLING = 64  # prompt tokens from which on a step's seconds are theirs, not those of reading the weights
LEAST_SHARE = 0.05  # of a mixed step that counts as its prompt tokens', however quick it was
DECODE_WEIGHT = 0.3  # of the newest decode step
PREFILL_WEIGHT = 0.2  # of the newest step with prompt tokens, in the rate
KEPT = 0.96  # share of the past that each step with prompt tokens leaves, in the regression
SURE_AFTER = 3  # observations from which on a wild one is cut
POSITION_SPREAD = 64.0  # positions closer together than that tell little about the slope
RECENT_STEPS = 64
RECENT_S = 10.0


class LongestStep:
    """How long this engine may well be silent: the longest of its recent steps.

    Recent are the newest RECENT_STEPS of them, as far as they ended in the RECENT_S before the newest one ended; a long
    prefill thus tells readers to wait for as long as the next one may look like it, and no longer.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # (ended, seconds)

    @property
    def seconds(self) -> float:
        """0 until there was a step."""
        return max((took for ended, took in self._steps if ended >= self._steps[-1][0] - RECENT_S), default=0.0)

    def observe(self, now: float, seconds: float) -> None:
        """A step that took so long ended at `now`."""
        self._steps.append((now, seconds))


class StepTimes:
    """All estimates are 0 until measured."""

    def __init__(self) -> None:
        self.longest = LongestStep()
        self.decode_seconds = 0.0  # of a step without prompt tokens
        self._decodes = 0  # in the newest of these
        self._mean_decodes = 0.0
        self._prefill_seconds_per_token = 0.0
        self._has_told = False  # whether that is of steps of many tokens
        # sums over steps with prompt tokens: weight, mean position, its square, seconds per token, their product
        self._n = self._p = self._pp = self._s = self._sp = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Steps of few prompt tokens count only until there is one of many."""
        return 1 / self._prefill_seconds_per_token if self._prefill_seconds_per_token else 0.0

    @property
    def decode_steps_per_s(self) -> float:
        return 1 / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self._mean_decodes * self.decode_steps_per_s

    @property
    def prompt_cost(self) -> tuple[float, float]:
        """Seconds of a prompt token at position 0, and what each position adds. Positive once measured."""
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

    def prompt_seconds(self, position: int, tokens: int) -> float:
        """What so many prompt tokens from a position on are expected to take."""
        base, slope = self.prompt_cost
        return tokens * (base + slope * (position + tokens / 2)) if base else tokens / UNMEASURED_TOKENS_PER_S

    def observe(self, decodes: int, prompt_tokens: int, position_sum: float, seconds: float, now: float = 0.0) -> None:
        """A step of so many sequences that decoded and so many prompt tokens took `seconds` and ended at `now`.
        `position_sum` is that of the prompt tokens' positions."""
        if decodes or prompt_tokens:
            self.longest.observe(now, seconds)
        if seconds <= 0:
            return
        if not prompt_tokens:
            if decodes:
                self._observe_decodes(decodes, seconds)
            return
        if decodes and self.decode_seconds:
            seconds = max(seconds - self.decode_seconds, LEAST_SHARE * seconds)
        elif decodes:
            seconds *= prompt_tokens / (prompt_tokens + decodes)
        self._observe_prefill(prompt_tokens, seconds / prompt_tokens)
        if decodes or prompt_tokens >= TELLING:
            self._observe_prompts(position_sum / prompt_tokens, seconds / prompt_tokens)

    def _observe_decodes(self, decodes: int, seconds: float) -> None:
        known, before, self._decodes = self.decode_seconds, self._decodes, decodes
        if not known or not before / 2 <= decodes <= before * 2:
            self.decode_seconds, self._mean_decodes = seconds, float(decodes)
            return
        seconds = min(max(seconds, known / 2), known * 2)
        self.decode_seconds = known + DECODE_WEIGHT * (seconds - known)
        self._mean_decodes += DECODE_WEIGHT * (decodes - self._mean_decodes)

    def _observe_prefill(self, tokens: int, per_token: float) -> None:
        is_first = not self._prefill_seconds_per_token
        if tokens >= TELLING and not self._has_told:
            self._has_told = is_first = True
        elif self._has_told and tokens < TELLING:
            return
        weight = 1.0 if is_first else PREFILL_WEIGHT
        self._prefill_seconds_per_token += weight * (per_token - self._prefill_seconds_per_token)

    def _observe_prompts(self, position: float, per_token: float) -> None:
        if self._n >= SURE_AFTER:
            base, slope = self.prompt_cost
            expected = base + slope * position
            per_token = min(max(per_token, expected / 3), expected * 3)
        self._n = KEPT * self._n + 1
        self._p = KEPT * self._p + position
        self._pp = KEPT * self._pp + position * position
        self._s = KEPT * self._s + per_token
        self._sp = KEPT * self._sp + position * per_token
