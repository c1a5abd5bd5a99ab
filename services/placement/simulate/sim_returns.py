"""What an ingress measures of a trace: how long conversations pause after turns that call a tool. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from kvfleet.placement.simulate.trace import Arrival, Trace
from kvservice.return_times import ReturnSpan, ReturnTimes

TENANT = "public"


@dataclass(eq=False, slots=True)
class SimulatedReturns:
    times: ReturnTimes = field(default_factory=ReturnTimes)
    _paused: dict[str, tuple[float, str]] = field(default_factory=dict)  # session -> end of its turn, and the tool

    def ended(self, arrival: Arrival, now: float) -> ReturnSpan | None:
        if not arrival.tool:
            return None
        self._paused[arrival.session] = now, arrival.tool
        return self.times.expect(TENANT, [arrival.tool])

    def came(self, arrival: Arrival, now: float) -> None:
        if (paused := self._paused.pop(arrival.session, None)) is not None:
            ended_at, tool = paused
            self.times.observe(TENANT, [tool], now - ended_at)


def shared_blocks(trace: Trace) -> frozenset[int]:
    """Blocks of several conversations."""
    users: dict[int, set[str]] = defaultdict(set)
    for arrival in trace.arrivals:
        for block in arrival.ids:
            users[block].add(arrival.session)
    return frozenset(block for block, sessions in users.items() if len(sessions) > 1)
