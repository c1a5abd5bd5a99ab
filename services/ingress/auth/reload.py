"""Loop: takes up what files say when they change: by looking every half second, or at once when told.

What is there must look the same twice, so that a file in the middle of being written is not taken; links that are
swapped, as Kubernetes does with a mounted secret, are noticed as any other change. What cannot be used is said once,
and what was there stays; what could not be taken just now (a retryable error) is tried again at each look.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from kvproto.errors import KvfleetError

log = logging.getLogger(__name__)

POLL_S = 0.5
S = TypeVar("S")
OnReload = Callable[[str, str | None], None]  # what, and why not


class Reload(Generic[S]):
    """One source. `read` blocks, for a thread; `take` raises KvfleetError for what cannot be used. Owned by the event
    loop."""

    def __init__(
        self, what: str, read: Callable[[], S], take: Callable[[S], None], *, seen: S, on_reload: OnReload | None = None
    ) -> None:
        self._what = what
        self._read = read
        self._take = take
        self._decided: S | str = seen  # what it said, or why it could not be read, when that was last acted upon
        self._last: S | str = seen
        self._told = 0  # times that `now` was called
        self._on_reload = on_reload or _unheard
        self.reloads_total = 0
        self.failures_total = 0

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            told = self._told
            said = await asyncio.to_thread(self._look)
            if told != self._told:
                continue  # what this look saw is older than what was taken meanwhile
            if said == self._last:
                self._decide(said)
            self._last = said

    def now(self) -> None:
        """Take up what is there, without waiting for it to settle; what could not be used is tried again."""
        self._told += 1
        self._last = self._look()
        self._decided = ""
        self._decide(self._last)

    def _look(self) -> S | str:
        try:
            return self._read()
        except KvfleetError as error:
            return str(error)

    def _decide(self, said: S | str) -> None:
        if said == self._decided:
            return
        self._decided = said
        try:
            if isinstance(said, str):
                raise KvfleetError(said)
            self._take(said)
        except KvfleetError as error:
            self.failures_total += 1
            if error.retryable:
                self._decided = ""
            log.error("%s: what is there now cannot be used, the old ones stay: %s", self._what, error)
            self._on_reload(self._what, str(error))
        else:
            self.reloads_total += 1
            log.info("%s: reloaded", self._what)
            self._on_reload(self._what, None)


def _unheard(what: str, why: str | None) -> None:
    pass
