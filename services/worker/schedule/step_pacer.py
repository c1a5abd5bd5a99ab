"""How many tokens a step may carry, from measured step times, and how a step that does not fit is split. Pure.

    seconds of a step  =  decode part  +  sum over prompt tokens of (base + slope x position)

Steps without prompt tokens give the decode part; a regression that forgets over the others gives base and slope. An
outlier moves an estimate by a bounded share. A step should stay below

    max(ITL target, FACTOR x decode part, SHORT_S)    beside streams, with MIN_CHUNK tokens at least
    STEP_S                                            without streams, so that arrivals and cancels are heard soon;
                                                      REST times as much where that ends the prompt

One mixed step in PROBE_EVERY carries no prompt tokens, to measure the decode part. A step that does not fit into memory
is computed in parts, and later steps are smaller:

    run [a b c d] ──does not fit──▶ run [a b], run [c d] ──does not fit──▶ run [c], run [d's first half], [the second]

Only a sequence whose single token does not fit alone fails.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt

from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import KvfleetError, OutOfMemory
from kvproto.messages import Rates
from kvsampling.draw import Ran, ScoredPrompt

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

SPARE_SHARE = 0.05  # by which spare work may lengthen a step of others
SPARE_STEP_S = 0.04  # of a step that is of spare work alone, unless a single row takes that long
UNMEASURED_TOKENS_PER_S = 1000.0
TELLING = 64  # prompt tokens from which on their own cost dominates a step, not reading the weights
LEAST_SHARE = 0.05  # of a mixed step's seconds that its prompt tokens take at least
DECODE_WEIGHT = 0.3  # of the newest decode step
PREFILL_WEIGHT = 0.2  # of the newest step with prompt tokens, in the rate
KEPT = 0.96  # share of the past that each step with prompt tokens leaves, in the regression
SURE_AFTER = 3  # observations from which on a wild one is cut
POSITION_SPREAD = 64.0  # positions closer together than that tell little about the slope
ROWS_KEPT = 0.99  # share of the past that each step of decodes leaves, in the regression over rows
LEAST_VARIANCE = 0.25  # of rows, below which they tell nothing
MANY_ROWS = 4096
RECENT_STEPS = 64
RECENT_S = 10.0

Run = Callable[[Items[Slice]], list[Ran]]


class LongestStep:
    """The longest of the newest RECENT_STEPS steps that ended in the RECENT_S before the newest. Readers wait that
    long for an engine that is silent."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)  # (ended, seconds)

    @property
    def seconds(self) -> float:
        return max((took for ended, took in self._steps if ended >= self._steps[-1][0] - RECENT_S), default=0.0)

    def observe(self, now: float, seconds: float) -> None:
        self._steps.append((now, seconds))


class RowCost:
    """Seconds of a step without prompt tokens, as a line over its decodes, by a regression that forgets."""

    def __init__(self) -> None:
        self._n = self._x = self._xx = self._y = self._xy = 0.0
        self._known: tuple[float, float | None] = (0.0, None)  # the line, as steps of several sizes last told it

    def observe(self, decodes: int, seconds: float) -> None:
        if self._n >= SURE_AFTER:
            seconds = min(seconds, 3 * self._y / self._n)
        self._n = ROWS_KEPT * self._n + 1
        self._x = ROWS_KEPT * self._x + decodes
        self._xx = ROWS_KEPT * self._xx + decodes * decodes
        self._y = ROWS_KEPT * self._y + seconds
        self._xy = ROWS_KEPT * self._xy + decodes * seconds

    def more_rows(self, decodes: int, share: float) -> int:
        """How many more such a step may have and take that share longer. One until steps of several sizes were seen, to
        see them."""
        base, slope = self._line()
        if slope is None:
            return 1
        expected = base + slope * decodes
        return MANY_ROWS if slope * MANY_ROWS <= share * expected else int(share * expected / slope)

    def rows_within(self, seconds: float) -> int:
        """How many a step may have and take so long, or half as long again as one of a single row."""
        base, slope = self._line()
        if slope is None:
            return MANY_ROWS
        seconds = max(seconds, 1.5 * (base + slope))
        return MANY_ROWS if base + slope * MANY_ROWS <= seconds else max(1, int((seconds - base) / slope))

    def _line(self) -> tuple[float, float | None]:
        """Base and slope; None: not known yet."""
        if self._n:
            x, y = self._x / self._n, self._y / self._n
            variance = self._xx / self._n - x * x
            if variance >= LEAST_VARIANCE:
                slope = max((self._xy / self._n - x * y) / variance, 0.0)
                self._known = max(y - slope * x, 0.0), slope
        return self._known


class StepTimes:
    """All estimates are 0 until measured."""

    def __init__(self) -> None:
        self.longest = LongestStep()
        self.rows = RowCost()
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

    def rates(self, restored: dict[str, float]) -> Rates:
        """`restored`: bytes per second by tier."""
        steps, tokens = self.decode_steps_per_s, self.decode_tokens_per_s
        return Rates(self.prefill_tokens_per_s, steps, tokens, restored, self.longest.seconds)

    @property
    def prompt_cost(self) -> tuple[float, float]:
        """Base and slope, in seconds. The base is positive once measured."""
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
        base, slope = self.prompt_cost
        return tokens * (base + slope * (position + tokens / 2)) if base else tokens / UNMEASURED_TOKENS_PER_S

    def observe(self, decodes: int, prompt_tokens: int, position_sum: float, seconds: float, now: float = 0.0) -> None:
        """A step took `seconds` and ended at `now`. `position_sum`: of the prompt tokens' positions."""
        if decodes or prompt_tokens:
            self.longest.observe(now, seconds)
        if seconds <= 0:
            return
        if not prompt_tokens:
            if decodes:
                self.rows.observe(decodes, seconds)
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


@dataclass(slots=True)
class Allowance:
    """One step's `tokens` at most and `seconds` of prompt work. `least` tokens are granted whatever they take."""

    tokens: int
    seconds: float
    least: int
    base: float = 0.0
    slope: float = 0.0
    rest: float = 1.0

    def grant(self, position: int, remaining: int = 1) -> int:
        """How many of a prompt's `remaining` tokens at `position` may be fed; 0 at position 0 means 0 anywhere."""
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

    def cut(self, seconds: float, least: int) -> None:
        """No more than so long, and no prompt to its end for that."""
        self.seconds, self.least, self.rest = min(self.seconds, seconds), min(self.least, least), 1.0

    def spend(self, position: int, tokens: int) -> None:
        self.tokens -= tokens
        self.least = max(0, self.least - tokens)
        self.seconds -= tokens * (self.base + self.slope * (position + tokens / 2))


class TokenBudget:
    """Most `tokens` of a step: less than `most` after a step that did not fit, and growing back from there."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self._fitted = 0

    def too_much(self, tokens: int) -> None:
        self.tokens = max(min(LEAST_TOKENS, self.most), min(self.tokens, tokens // 2))
        self._fitted = 0

    def fitted(self) -> None:
        if self.tokens == self.most:
            return
        self._fitted += 1
        if self._fitted == RECOVER_STEPS:
            self._fitted = 0
            self.tokens = min(self.most, int(self.tokens * GROWTH) + 1)


class StepPacer:
    """`itl_target_s` 0 paces by FACTOR alone."""

    def __init__(self, max_tokens: int, itl_target_s: float = 0.0) -> None:
        self.budget = TokenBudget(max_tokens)
        self.itl_target_s = itl_target_s
        self.times = StepTimes()
        self._mixed_in_row = 0
        self._has_clock = False  # a step has taken time

    def allowance(self, decodes: int) -> Allowance:
        tokens = max(1, self.budget.tokens - decodes)
        base, slope = self.times.prompt_cost
        if not decodes:
            return Allowance(tokens, STEP_S if base else inf, MIN_LONE_CHUNK, base, slope, REST)
        decode_seconds = self.times.decode_seconds
        if not decode_seconds:  # measure a step without prompt tokens first, if the clock moves at all
            return Allowance(0 if self._has_clock else tokens, inf, 0)
        if self._mixed_in_row >= PROBE_EVERY - 1:
            return Allowance(0, 0.0, 0, base, slope)
        limit = max(self.itl_target_s, FACTOR * decode_seconds, SHORT_S)
        if not base:
            return Allowance(min(tokens, MIN_CHUNK), inf, MIN_CHUNK)
        return Allowance(tokens, limit - decode_seconds, MIN_CHUNK, base, slope)

    def spare_rows(self, others: int) -> int:
        """Rows of spare work that decode in a step with so many of others, and lengthen it by SPARE_SHARE."""
        rows = self.times.rows
        return rows.more_rows(others, SPARE_SHARE) if others else rows.rows_within(SPARE_STEP_S)

    def cut_for_spare(self, allowance: Allowance, decodes: int, *, beside_others: bool) -> None:
        """The step's prompts are of spare work."""
        if beside_others:
            allowance.cut(SPARE_SHARE * self.times.decode_seconds, least=0)
        else:
            allowance.cut(SPARE_STEP_S / 2 if decodes else SPARE_STEP_S, least=1)

    def observe(self, decodes: int, prompt_tokens: int, position_sum: float, seconds: float, now: float = 0.0) -> None:
        if decodes or prompt_tokens:
            self.budget.fitted()
        if seconds > 0:
            self._has_clock = True
            if decodes:
                self._mixed_in_row = self._mixed_in_row + 1 if prompt_tokens else 0
        self.times.observe(decodes, prompt_tokens, position_sum, seconds, now)


def run_step(run: Run, slices: Items[Slice], budget: TokenBudget) -> list[Ran]:
    """What came of the slices, in order; OutOfMemory in place of one whose token does not fit alone. A step above a
    reduced budget is not tried in one pass."""
    tokens = sum(len(part.ids) for part in slices)
    if budget.most > budget.tokens < tokens:
        return _in_halves(run, slices, OutOfMemory(f"a step of {tokens} tokens is too large for now"))
    try:
        return run(slices)
    except OutOfMemory as error:
        logger.warning("a step of %d tokens ran out of memory, it is computed in parts: %s", tokens, error)
        budget.too_much(tokens)
        return _in_halves(run, slices, error)


def _in_halves(run: Run, slices: Items[Slice], error: OutOfMemory) -> list[Ran]:
    def run_part(part: Items[Slice]) -> list[Ran]:
        try:
            return run(part)
        except OutOfMemory as error:
            return _in_halves(run, part, error)

    if len(slices) > 1:
        ends = list(accumulate(len(part.ids) for part in slices))
        at = next(at for at, end in enumerate(ends, 1) if 2 * end >= ends[-1])
        at = min(at, len(slices) - 1)
        return run_part(slices[:at]) + run_part(slices[at:])
    (whole,) = slices
    if len(whole.ids) < 2:
        return [error]
    halves = whole.halves()
    (first,) = run_part(halves[:1])
    if isinstance(first, KvfleetError):
        return [first]
    (second,) = run_part(halves[1:])
    return [_joined(first, second)]


def _joined(first: Ran, second: Ran) -> Ran:
    """Of two parts of one slice, of which the first drew nothing."""
    if not isinstance(first, ScoredPrompt) or isinstance(second, KvfleetError):
        return second
    rest = second if isinstance(second, ScoredPrompt) else ScoredPrompt((), second)
    return ScoredPrompt(first.logprobs + rest.logprobs, rest.drawn)
