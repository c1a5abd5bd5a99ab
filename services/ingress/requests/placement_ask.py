"""What a body says about where and when it wants to run: a policy by name, for `direct` a worker, a priority. Pure.

Which policies there are only placement knows; who may name one is `tenancy`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from kvfleet.ingress.requests.fields import Whole
from kvproto.errors import InvalidRequest

DIRECT = "direct"
MAX_NAME_CHARS = 64
MAX_PRIORITY = 100

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


@dataclass(frozen=True, slots=True)
class PlacementAsk:
    """None: left to the fleet. A worker comes with the policy `direct` and with no other; InvalidRequest otherwise."""

    policy: Name | None = None
    worker: Name | None = None
    priority: Annotated[int, Whole(-MAX_PRIORITY, MAX_PRIORITY)] | None = None  # positive is served first

    def __post_init__(self) -> None:
        if self.worker is not None and self.policy is None:
            object.__setattr__(self, "policy", DIRECT)
        if self.worker is not None and self.policy != DIRECT:
            raise InvalidRequest(f"only the policy {DIRECT} takes one, got the policy {self.policy!r}", field="worker")
        if self.worker is None and self.policy == DIRECT:
            raise InvalidRequest(f"missing: the policy {DIRECT} needs one", field="worker")


ANYWHERE = PlacementAsk()
