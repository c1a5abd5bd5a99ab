"""Loop: bounds and shares lists of decisions, which cost placement and this process milliseconds each.

question ──▶ runs ──▶ answered: shared for KEPT_S with callers of the same question ──▶ forgotten
    └── no place is free: 429; a question has its place until its answer is forgotten
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from kvproto.errors import LimitExceeded
from kvproto.tasks import end

KEPT_S = 0.5
MAX_LISTINGS = 8
MAX_LISTINGS_PER_TENANT = 3  # and of all admins together
RETRY_S = 1.0


class Listing(Enum):
    """What is made of decisions."""

    PLACEMENTS = "placements"
    TIMELINE = "timeline"
    PAUSES = "pauses"


class ListQuestion(NamedTuple):
    tenant: str | None  # None: of all
    model: str | None  # None: of any
    limit: int
    listing: Listing = Listing.PLACEMENTS


@dataclass(eq=False, slots=True)
class Listings:
    """Owned by the event loop. `answer` runs in a task for each question, which outlives its callers."""

    answer: Callable[[ListQuestion], Coroutine[Any, Any, bytes]]
    places: dict[ListQuestion, asyncio.Task[bytes]] = field(default_factory=dict)

    async def ask(self, question: ListQuestion) -> bytes:
        """Raises LimitExceeded, and what `answer` does; a failure is shared by those who wait for it, and not kept."""
        task = self.places.get(question)
        if task is None:
            of_one = sum(one.tenant == question.tenant for one in self.places)
            if len(self.places) >= MAX_LISTINGS or of_one >= MAX_LISTINGS_PER_TENANT:
                why = "too many different lists of placements are asked for at once"
                raise LimitExceeded(why, retry_after_s=RETRY_S)
            task = self.places[question] = asyncio.create_task(self.answer(question))
            task.add_done_callback(partial(self._answered, question))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancels the callers that still wait."""
        await end(list(self.places.values()))
        self.places.clear()

    def _answered(self, question: ListQuestion, task: asyncio.Task[bytes]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.places.pop(question, None)
        else:
            task.get_loop().call_later(KEPT_S, self.places.pop, question, None)
