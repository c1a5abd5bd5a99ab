"""Whether a request may join the queues, and when to come back if not. Pure.

    admitted  <=>  expected wait at some worker <= limit(max_wait_s, priority)

The wait counts work of the request's own priority and higher ones, and lower priorities have shorter limits. Both are
monotonic: a refused request would be refused with any lower priority too. It is told when its wait will have shrunk to
its limit, after those who were told so before: `TurnedAway` is the queue that they form outside.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvfleet.placement.workers import price_kernel as kernel
from kvfleet.placement.workers.workloads import Levels, View
from kvproto.errors import Overloaded
from kvproto.messages import PlaceRequest, Refused

HALF_BELOW = 10  # so much below 0, a priority has half the limit
LEAST_RETRY_S = 0.1
MOST_RETRY_S = 60.0
MAX_MODELS = 1024
SAME_S = 10.0  # a request that comes back within that is counted already
SAME_WORK_S = 60.0  # and its tokens within that
MAX_KNOWN = 8192
SPARE_BLOCKS = 0.85  # of a worker's blocks are held: nothing is spare
SPARE_WAIT_S = 0.02  # of prompts that are not of spare work, at its measured rate: nothing is spare


def limit_of(max_wait_s: float, priority: int) -> float:
    return max_wait_s * 2 ** (min(priority, 0) / HALF_BELOW)


def has_better_to_do(view: View) -> npt.NDArray[np.bool_]:
    """Which workers have no room for work that may wait, `[workers]`: no free slot, few free blocks, or prompts of
    others to compute. The view's priority is above that work's."""
    values = view.values
    rates = np.where(values[kernel.RATE] > 0, values[kernel.RATE], kernel.UNMEASURED_RATE)
    busy: npt.NDArray[np.bool_] = values[kernel.REQUESTS] >= values[kernel.SLOTS]
    busy |= values[kernel.BLOCKS_USED] > SPARE_BLOCKS * values[kernel.BLOCKS]
    busy |= values[kernel.AHEAD] / rates > SPARE_WAIT_S
    return busy


@dataclass(eq=False, slots=True)
class TurnedAway:
    """Seconds of the fleet's work that were sent away and will come back, by model and priority."""

    refused_total: int = 0
    outside: OrderedDict[str, tuple[float, Levels]] = field(default_factory=OrderedDict)  # drained then; last used last

    def refuse(self, model: str, priority: int, wait_s: float, limit_s: float, turn_s: float, now: float) -> Overloaded:
        """The error of a request that would wait for `wait_s`, and keep all workers busy for `turn_s`."""
        drained_at, outside = self.outside.pop(model, (now, Levels()))
        outside.drain(max(now - drained_at, 0.0))
        retry_after_s = min(max(wait_s - limit_s + outside.ahead(priority), LEAST_RETRY_S), MOST_RETRY_S)
        if outside.total < MOST_RETRY_S:
            outside.add(priority, turn_s)
        self.outside[model] = now, outside
        if len(self.outside) > MAX_MODELS:
            self.outside.popitem(last=False)
        self.refused_total += 1
        return Overloaded(
            f"it would wait for about {wait_s:.1f} s, and may for {limit_s:.1f} s",
            retry_after_s=round(retry_after_s, 3),
        )


@dataclass(eq=False, slots=True)
class RecentRefusals:
    """Refused requests, by id, counted once each however often they come back. Owned by the decider."""

    known: OrderedDict[tuple[str, str], tuple[float, float]] = field(default_factory=OrderedDict)  # counted, as work
    new: dict[str, Refused] = field(default_factory=dict)

    def note(self, tenant: str, ask: PlaceRequest, tokens: int, now: float) -> None:
        key = tenant, ask.request
        counted, worked = self.known.pop(key, (float("-inf"), float("-inf")))
        again, same_work = now - counted <= SAME_S, now - worked <= SAME_WORK_S
        self.known[key] = counted if again else now, worked if same_work else now
        if len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)
        before = self.new.get(ask.model, Refused(ask.model, 0, 0))
        more = 0 if same_work else max(tokens, 1)
        self.new[ask.model] = Refused(ask.model, before.requests + (not again), before.tokens + more)

    def take(self) -> tuple[Refused, ...]:
        """Those since the last call, by model."""
        taken, self.new = tuple(self.new.values()), {}
        return taken
