"""Which vaults and peers are not to be asked for a while. Pure.

    3 faults in 60 s, or one block that was wrong under a right checksum ──▶ shut out for 60 s ──▶ asked again
        shut out again within the hour after that: twice as long, an hour at most

A fault is a block that failed its checks: damaged, another block, another format. A block that never came is none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FAULTS = 3
WINDOW_S = 60.0
FIRST_TERM_S = 60.0
LONGEST_TERM_S = 3600.0
FORGIVEN_S = 3600.0  # after the end of a term
MAX_SOURCES = 4096
WRONG = "wrong"  # numbers were wrong under a right checksum: no accident of wires or memory


@dataclass(slots=True)
class _Conduct:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=FAULTS))
    until: float = float("-inf")
    term_s: float = 0.0


@dataclass(eq=False, slots=True)
class Quarantine:
    """Of all vaults and peers of one worker, by their id: a restart does not clear a source."""

    _conducts: dict[str, _Conduct] = field(default_factory=dict)

    def allows(self, source: str, now: float) -> bool:
        conduct = self._conducts.get(source)
        return conduct is None or now >= conduct.until

    def fault(self, source: str, reason: str, now: float) -> bool:
        """One block failed its checks. True if that shuts the source out now."""
        if source not in self._conducts and len(self._conducts) >= MAX_SOURCES:
            seen = {one: max(conduct.until, *conduct.recent, float("-inf")) for one, conduct in self._conducts.items()}
            del self._conducts[min(seen, key=seen.__getitem__)]
        conduct = self._conducts.setdefault(source, _Conduct())
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
        return True
