"""Turn by turn. Pure: its state is whose turn it was last, per model."""

from __future__ import annotations

from kvfleet.placement.policies.base import Choice, Question


class RoundRobin:
    """Goes on after the worker chosen last, in order of ids, so joins and leaves shift nobody's turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # model -> worker; a model has an entry once a worker of it was chosen

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        last = self._last.get(question.ask.model, "")
        chosen = next((w.id for w in question.candidates if w.id > last), question.candidates[0].id)
        self._last[question.ask.model] = chosen
        return Choice(chosen, "its turn")
