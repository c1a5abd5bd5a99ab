"""Which of one worker's milestones were heard: after an outage a worker says the last ones again. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvproto.messages import Milestone, Milestones

GAPS_KEPT = 64  # the newest ones: a gap is made by an outage


class SeenMilestones:
    """Of one life of a worker. Owned by its row in the fleet."""

    __slots__ = ("_gaps", "_next")

    def __init__(self) -> None:
        self._next = 0
        self._gaps: list[tuple[int, int]] = []  # [begin, end) of what was not heard, below `_next`

    def new_of(self, said: Milestones) -> Milestones:
        """Those that were not heard before; all of a worker that does not number them."""
        first = said.first
        if first is None:
            return said
        end, gaps = first + len(said.items), []
        fresh: list[Milestone] = []
        for a, b in (*self._gaps, (self._next, max(end, self._next))):
            low, high = max(a, first), min(b, end)
            if low >= high:
                gaps.append((a, b))
                continue
            fresh += said.items[low - first : high - first]
            gaps += [(a, low), (high, b)]
        self._next = max(self._next, end)
        self._gaps = [(a, b) for a, b in gaps if a < b][-GAPS_KEPT:]
        return replace(said, items=tuple(fresh))
