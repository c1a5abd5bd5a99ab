"""Coroutines that begin as something comes, without a turn of a task, which goes on with what has to wait: most of what
a fleet does with a message waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from nats.aio.client import Client

LATER = 0.1  # of messages and writes: a turn later, as with nats-py's own tasks


class Waiting:
    """What is left of a coroutine that has begun without a task, and what it waits for."""

    def __init__(self, begun: Coroutine[Any, Any, None], waits_for: Any, data: bytes = b"") -> None:
        self._begun, self._waits_for, self.data = begun, waits_for, data

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                said = None if waits_for is None else (yield waits_for)
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                wanted = partial(self._begun.throw, error)
            else:
                wanted = partial(self._begun.send, said)
            try:
                waits_for = wanted()
            except StopIteration:
                return


class AtOnce(asyncio.Queue[Any]):
    """A subscription's messages. Mostly its callback begins as one comes, without a turn of nats-py's task for it,
    which goes on with what has to wait."""

    def __init__(self, client: Client, subscription: Any, draw: Callable[[], float]) -> None:
        super().__init__(subscription._pending_msgs_limit)
        self._client, self._subscription, self._callback = client, subscription, subscription._cb
        self._draw, self._running = draw, asyncio.get_running_loop()

    def put_nowait(self, message: Any) -> None:
        task = self._subscription._wait_for_msgs_task
        is_elsewhere = asyncio.current_task(self._running) is not None
        if self._unfinished_tasks or task is None or is_elsewhere or self._draw() < LATER:
            super().put_nowait(message)
            return
        begun = self._callback(message)
        asyncio.tasks._enter_task(self._running, task)
        try:
            waits_for = begun.send(None)
        except StopIteration:
            present = self._client._subs.get(self._subscription._id)  # JetStream's library puts its own in its place
            if present is not None:
                present._pending_size -= len(message.data)
        except Exception as error:  # noqa: BLE001 - its task tells it
            super().put_nowait(Waiting(_raising(error), None, message.data))
        else:
            super().put_nowait(Waiting(begun, waits_for, message.data))
        finally:
            asyncio.tasks._leave_task(self._running, task)

    def go_on(self, message: Any) -> Any:
        return message if type(message) is Waiting else self._callback(message)


async def _raising(error: Exception) -> None:
    raise error
