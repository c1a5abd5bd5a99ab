"""asyncio tasks: none fails unnoticed, and they end for certain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

AGAIN_S = 0.2


@dataclass(eq=False, slots=True)
class VitalTasks:
    """Tasks whose failure ends the process: a service without one of its loops only looks alive."""

    on_fatal: Callable[[str], None]
    running: set[asyncio.Task[Any]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            self.on_fatal(f"{task.get_name()} failed: {error}")


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until all have ended; their exceptions are dropped. Until Python 3.12 `asyncio.wait_for` can
    swallow a cancellation that comes as its future is done (cpython #86296)."""
    left = {task for task in tasks if task is not asyncio.current_task()}
    while left:
        for task in left:
            task.cancel()
        ended, left = await asyncio.wait(left, timeout=AGAIN_S)
        for task in ended:
            if not task.cancelled():
                task.exception()  # marks it as retrieved
