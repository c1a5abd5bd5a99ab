"""Turns that went to another worker than the one before: what each had to compute again, and what it waited less. Pure.

Both as the decision reckoned them, in seconds, from the rows of the price that a ledger keeps too.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.placement.policies.base import Choice, Policy, Question
from kvfleet.placement.workers.price_kernel import FETCH, PREFILL, QUEUE, SLOT, STEP

NOTHING_S = 0.001


@dataclass(slots=True)
class Moves:
    """Of all turns that had one before. What moves `free` leaves nothing behind, what is `paid` waits less by what it
    computes again; the rest costs its request more than it saves it."""

    turns: int = 0
    free: int = 0
    paid: int = 0
    dear: int = 0

    def note(self, again_s: float, saved_s: float) -> None:
        if again_s <= NOTHING_S:
            self.free += 1
        elif saved_s >= again_s:
            self.paid += 1
        else:
            self.dear += 1

    def shares(self) -> dict[str, float]:
        """Of turns that had one before; nothing where no policy reckoned."""
        each = {"moved_free": self.free, "moved_paid": self.paid, "moved_dear": self.dear}
        return {name: count / self.turns for name, count in each.items()} if self.turns else {}


class Watched:
    """A policy that reckons, and what it moves. One for all replicas: it remembers where a session's last turn went."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.moves = Moves()
        self._policy = policy
        self._last: dict[str, str] = {}  # session -> worker

    def choose(self, question: Question) -> Choice | None:
        choice, session = self._policy.choose(question), question.ask.session
        if choice is None or choice.prices is None or session is None:
            return choice
        number = {worker.id: number for number, worker in enumerate(question.candidates)}
        before = number.get(self._last.get(session, ""))
        if before is not None:
            self.moves.turns += 1
            here = number[choice.worker]
            if here != before:
                prices = choice.prices
                again, waits = prices[[FETCH, PREFILL]].sum(axis=0), prices[[QUEUE, SLOT, STEP]].sum(axis=0)
                self.moves.note(float(again[here] - again[before]), float(waits[before] - waits[here]))
        self._last[session] = choice.worker
        return choice
