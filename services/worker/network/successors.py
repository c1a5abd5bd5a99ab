"""Loop: who else serves this worker's model. Owned by the worker's event loop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvproto.connection import Connection
from kvproto.errors import Unavailable
from kvproto.members import Members
from kvproto.messages import Role, WorkerRecord
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

    def somebody_is_ready(self) -> bool | None:
        """Whether another worker of this model takes new work; None: not known yet."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="successors")
        if not self._watching.done():
            return None
        return any(view.record.id != self.me.id for view in self._workers.view.ready(self.me.model))

    async def _watch(self) -> None:
        try:
            await self._workers.start()
        except Unavailable as error:
            log.warning("who else serves this model is not known: %s", error)

    async def stop(self) -> None:
        if self._watching is not None:
            await end([self._watching])
        await self._workers.stop()
