"""Work by priority, as a fluid that is served from the top. Pure.

What drains is of the highest priority that is left, so what is ahead of a request is the work of its own priority and
of higher ones, however much there is below.
"""

from __future__ import annotations


class Levels:
    """Amounts, never negative. There are as many levels as there are priorities, 201 at most."""

    __slots__ = ("_amounts",)

    def __init__(self, amounts: dict[int, float] | None = None) -> None:
        self._amounts = amounts or {}

    def __bool__(self) -> bool:
        return bool(self._amounts)

    @property
    def total(self) -> float:
        return sum(self._amounts.values())

    def add(self, priority: int, amount: float) -> None:
        """A negative amount takes away what is there of this priority."""
        left = self._amounts.get(priority, 0.0) + amount
        if left > 0:
            self._amounts[priority] = left
        else:
            self._amounts.pop(priority, None)

    def drain(self, amount: float) -> None:
        for priority in sorted(self._amounts, reverse=True):
            if amount <= 0:
                return
            taken = min(amount, self._amounts[priority])
            amount -= taken
            self.add(priority, -taken)

    def ahead(self, priority: int) -> float:
        """Of this priority and of higher ones."""
        return sum(amount for level, amount in self._amounts.items() if level >= priority)
