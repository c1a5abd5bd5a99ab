"""Policies: how one of the candidates is chosen."""

from __future__ import annotations

from collections.abc import Callable

from kvfleet.placement.policies.base import Choice, Policy, Question
from kvfleet.placement.policies.cost import Cost
from kvfleet.placement.policies.direct import Direct
from kvfleet.placement.policies.kv_load import KvLoad
from kvfleet.placement.policies.random_choice import RandomChoice
from kvfleet.placement.policies.ring import BoundedRing, Ring
from kvfleet.placement.policies.round_robin import RoundRobin

DEFAULT_POLICY = Cost.name
DIRECT = Direct.name


def build_policies(chance: Callable[[], float]) -> dict[str, Policy]:
    """A fresh set for one core; `chance()` is uniform in [0, 1)."""
    policies: tuple[Policy, ...] = (
        Cost(), KvLoad(), Ring(), BoundedRing(), RandomChoice(chance), RoundRobin(), Direct(),
    )  # fmt: skip
    return {policy.name: policy for policy in policies}


__all__ = ["DEFAULT_POLICY", "DIRECT", "Choice", "Policy", "Question", "build_policies"]
