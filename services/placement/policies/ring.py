"""Consistent hashing: equal prefixes and sessions meet on one worker. Pure."""

from __future__ import annotations

from kvfleet.placement.policies.base import Choice, Question

FACTOR = 1.25
UNBURIED = 0.25  # share of a worker's slots


class Ring:
    """The plain ring, also what a Client does on its own when no placement answers."""

    name = "ring"

    def choose(self, question: Question) -> Choice | None:
        worker = question.ring.owner(question.key, excluded=question.excluded)
        if worker is None:
            return None
        return Choice(worker, f"first on the ring for its {_subject(question)}")


class BoundedRing:
    """The ring with bounded loads: walks on past workers above 1.25 times the mean, so a hot key cannot bury one.

    A worker that has not a quarter of its slots taken is never passed over: what waits there is less than what moving
    away from its cache would cost, and a client's few requests in a row must not bounce between idle workers.
    """

    name = "bounded_ring"

    def choose(self, question: Question) -> Choice | None:
        requests = question.loads.requests.tolist()
        loads = {worker.id: load for worker, load in zip(question.candidates, requests, strict=True)}
        slots = min((worker.load.slots for worker in question.candidates), default=0)
        worker = question.ring.bounded_owner(
            question.key, loads, factor=FACTOR, least=max(1, int(slots * UNBURIED)), excluded=question.excluded
        )
        if worker is None:
            return None
        return Choice(worker, f"first within {FACTOR} of the mean load on the ring for its {_subject(question)}")


def _subject(question: Question) -> str:
    return "session" if question.ask.session else "prefix"
