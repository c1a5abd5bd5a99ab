"""How fast this engine really is, from its own steps. Pure.

Placement prices queues and prefills with these figures, so they must come from what steps took, not from settings.
"""

from __future__ import annotations

from collections import deque

WEIGHT = 0.2  # of the newest step
LEAST_SHARE = 0.1  # of a mixed step that counts as prefill, however quick it was
SIZEABLE = 64  # prompt tokens: a step of fewer is mostly what any step takes, and says little of long prompts
RECENT_STEPS = 64
RECENT_S = 10.0


class StepRates:
    """Exponentially weighted means over steps; 0 until measured. A mixed step counts as prefill for what it took
    longer than a decode step does. Steps of few prompt tokens count only until there is one of many."""

    def __init__(self) -> None:
        self._sizeable = False  # whether the prefill rate is one of steps of many tokens
        self._prefill_seconds_per_token = 0.0
        self._decode_seconds = 0.0
        self._decode_tokens = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1 / self._prefill_seconds_per_token if self._prefill_seconds_per_token else 0.0

    @property
    def decode_steps_per_s(self) -> float:
        return 1 / self._decode_seconds if self._decode_seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self._decode_tokens * self.decode_steps_per_s

    def observe(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """One step of so many prompt tokens and so many sequences that decoded."""
        if seconds <= 0:
            return
        if not prefill_tokens:
            if decode_tokens:
                self._decode_seconds = _mean(self._decode_seconds, seconds)
                self._decode_tokens = _mean(self._decode_tokens, float(decode_tokens))
            return
        sizeable = prefill_tokens >= SIZEABLE
        if sizeable and not self._sizeable:
            self._sizeable, self._prefill_seconds_per_token = True, 0.0
        elif self._sizeable and not sizeable:
            return
        share = seconds * prefill_tokens / (prefill_tokens + decode_tokens)
        if decode_tokens and self._decode_seconds:
            share = max(seconds - self._decode_seconds, LEAST_SHARE * seconds)
        self._prefill_seconds_per_token = _mean(self._prefill_seconds_per_token, share / prefill_tokens)


class StepTimes:
    """How long this engine may well be silent: the longest of its recent steps.

    Recent are the newest RECENT_STEPS of them, as far as they ended in the RECENT_S before the newest one ended; a long
    prefill thus tells readers to be patient for as long as the next one may look like it, and no longer.
    """

    def __init__(self) -> None:
        self._count = 0
        self._longest: deque[tuple[int, float, float]] = deque()  # (number, ended, seconds), each longer than the next

    @property
    def longest_s(self) -> float:
        """0 until there was a step."""
        return self._longest[0][2] if self._longest else 0.0

    def observe(self, now: float, seconds: float) -> None:
        """A step that took so long ended at `now`."""
        self._count += 1
        kept = self._longest
        while kept and kept[-1][2] <= seconds:
            kept.pop()
        kept.append((self._count, now, seconds))
        while kept[0][0] <= self._count - RECENT_STEPS or kept[0][1] < now - RECENT_S:
            kept.popleft()


def _mean(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
