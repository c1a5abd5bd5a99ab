"""Whether to ask a placement that has not answered lately. Pure.

    closed ──5 in a row unanswered──▶ open ──a quarter of a second──▶ one asks ──unanswered──▶ open
       ▲                               │                                 │
       └───────────────────────an answer in time─────────────────────────┘

Open, requests go by the ring at once, instead of each waiting for 50 ms first; and a placement that is behind with its
work is asked nothing that would come late too.
"""

from __future__ import annotations

SILENT_ENOUGH = 5
ASK_AGAIN_S = 0.25


class PlacementBreaker:
    """One client's; `now` never goes back."""

    def __init__(self) -> None:
        self._unanswered = 0  # in a row
        self._ask_at: float | None = None  # when the next one may, while open

    @property
    def is_open(self) -> bool:
        return self._ask_at is not None

    def may_ask(self, now: float) -> bool:
        """A request that is let through while it is open is the only one for a while, whatever becomes of it."""
        if self._ask_at is None:
            return True
        if now < self._ask_at:
            return False
        self._ask_at = now + ASK_AGAIN_S
        return True

    def answered(self) -> None:
        self._unanswered, self._ask_at = 0, None

    def unanswered(self, now: float) -> None:
        self._unanswered += 1
        if self._unanswered >= SILENT_ENOUGH and self._ask_at is None:
            self._ask_at = now + ASK_AGAIN_S
