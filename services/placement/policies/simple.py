"""Policies of a few lines: baselines, and the worker that a request names. Pure: chance is passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvfleet.placement.policies.base import Choice, Question
from kvproto.errors import InvalidRequest, NotFound, Unavailable
from kvproto.messages import State

FACTOR = 1.25
UNBURIED = 0.25  # share of a worker's slots


class Ring:
    """The plain ring, which a Client uses too when no placement answers."""

    name = "ring"

    def choose(self, question: Question) -> Choice | None:
        worker = question.ring.owner(question.key, excluded=question.excluded)
        return None if worker is None else Choice(worker, f"first on the ring for its {_subject(question)}")


class BoundedRing:
    """The ring with bounded loads: walks on past workers above 1.25 times the mean, so a hot key cannot bury one. It
    never passes one with less than a quarter of its slots taken: leaving its cache would cost more."""

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


class KvLoad:
    """Highest match minus load, as shares: the rule of NVIDIA Dynamo's first KV router, kept to compare with."""

    name = "kv_load"

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        match, load = question.held / max(question.prompt_tokens, 1), question.loads.usage
        score = match - load
        worker, number = question.first_on_the_ring(np.flatnonzero(score >= score.max() - 1e-9).tolist())
        return Choice(worker, f"match {match[number]:.0%} minus load {load[number]:.0%} is the most")


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """Uniform over the candidates; `chance()` is uniform in [0, 1)."""

    name = "random"
    chance: Callable[[], float]

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        index = min(int(self.chance() * len(question.candidates)), len(question.candidates) - 1)
        return Choice(question.candidates[index].id, "drawn at random")


class RoundRobin:
    """Goes on after the worker chosen last, in order of ids, so joins and leaves shift no turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: dict[str, str] = {}  # model -> worker

    def choose(self, question: Question) -> Choice | None:
        if not question.candidates:
            return None
        last = self._last.get(question.ask.model, "")
        chosen = next((w.id for w in question.candidates if w.id > last), question.candidates[0].id)
        self._last[question.ask.model] = chosen
        return Choice(chosen, "its turn")


class Direct:
    """The worker that the request names, even if it also excludes it, or an error."""

    name = "direct"

    def choose(self, question: Question) -> Choice | None:
        named = question.ask.worker
        if not named:
            raise InvalidRequest("the policy direct needs a worker", field="worker")
        worker = question.alive.get(named)
        if worker is None:
            raise NotFound(f"no worker {named[:64]!r} is alive", field="worker")
        if question.ask.model not in worker.spaces:
            raise NotFound(f"worker {named} serves {worker.model}, not {question.ask.model[:64]}", field="worker")
        if worker.state is not State.READY:
            raise Unavailable(f"worker {named} is {worker.state.value}", field="worker")
        return Choice(named, "named by the request")
