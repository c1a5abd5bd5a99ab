"""Chance: the baseline that any other policy has to beat. Pure: the numbers are passed in."""

from __future__ import annotations

from collections.abc import Callable

from kvfleet.placement.policies.base import Choice, Question


class RandomChoice:
    """Uniform over the candidates; `chance()` is uniform in [0, 1)."""

    name = "random"

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        index = min(int(self._chance() * len(question.candidates)), len(question.candidates) - 1)
        return Choice(question.candidates[index].id, "drawn at random")
