"""Whether an answer would still be of use to its asker: to decide what is late only makes the next ones late. Pure.

    sent ──(on its way: network, server, socket)──▶ arrived ──(waits its turn)──▶ now ──▶ decided, answered in time?

How long one waited its turn is known by the clock of this process. How long it was on its way is reckoned from the time
at which it says that it was sent, by another host's clock: not the difference of the two counts but by how much it is
more than the least one of the same asker, which is what clocks and network make. Clocks that drift apart are followed;
one that jumps is believed again after some seconds in which all of its requests seemed late.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SHARE = 0.75  # of what it may take: the rest is for the decision and the way back
LONGEST_S = 1.0  # at most; and of a request that does not say: those that do go first
DRIFT = 2e-4  # of a second per second, between two clocks
JUMP_S = 5.0
MAX_ASKERS = 4096


@dataclass(slots=True)
class _Asker:
    least_s: float  # from its clock to ours, on the quickest way
    at: float
    late_since: float | None = None  # since then all were
    least_late_s: float = 0.0


class Lateness:
    """Owned by the placement loop. Times are the loop's, `expires_unix_ms` is the asker's."""

    def __init__(self) -> None:
        self._askers: OrderedDict[str, _Asker] = OrderedDict()  # last heard last

    def due(self, asker: str, deadline_ms: object, expires_unix_ms: object, arrived: float) -> float:
        """Until when a request should be decided, or not at all; both fields as they came, unchecked."""
        if type(deadline_ms) is not int or type(expires_unix_ms) is not int:
            return arrived + SHARE * LONGEST_S
        sent = (expires_unix_ms - deadline_ms) / 1000
        limit_s = SHARE * min(deadline_ms / 1000, LONGEST_S)
        return arrived + limit_s - self._on_way_s(asker, sent, limit_s, arrived)

    def _on_way_s(self, asker: str, sent: float, limit_s: float, arrived: float) -> float:
        took_s = arrived - sent
        known = self._askers.pop(asker, None) or _Asker(took_s, arrived)
        self._askers[asker] = known
        if len(self._askers) > MAX_ASKERS:
            self._askers.popitem(last=False)
        known.least_s = min(known.least_s + DRIFT * (arrived - known.at), took_s)
        known.at = arrived
        if took_s - known.least_s <= limit_s:
            known.late_since = None
        elif known.late_since is None:
            known.late_since, known.least_late_s = arrived, took_s
        else:
            known.least_late_s = min(known.least_late_s, took_s)
            if arrived - known.late_since > JUMP_S:
                known.least_s, known.late_since = known.least_late_s, None
        return took_s - known.least_s
