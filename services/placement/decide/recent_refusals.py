"""Requests that were refused, counted once each however often they come back. Pure."""

from __future__ import annotations

from collections import OrderedDict

from kvproto.messages import PlaceRequest, Refused

SAME_S = 10.0  # a request that comes back within that is the one that stands outside already
SAME_WORK_S = 60.0  # and within that it is the same work
MAX_KNOWN = 8192


class RecentRefusals:
    """Owned by the decider. Who comes back under another id is taken for somebody else."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()  # when counted, as work
        self._new: dict[str, Refused] = {}

    def note(self, tenant: str, ask: PlaceRequest, tokens: int, now: float) -> None:
        key = tenant, ask.request
        counted, worked = self._known.pop(key, (float("-inf"), float("-inf")))
        again, same_work = now - counted <= SAME_S, now - worked <= SAME_WORK_S
        self._known[key] = counted if again else now, worked if same_work else now
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        before = self._new.get(ask.model, Refused(ask.model, 0, 0))
        # Told again it is still asked for, and no more of it.
        self._new[ask.model] = Refused(
            ask.model, before.requests + (not again), before.tokens + (0 if same_work else max(tokens, 1))
        )

    def take(self) -> tuple[Refused, ...]:
        """Since this was last called, by model."""
        taken, self._new = tuple(self._new.values()), {}
        return taken
