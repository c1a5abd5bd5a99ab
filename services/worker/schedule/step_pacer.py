"""How many tokens a step may carry, and what becomes of one that does not fit. Pure: what steps took in, limits out.

The allowance is the number of tokens for which a step is expected (`step_times`) to stay below

    max(ITL target, FACTOR x decode part, SHORT_S)    beside streams, MIN_CHUNK tokens at least, so that prompts advance
    STEP_S                                            without any, so that arrivals and cancels are heard soon enough;
                                                      half as much again where that ends the prompt

While every step carries prompt tokens nobody sees what a step without would take, so one in PROBE_EVERY carries none.

A step that does not fit into memory is computed in parts, and later steps are smaller:

    run [a b c d] ──does not fit──▶ run [a b], run [c d] ──does not fit──▶ run [c], run [d's first half], [the second]

Nothing is given up for it but a single token that does not fit alone: its sequence fails, whatever runs beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt

from kvfleet.worker.schedule.step_plan import Drawn, Slice
from kvfleet.worker.schedule.step_times import StepTimes
from kvproto.errors import KvfleetError, OutOfMemory

logger = logging.getLogger(__name__)

FACTOR = 2.5
SHORT_S = 0.004  # no reader minds
STEP_S = 1.0
MIN_CHUNK = 16
MIN_LONE_CHUNK = 256
REST = 1.5  # of what a step without streams carries: a prompt with that much left is not cut once more
PROBE_EVERY = 16
LEAST_TOKENS = 16
RECOVER_STEPS = 64  # that fit, until a step may be larger again
GROWTH = 1.25

Run = Callable[[Items[Slice]], list[Drawn]]


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


class TokenBudget:
    """`tokens` of a step at most: `most`, less after a step that did not fit; that comes back step by step."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self._fitted = 0

    def too_much(self, tokens: int) -> None:
        """A step of so many did not fit."""
        self.tokens = max(min(LEAST_TOKENS, self.most), min(self.tokens, tokens // 2))
        self._fitted = 0

    def fitted(self) -> None:
        """A step was computed."""
        if self.tokens == self.most:
            return
        self._fitted += 1
        if self._fitted == RECOVER_STEPS:
            self._fitted = 0
            self.tokens = min(self.most, int(self.tokens * GROWTH) + 1)


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


def run_step(run: Run, slices: Items[Slice], budget: TokenBudget) -> list[Drawn]:
    """Draws of the slices, in order; OutOfMemory in place of one whose token does not fit alone. While the budget is
    smaller than it was, what is more than that is not tried in one pass."""
    tokens = sum(len(part.ids) for part in slices)
    if budget.most > budget.tokens < tokens:
        return _in_halves(run, slices, OutOfMemory(f"a step of {tokens} tokens is too large for now"))
    try:
        return run(slices)
    except OutOfMemory as error:
        logger.warning("a step of %d tokens ran out of memory, it is computed in parts: %s", tokens, error)
        budget.too_much(tokens)
        return _in_halves(run, slices, error)


def _run(run: Run, slices: Items[Slice]) -> list[Drawn]:
    try:
        return run(slices)
    except OutOfMemory as error:
        return _in_halves(run, slices, error)


def _in_halves(run: Run, slices: Items[Slice], error: OutOfMemory) -> list[Drawn]:
    if len(slices) > 1:
        ends = list(accumulate(len(part.ids) for part in slices))
        at = next(at for at, end in enumerate(ends, 1) if 2 * end >= ends[-1])
        at = min(at, len(slices) - 1)
        return _run(run, slices[:at]) + _run(run, slices[at:])
    (whole,) = slices
    middle = len(whole.ids) // 2
    if not middle:
        return [error]
    (first,) = _run(run, [Slice(whole.ids[:middle], whole.start, whole.blocks, None)])
    if isinstance(first, KvfleetError):
        return [first]
    return _run(run, [Slice(whole.ids[middle:], whole.start + middle, whole.blocks, whole.draw)])
