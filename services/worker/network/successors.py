"""Loop: who else serves this worker's model and its adapters. Owned by the worker's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.members import Members
from kvproto.messages import Role, WorkerRecord, WorkerRole
from kvproto.subjects import Subjects
from kvproto.tasks import end

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Successors:
    """All workers are watched from the first question on, when this one is about to go."""

    connection: Connection
    subjects: Subjects
    me: WorkerRecord
    _watching: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._workers = Members(self.connection, self.subjects, hears=False, role=Role.WORKER)

    def somebody_is_ready(self, models: Iterable[str] = ()) -> bool | None:
        """Whether another worker of this model takes new work, and one for each of these; None: not known yet."""
        ready = self._ready()
        return None if ready is None else _serve_all(ready, models)

    def somebody_decodes(self, models: Iterable[str] = ()) -> bool | None:
        """The same of workers that are not for prompts alone."""
        ready = self._ready()
        return (
            None if ready is None else _serve_all([one for one in ready if one.role is not WorkerRole.PREFILL], models)
        )

    def _ready(self) -> list[WorkerRecord] | None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="successors")
        if not self._watching.done():
            return None
        return [view.record for view in self._workers.view.ready(self.me.model) if view.record.id != self.me.id]

    async def _watch(self) -> None:
        try:
            await self._workers.start()
        except Unavailable as error:
            log.warning("who else serves this model is not known: %s", error)

    async def stop(self) -> None:
        if self._watching is not None:
            await end([self._watching])
        await self._workers.stop()


def _serve_all(ready: list[WorkerRecord], models: Iterable[str]) -> bool:
    return bool(ready) and all(any(one.serves(model) for one in ready) for model in models)
