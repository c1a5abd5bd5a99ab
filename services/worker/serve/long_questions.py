"""Token ids of admin questions that are too long for one message: kept until the question itself comes. Pure.

    ids 0 ... ── ids 262,144 ... ── the question, without ids ── (its next parts)

Owned by `AdminDesk`. Bounded: the oldest question gives way, and one that nobody goes on with is forgotten.
"""

from __future__ import annotations

from array import array

from kvproto.errors import InvalidRequest, PayloadTooLarge
from kvproto.messages import AdminRequest

KEEP_S = 15.0
MAX_QUESTIONS = 8
MAX_IDS = 4_194_304  # as many as any message may have


class LongAdminQuestions:
    """Ids by question."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, array[int]]] = {}  # since when nobody went on; oldest first

    def __len__(self) -> int:
        return len(self._kept)

    def ids_of(self, request: AdminRequest, now: float) -> tuple[int, ...] | None:
        """All ids of a question; None while there are more to come. Raises InvalidRequest or PayloadTooLarge."""
        if not request.question:
            return request.ids
        self._kept = {name: kept for name, kept in self._kept.items() if now - kept[0] < KEEP_S}
        _, known = self._kept.pop(request.question, (now, array("I")))
        if len(known) != request.ids_before:
            raise InvalidRequest(f"{len(known)} ids of this question are known, not these", field="ids_before")
        if len(known) + len(request.ids) > MAX_IDS:
            raise PayloadTooLarge(f"at most {MAX_IDS} ids", field="ids")
        known.extend(request.ids)
        while len(self._kept) >= MAX_QUESTIONS:
            del self._kept[next(iter(self._kept))]
        self._kept[request.question] = (now, known)
        return None if request.more_ids else tuple(known)
