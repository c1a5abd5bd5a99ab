"""What becomes of a step that does not fit into memory: it is computed in parts, and later steps are smaller. Pure.

    run [a b c d] ──does not fit──▶ run [a b], run [c d] ──does not fit──▶ run [c], run [d's first half], [the second]

Nothing is given up for it but a single token that does not fit alone: its sequence fails, whatever runs beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import accumulate

from kvfleet.worker.schedule.step_plan import Drawn, Slice
from kvproto.errors import KvfleetError, OutOfMemory

logger = logging.getLogger(__name__)

LEAST_TOKENS = 16
RECOVER_STEPS = 64  # that fit, until a step may be larger again
GROWTH = 1.25

Run = Callable[[Items[Slice]], list[Drawn]]


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
