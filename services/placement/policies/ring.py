"""Consistent hashing: equal prefixes and sessions meet on one worker. Pure."""

from __future__ import annotations

from services.placement.policies.base import Choice, Question

FACTOR = 1.25


class Ring:
    """The plain ring, also what a Client does on its own when no placement answers."""

    name = "ring"

    def choose(self, question: Question) -> Choice | None:
        worker = question.ring.owner(question.key, excluded=question.excluded)
        if worker is None:
            return None
        return Choice(worker, f"first on the ring for its {_subject(question)}")


class BoundedRing:
    """The ring with bounded loads: walks on past workers above 1.25 times the mean, so a hot key cannot bury one."""

    name = "bounded_ring"

    def choose(self, question: Question) -> Choice | None:
        loads = {worker.id: question.load_of(worker) for worker in question.candidates}
        worker = question.ring.bounded_owner(question.key, loads, factor=FACTOR, excluded=question.excluded)
        if worker is None:
            return None
        return Choice(worker, f"first within {FACTOR} of the mean load on the ring for its {_subject(question)}")


def _subject(question: Question) -> str:
    return "session" if question.ask.session else "prefix"
