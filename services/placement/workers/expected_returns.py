"""Conversations that pause: which worker brings their blocks up, and how much work comes back to it soon. Pure.

Owned by the core; every replica hears the same. It is advice of a minute or so: what is not known is placed as ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvfleet.placement.workers import price_kernel as kernel
from kvfleet.placement.workers.fleet import Worker
from kvfleet.placement.workers.workloads import Floats, View
from kvproto.messages import ReturnExpected

MOST_KEPT = 65_536
LEAD_S = 2.0  # before the soonest return: then the worker has begun to restore
SOON_S = 1.0  # work that comes back within this counts as ahead of others
LOOK_S = SOON_S / 2  # between two looks at all of them
WEIGHT = 0.1  # of the newest return, in what returns have to prefill


class ComingBack(NamedTuple):
    worker: str
    soonest_at: float
    latest_at: float


@dataclass(eq=False, slots=True)
class ExpectedReturns:
    tail_tokens: float = 0.0  # that a return has to prefill, on average
    _next_look: float = 0.0
    _soon: dict[str, float] = field(default_factory=dict)  # worker -> returns expected within SOON_S
    _expected: OrderedDict[tuple[str, str], ComingBack] = field(default_factory=OrderedDict)  # by tenant and session

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, worker: str, said: ReturnExpected, now: float) -> None:
        key = said.tenant, said.session
        if not said.session:
            return
        self._expected.pop(key, None)
        self._expected[key] = ComingBack(worker, now + said.soonest_s, now + max(said.latest_s, said.soonest_s))
        if len(self._expected) > MOST_KEPT:
            self._expected.popitem(last=False)

    def brings_up(self, tenant: str, session: str | None, now: float) -> str | None:
        """The worker that has the conversation's blocks on its device by now, or soon."""
        one = self._expected.get((tenant, session or ""))
        return one.worker if one is not None and one.soonest_at - LEAD_S <= now <= one.latest_at else None

    def back(self, tenant: str, session: str | None, fed_tokens: int) -> None:
        """The conversation goes on."""
        if self._expected.pop((tenant, session or ""), None) is not None:
            weight = WEIGHT if self.tail_tokens else 1.0
            self.tail_tokens += weight * (fed_tokens - self.tail_tokens)

    def foresee(self, loads: View, workers: Sequence[Worker]) -> None:
        """Add to what is ahead of a request what comes back in a moment, as of the last look."""
        if self._soon:
            tokens: Floats = np.array([self._soon.get(worker.id, 0.0) for worker in workers]) * self.tail_tokens
            loads.values[kernel.AHEAD] += tokens

    def drop_worker(self, worker: str) -> None:
        self._soon.pop(worker, None)
        for key in [key for key, one in self._expected.items() if one.worker == worker]:
            del self._expected[key]

    def tick(self, now: float) -> None:
        if now < self._next_look:
            return
        self._next_look, self._soon = now + LOOK_S, {}
        for key, one in list(self._expected.items()):
            if one.latest_at < now:
                del self._expected[key]
            elif one.soonest_at <= now:  # it comes at any time of the span with equal chance
                share = SOON_S / max(one.latest_at - one.soonest_at, SOON_S)
                self._soon[one.worker] = self._soon.get(one.worker, 0.0) + share

    def check_integrity(self) -> None:
        assert len(self._expected) <= MOST_KEPT
        assert all(one.soonest_at <= one.latest_at for one in self._expected.values())
