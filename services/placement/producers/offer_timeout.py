"""How long an offer may go unanswered before the next worker gets it. Pure.

50 ms are plenty where workers have time. Where they have not, and answer late, offering each request to the next one
and the next would only add to what keeps them from answering: then patience grows until it covers what an answer takes
now, and shrinks as they answer sooner.
"""

from __future__ import annotations

ACKNOWLEDGE_S = 0.05
MOST_S = 1.0
TIMES = 4.0  # what an answer usually takes
WEIGHT = 0.1  # of the newest answer


class OfferTimeout:
    def __init__(self) -> None:
        self._usual_s = 0.0

    @property
    def seconds(self) -> float:
        return min(max(ACKNOWLEDGE_S, TIMES * self._usual_s), MOST_S)

    def answered(self, after_s: float) -> None:
        self._usual_s += WEIGHT * (min(after_s, MOST_S) - self._usual_s)

    def was_late(self) -> None:
        """Somebody accepted what had gone to the next one."""
        self._usual_s = min(2 * max(self._usual_s, ACKNOWLEDGE_S / TIMES), MOST_S)
