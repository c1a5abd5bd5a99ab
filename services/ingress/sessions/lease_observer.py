"""Since when a running turn's record has been as it is, by this process's own clock. Pure: the time is passed in.

A turn's lease is renewed by writing its record again. Whether it still is cannot be told by the wall clock, which may
be wrong here or there by hours; a record that was unchanged for a whole lease of local time was not renewed (as in
Kubernetes' leader election).
"""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 65_536


class LeaseObserver:
    """Bounded: the record that was looked at longest ago is forgotten, and begins anew."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def unchanged_s(self, key: str, revision: int, now: float) -> float:
        """Seconds since this revision was first seen here."""
        known = self._seen.get(key)
        if known is None or known[0] != revision:
            known = self._seen[key] = revision, now
            if len(self._seen) > MAX_SESSIONS:
                self._seen.popitem(last=False)
        self._seen.move_to_end(key)
        return now - known[1]

    def forget(self, key: str) -> None:
        self._seen.pop(key, None)
