"""Loop: takes up what files say when they change: by looking every half second, or at once when told.

What is there must look the same twice, so that a file in the middle of being written is not taken; links that are
swapped, as Kubernetes does with a mounted secret, are noticed as any other change. What cannot be used is said once,
and what was there stays; what could not be taken just now (a retryable error) is tried again at each look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvproto.errors import KvfleetError

log = logging.getLogger(__name__)

POLL_S = 0.5
S = TypeVar("S")


@dataclass(eq=False, slots=True)
class Reload(Generic[S]):
    """One source. `read` blocks, for a thread; `take` raises KvfleetError for what cannot be used. Owned by the event
    loop."""

    what: str
    read: Callable[[], S]
    take: Callable[[S], None]
    seen: S | str  # at the last look; what it said, or why it could not be read
    on_reload: Callable[[str, str | None], None] = lambda what, why_not: None
    reloads_total: int = 0
    failures_total: int = 0
    _decided: S | str = field(init=False)  # the same, when that was last acted upon
    _told: int = 0  # times that `now` was called

    def __post_init__(self) -> None:
        self._decided = self.seen

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            told = self._told
            said = await asyncio.to_thread(self._look)
            if told != self._told:
                continue  # what this look saw is older than what was taken meanwhile
            if said == self.seen:
                self._decide(said)
            self.seen = said

    def now(self) -> None:
        """Take up what is there, without waiting for it to settle; what could not be used is tried again."""
        self._told += 1
        self.seen = self._look()
        self._decided = ""
        self._decide(self.seen)

    def _look(self) -> S | str:
        try:
            return self.read()
        except KvfleetError as error:
            return str(error)

    def _decide(self, said: S | str) -> None:
        if said == self._decided:
            return
        self._decided = said
        try:
            if isinstance(said, str):
                raise KvfleetError(said)
            self.take(said)
        except KvfleetError as error:
            self.failures_total += 1
            if error.retryable:
                self._decided = ""
            log.error("%s: what is there now cannot be used, the old ones stay: %s", self.what, error)
            self.on_reload(self.what, str(error))
        else:
            self.reloads_total += 1
            log.info("%s: reloaded", self.what)
            self.on_reload(self.what, None)
