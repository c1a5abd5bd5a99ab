"""Loop: one process from start to exit code. Signals, supervised tasks, closing in reverse order.

starting ──▶ running ──SIGTERM, SIGINT, fatal──▶ stopping (closers, newest first) ──▶ exit
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

import uvloop

from kvproto.errors import KvfleetError
from kvproto.tasks import VitalTasks, end
from kvservice import logs
from kvservice.settings import ServiceSettings, load

log = logging.getLogger(__name__)
T = TypeVar("T")
S = TypeVar("S", bound=ServiceSettings)

CLOSE_TIMEOUT_S = 5.0
BEAT_S = 1.0
Closer = Callable[[], Awaitable[None]]


class Lifecycle:
    """Owned by the process's main coroutine. `close` runs the closers that `closing` registers, newest first."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.exit_code = 0
        self._closers: list[tuple[str, Closer, float]] = []
        self.tasks = VitalTasks(self.fatal)
        self.spawn = self.tasks.spawn
        self._beat_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        """How long the event loop has not run, about a second normally. For other threads."""
        return time.monotonic() - self._beat_at

    async def beat(self) -> None:
        while True:
            self._beat_at = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def closing(self, name: str, closer: Closer, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._closers.append((name, closer, timeout_s))

    def stop(self) -> None:
        self.stopping.set()

    def fatal(self, why: str) -> None:
        """End the process with exit code 1."""
        if not self.stopping.is_set():
            log.error("stopping: %s", why)
        self.exit_code = 1
        self.stopping.set()

    async def close(self) -> None:
        while self._closers:
            name, closer, timeout_s = self._closers.pop()
            try:
                await asyncio.wait_for(closer(), timeout_s)
            except Exception as error:  # noqa: BLE001 - a loop's top: the other closers must still run
                log.warning("closing %s: %s %s", name, type(error).__name__, error)
        await end(self.tasks.running)

    async def watch_parent(self, parent: int) -> None:
        """End with the process that started this one, even if that was killed."""
        while os.getppid() == parent:
            await asyncio.sleep(0.5)
        log.warning("the parent process is gone")
        self.stop()


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work (loading a model) in a thread that ends with the process, so that signals do not wait."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # from now on only the thread sets it

    def run_it() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting task gets it
            done.set_exception(error)

    threading.Thread(target=run_it, name="loading", daemon=True).start()
    return await asyncio.wrap_future(done)


def run_service(role: str, kind: type[S], serve: Callable[[S, Lifecycle], Awaitable[None]]) -> None:
    """A service's `main`: its settings, its logs, and `serve` until it stops."""
    program = f"kvfleet {role}"
    settings = load(kind, sys.argv[1:], program)
    logs.set_up(f"{role}-{settings.member}", settings)
    run(program, lambda life: serve(settings, life), parent_pid=settings.parent_pid)


def run(program: str, main: Callable[[Lifecycle], Awaitable[None]], *, parent_pid: int | None = None) -> None:
    """Run `main`, then until `stop`; exit 0, or 1 with one line if it could not start."""

    async def body() -> int:
        lifecycle = Lifecycle()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lifecycle.stop)
        lifecycle.spawn(lifecycle.beat(), "beat")
        if parent_pid is not None:
            lifecycle.spawn(lifecycle.watch_parent(parent_pid), "watch-parent")
        starting = asyncio.ensure_future(main(lifecycle))
        stopped = asyncio.ensure_future(lifecycle.stopping.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            else:
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
            await stopped
        except (KvfleetError, OSError) as error:
            sys.stderr.write(f"{program}: {getattr(error, 'strerror', None) or error}\n")
            lifecycle.exit_code = 1
        finally:
            stopped.cancel()
            await lifecycle.close()
        return lifecycle.exit_code

    sys.exit(uvloop.run(body()))
