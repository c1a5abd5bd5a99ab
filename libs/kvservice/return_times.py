"""How long conversations pause after turns that called tools, by tenant and tool. Pure; times are the caller's.

    a turn ends ──expect──▶ soonest and latest return, or None: too little is known of its tools
    its next turn comes ──observe──▶ one more pause of the tool that took longest

Of each tool the newest KEPT pauses count, so what it took long ago fades. A tenant's tools say nothing of another's.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 64  # pauses of a tool
FEWEST = 4  # pauses that say something
MAX_TENANTS = 1024
MAX_TOOLS = 64  # of a tenant
SOONEST, LATEST = 0.1, 0.95  # quantiles
SAID_SOONEST, SAID_LATEST = 0.9, 2.0  # times what a client said
SLACK_S = 2.0  # on top of the latest
LONGEST_S = 86_400.0


class ReturnSpan(NamedTuple):
    """Seconds from the end of a turn in which its conversation is likely to come back."""

    soonest_s: float
    latest_s: float


@dataclass(eq=False, slots=True)
class ReturnTimes:
    _tools: OrderedDict[str, OrderedDict[str, deque[float]]] = field(default_factory=OrderedDict)

    def observe(self, tenant: str, tools: Iterable[str], pause_s: float) -> None:
        """A turn that called these tools was followed by its next one. The slowest tool is the one that was waited
        for; those of which nothing is known yet may all be."""
        known = {tool: self._median(tenant, tool) for tool in tools}
        slowest = max(known.values(), default=0.0)
        mine = self._tools.setdefault(tenant, OrderedDict())
        self._tools.move_to_end(tenant)
        for tool, median in known.items():
            if median == slowest:
                mine.setdefault(tool, deque(maxlen=KEPT)).append(min(max(pause_s, 0.0), LONGEST_S))
                mine.move_to_end(tool)
        while len(mine) > MAX_TOOLS:
            mine.popitem(last=False)
        while len(self._tools) > MAX_TENANTS:
            self._tools.popitem(last=False)

    def expect(self, tenant: str, tools: Iterable[str]) -> ReturnSpan | None:
        """Of parallel calls the slowest decides; None if one of them is not known well enough."""
        spans = [self._span(tenant, tool) for tool in tools]
        known = [span for span in spans if span is not None]
        if not known or len(known) < len(spans):
            return None
        return max(known)

    def known(self, tenant: str) -> dict[str, tuple[int, ReturnSpan | None]]:
        """Of each of the tenant's tools: how many pauses count, and the span that they make."""
        mine = self._tools.get(tenant) or OrderedDict[str, deque[float]]()
        return {tool: (len(pauses), self._span(tenant, tool)) for tool, pauses in mine.items()}

    def _pauses(self, tenant: str, tool: str) -> list[float]:
        mine = self._tools.get(tenant)
        return sorted(mine.get(tool, ())) if mine is not None else []

    def _median(self, tenant: str, tool: str) -> float:
        pauses = self._pauses(tenant, tool)
        return _quantile(pauses, 0.5) if len(pauses) >= FEWEST else float("inf")

    def _span(self, tenant: str, tool: str) -> ReturnSpan | None:
        pauses = self._pauses(tenant, tool)
        if len(pauses) < FEWEST:
            return None
        return ReturnSpan(_quantile(pauses, SOONEST), _quantile(pauses, LATEST) + SLACK_S)


def said_span(expect_return_s: float) -> ReturnSpan:
    """What a client said: it may come somewhat sooner, and much later."""
    return ReturnSpan(SAID_SOONEST * expect_return_s, SAID_LATEST * expect_return_s + SLACK_S)


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
