"""Whom not to ask for a while. Pure: faults in, whether a source may be asked out.

    3 faults in 60 s, or one block that was wrong under a right checksum ──▶ shut out for 60 s ──▶ asked again
        shut out again within the hour after that: twice as long, an hour at most

A fault is a block that failed its checks: damaged, another one than was asked for, of another format. What never came
is none: a vault that is slow or away is no liar.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

FAULTS = 3
WINDOW_S = 60.0
FIRST_TERM_S = 60.0
LONGEST_TERM_S = 3600.0
FORGIVEN_S = 3600.0  # after the end of a term
MAX_SOURCES = 4096
WRONG = "wrong"  # the reason of a block whose numbers were wrong under a right checksum: no chance of wires or memory


@dataclass(slots=True)
class _Conduct:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=FAULTS))
    until: float = float("-inf")
    term_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class Quarantine:
    """Of all vaults and peers of one worker, by their id: who restarts is not better for it."""

    shut_out_total: int = 0
    _conducts: dict[str, _Conduct] = field(default_factory=dict)

    def allows(self, source: str, now: float) -> bool:
        conduct = self._conducts.get(source)
        return conduct is None or now >= conduct.until

    def fault(self, source: str, reason: str, now: float) -> bool:
        """One block failed its checks. True if that shuts the source out now."""
        conduct = self._conduct(source)
        conduct.faults[reason] += 1
        if now < conduct.until:
            return False
        conduct.recent.append(now)
        often = len(conduct.recent) == FAULTS and now - conduct.recent[0] <= WINDOW_S
        if reason != WRONG and not often:
            return False
        again = conduct.term_s and now - conduct.until <= FORGIVEN_S
        conduct.term_s = min(conduct.term_s * 2, LONGEST_TERM_S) if again else FIRST_TERM_S
        conduct.until = now + conduct.term_s
        conduct.recent.clear()
        self.shut_out_total += 1
        return True

    def shut_out(self, now: float) -> dict[str, float]:
        """Seconds still to go, by source."""
        return {source: conduct.until - now for source, conduct in self._conducts.items() if now < conduct.until}

    def faults(self) -> dict[str, dict[str, int]]:
        return {source: dict(conduct.faults) for source, conduct in self._conducts.items()}

    def _conduct(self, source: str) -> _Conduct:
        if source not in self._conducts and len(self._conducts) >= MAX_SOURCES:
            seen = {one: max(conduct.until, *conduct.recent, float("-inf")) for one, conduct in self._conducts.items()}
            del self._conducts[min(seen, key=seen.__getitem__)]
        return self._conducts.setdefault(source, _Conduct())
