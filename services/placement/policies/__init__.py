"""Policies: how one of the candidates is chosen. A new one is a file here, its import and its line below."""

from __future__ import annotations

from collections.abc import Callable

from kvfleet.placement.policies.base import Choice, Policy, Question
from kvfleet.placement.policies.cost import Cost
from kvfleet.placement.policies.simple import BoundedRing, Direct, KvLoad, RandomChoice, Ring, RoundRobin

DEFAULT_POLICY = Cost.name
DIRECT = Direct.name


def build_policies(chance: Callable[[], float]) -> dict[str, Policy]:
    """A fresh set for one core; `chance()` is uniform in [0, 1)."""
    policies: tuple[Policy, ...] = (
        Cost(),
        KvLoad(),
        Ring(),
        BoundedRing(),
        RandomChoice(chance),
        RoundRobin(),
        Direct(),
    )
    return {policy.name: policy for policy in policies}


POLICY_NAMES = tuple(build_policies(lambda: 0.0))

__all__ = ["DEFAULT_POLICY", "DIRECT", "POLICY_NAMES", "Choice", "Policy", "Question", "build_policies"]
