"""Rates of a fleet and its workers, from the growth of their counters between two answers. Pure.

A worker's new life starts its counters at 0, so it adds nothing until its second sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HIT_WINDOW_S = 60.0
TOKENS_WINDOW_S = 5.0
COUNTERS = ("prompt_tokens_total", "hit_tokens_total", "generated_tokens_total")

Counts = list[int]  # as COUNTERS


@dataclass(frozen=True, slots=True)
class Step:
    """Between two samples; `grown` is by worker."""

    at_s: float
    seconds: float
    grown: Mapping[str, Counts]


@dataclass(eq=False, slots=True)
class FleetRates:
    before: dict[tuple[str, str], Counts] = field(default_factory=dict)
    at_s: float | None = None
    steps: deque[Step] = field(default_factory=deque)

    def add(self, workers: Mapping[str, Mapping[str, Any]], at_s: float) -> None:
        now = {(worker, one["epoch"]): [int(one["load"][name]) for name in COUNTERS] for worker, one in workers.items()}
        if self.at_s is not None and at_s > self.at_s:
            grown = {}
            for life in now.keys() & self.before.keys():
                pairs = zip(self.before[life], now[life], strict=True)
                grown[life[0]] = [max(new - old, 0) for old, new in pairs]
            self.steps.append(Step(at_s, at_s - self.at_s, grown))
        self.before, self.at_s = now, at_s
        while self.steps and self.steps[0].at_s <= at_s - HIT_WINDOW_S:
            self.steps.popleft()

    def hit_rate(self, worker: str | None = None) -> float | None:
        """Share of prompt tokens found in a cache; None without such tokens or a second sample."""
        prompt, hit, _ = self._grown(self._within(HIT_WINDOW_S), worker)
        return min(hit / prompt, 1.0) if prompt else None

    def tokens_per_s(self, worker: str | None = None) -> float | None:
        """Generated tokens; None without a second sample."""
        steps = self._within(TOKENS_WINDOW_S)
        seconds = sum(step.seconds for step in steps)
        return self._grown(steps, worker)[2] / seconds if seconds else None

    def _within(self, window_s: float) -> list[Step]:
        """The last one always, even if samples are further apart than the window."""
        return [step for step in self.steps if step is self.steps[-1] or step.at_s > self.steps[-1].at_s - window_s]

    def _grown(self, steps: list[Step], worker: str | None) -> Counts:
        rows = [row for step in steps for name, row in step.grown.items() if worker in (None, name)]
        return [sum(column) for column in zip(*rows, strict=True)] or [0] * len(COUNTERS)
