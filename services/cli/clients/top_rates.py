"""What a fleet does now, from two of its answers: how workers' counters grew between them. Pure.

A worker's new life starts its counters anew, so growth is taken life by life: one that was not there before adds
nothing until its second sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HIT_WINDOW_S = 60.0
TOKENS_WINDOW_S = 5.0
COUNTERS = ("prompt_tokens_total", "hit_tokens_total", "generated_tokens_total")

Counts = tuple[int, int, int]  # as COUNTERS


@dataclass(frozen=True, slots=True)
class Step:
    """Between two samples: how long, and by worker by how much each counter grew."""

    at_s: float
    seconds: float
    grown: Mapping[str, Counts]


class FleetRates:
    """Of the last minute. Fed with what /workers says."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Counts] = {}
        self._at_s: float | None = None
        self._steps: deque[Step] = deque()

    def add(self, workers: Mapping[str, Mapping[str, Any]], at_s: float) -> None:
        now = {(worker, one["epoch"]): _counts(one["load"]) for worker, one in workers.items()}
        if self._at_s is not None and at_s > self._at_s:
            grown = {key[0]: _growth(self._before[key], counts) for key, counts in now.items() if key in self._before}
            self._steps.append(Step(at_s, at_s - self._at_s, grown))
        self._before, self._at_s = now, at_s
        while self._steps and self._steps[0].at_s <= at_s - HIT_WINDOW_S:
            self._steps.popleft()

    def hit_rate(self, worker: str | None = None) -> float | None:
        """The share of prompt tokens that were found in a cache; None: there were none, or no two samples yet."""
        prompt, hit, _ = self._grown(HIT_WINDOW_S, worker)
        return min(hit / prompt, 1.0) if prompt else None

    def tokens_per_s(self, worker: str | None = None) -> float | None:
        """Generated ones, of the last seconds; None: no two samples yet."""
        seconds = sum(step.seconds for step in self._within(TOKENS_WINDOW_S))
        return self._grown(TOKENS_WINDOW_S, worker)[2] / seconds if seconds else None

    def _within(self, window_s: float) -> list[Step]:
        """The last one always: samples may be further apart than the window is long."""
        if not self._steps:
            return []
        last = self._steps[-1]
        return [step for step in self._steps if step is last or step.at_s > last.at_s - window_s]

    def _grown(self, window_s: float, worker: str | None) -> Counts:
        rows = [
            counts
            for step in self._within(window_s)
            for name, counts in step.grown.items()
            if worker is None or name == worker
        ]
        return sum(row[0] for row in rows), sum(row[1] for row in rows), sum(row[2] for row in rows)


def _counts(load: Mapping[str, Any]) -> Counts:
    prompt, hit, generated = (int(load[name]) for name in COUNTERS)
    return prompt, hit, generated


def _growth(before: Counts, now: Counts) -> Counts:
    prompt, hit, generated = (max(new - old, 0) for old, new in zip(before, now, strict=True))
    return prompt, hit, generated
