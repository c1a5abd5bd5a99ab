"""An event loop of one process, on virtual time: a few callbacks in its turn. It has neither sockets nor signals."""

from __future__ import annotations

import asyncio
import contextvars
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from tests.dst.hub import Actor, Hub, Place

MOST = 8  # callbacks in a turn


class SimFuture(asyncio.Future):  # type: ignore[type-arg]
    """As those of C, but that it takes attributes."""


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """The same."""


class SimLoop(asyncio.AbstractEventLoop):
    def __init__(self, place: Place) -> None:
        self.place = place
        self.hub: Hub = place.hub
        self.unhandled: list[dict[str, Any]] = []
        self._ready: deque[events.Handle] = deque()
        self._actor = Actor(place, self._serve, "loop", self)
        self._closed = False
        self._handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None
        self._threads = 0

    # What runs.

    def _serve(self) -> None:
        ready, actor, draw = self._ready, self._actor, self.hub.random.random
        while True:
            for _ in range(1 + int(draw() * MOST)):
                if not ready:
                    break
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if ready:
                actor.wake()
            actor.wait()

    def time(self) -> float:
        return self.hub.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._actor.wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        return self.call_at(self.hub.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> events.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        self.hub.at(when, partial(self._due, handle))
        return handle

    def _due(self, handle: events.Handle) -> None:
        if not handle._cancelled:
            self._ready.append(handle)
            self._actor.wake()

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    # What is made.

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return SimTask(coro, loop=self, name=name or "task", context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if executor is not None:
            return asyncio.wrap_future(executor.submit(func, *args), loop=self)
        future = self.create_future()

        def work() -> None:
            try:
                result, error = func(*args), None
            except BaseException as raised:  # noqa: BLE001 - it is raised where the result is waited for
                result, error = None, raised
            self.call_soon(_settle, future, result, error)

        self._threads += 1
        Actor(self.place, work, f"aside-{self._threads}").wake()
        return future

    # What an event loop has besides.

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        pass

    def is_running(self) -> bool:
        return events._get_running_loop() is self

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True

    def set_exception_handler(self, handler: Any) -> None:
        self._handler = handler

    def get_exception_handler(self) -> Any:
        return self._handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self._handler is not None:
            self._handler(self, context)
        else:
            self.unhandled.append(context)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        pass

    def remove_signal_handler(self, sig: int) -> bool:
        return False


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
