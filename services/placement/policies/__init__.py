"""Placement policies by name, one file each; `base` is their interface."""

from __future__ import annotations

from collections.abc import Callable

from services.placement.policies.base import Choice, Policy, Question
from services.placement.policies.cost import Cost
from services.placement.policies.direct import Direct
from services.placement.policies.kv_load import KvLoad
from services.placement.policies.random_choice import RandomChoice
from services.placement.policies.ring import BoundedRing, Ring
from services.placement.policies.round_robin import RoundRobin

DEFAULT_POLICY = Cost.name
DIRECT = Direct.name


def build_policies(chance: Callable[[], float]) -> dict[str, Policy]:
    """A fresh set for one core; `chance()` is uniform in [0, 1)."""
    policies: tuple[Policy, ...] = (
        Cost(), KvLoad(), Ring(), BoundedRing(), RandomChoice(chance), RoundRobin(), Direct(),
    )  # fmt: skip
    return {policy.name: policy for policy in policies}


__all__ = ["DEFAULT_POLICY", "DIRECT", "Choice", "Policy", "Question", "build_policies"]
