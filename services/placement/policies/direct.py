"""The request names its worker. Pure."""

from __future__ import annotations

from kvfleet.placement.policies.base import Choice, Question
from kvproto.errors import InvalidRequest, NotFound, Unavailable
from kvproto.messages import State


class Direct:
    """The named worker or an error, even if the request excludes it: naming it is the later word."""

    name = "direct"

    def choose(self, question: Question) -> Choice | None:
        named = question.ask.worker
        if not named:
            raise InvalidRequest("the policy direct needs a worker", field="worker")
        worker = question.alive.get(named)
        if worker is None:
            raise NotFound(f"no worker {named[:64]!r} is alive", field="worker")
        if worker.model != question.ask.model:
            raise NotFound(f"worker {named} serves {worker.model}, not {question.ask.model[:64]}", field="worker")
        if worker.state is not State.READY:
            raise Unavailable(f"worker {named} is {worker.state.value}", field="worker")
        return Choice(named, "named by the request")
