"""What a body says about where and when it wants to run: a policy by name, for `direct` a worker, a priority. Pure.

Which policies there are only placement knows; who may name one is `tenancy`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfleet.ingress.requests.fields import Body, integer, text
from kvproto.errors import InvalidRequest

DIRECT = "direct"
MAX_NAME_CHARS = 64
MAX_PRIORITY = 100


class PlacementFields:
    policy = text("policy", MAX_NAME_CHARS)
    worker = text("worker", MAX_NAME_CHARS)
    priority = integer("priority", -MAX_PRIORITY, MAX_PRIORITY)


@dataclass(frozen=True, slots=True)
class PlacementAsk:
    """None: left to the fleet. A worker comes with the policy `direct` and with no other."""

    policy: str | None = None
    worker: str | None = None
    priority: int | None = None  # positive is served first


ANYWHERE = PlacementAsk()


def read_placement_ask(body: Body) -> PlacementAsk:
    """Raises InvalidRequest naming the field."""
    policy, worker = PlacementFields.policy.read(body), PlacementFields.worker.read(body)
    if worker is not None and policy is None:
        policy = DIRECT
    if worker is not None and policy != DIRECT:
        raise InvalidRequest(f"only the policy {DIRECT} takes one, got the policy {policy!r}", field="worker")
    if worker is None and policy == DIRECT:
        raise InvalidRequest(f"missing: the policy {DIRECT} needs one", field="worker")
    return PlacementAsk(policy, worker, PlacementFields.priority.read(body))
