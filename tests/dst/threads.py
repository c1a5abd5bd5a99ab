"""Threads, locks, clocks and chance of this process, as the hub has them. `install` comes before the product is
imported, in a process that does nothing else.

Only the lowest layer is replaced: threads are actors, locks let others run. Conditions, queues, events and pools of the
standard library are built on these.
"""

from __future__ import annotations

import _thread
import asyncio
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from greenlet import GreenletExit, getcurrent

from tests.dst.hub import Actor, Hub, current_actor

CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time")
REAL: dict[str, Callable[..., Any]] = {
    name: getattr(time, name) for name in (*CLOCKS, *(f"{one}_ns" for one in CLOCKS), "time", "time_ns", "sleep")
} | {"urandom": os.urandom}


class _Present:
    """The hub of the run that goes on."""

    hub = Hub(0)
    numbers = count(1)  # of objects in sets


def begin(hub: Hub) -> None:
    _Present.hub, _Present.numbers = hub, count(1)
    random.seed(hub.random.getrandbits(64))


class SimLock:
    """As `threading.Lock`."""

    __slots__ = ("__weakref__", "_held", "_waiting")

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[tuple[Actor, list[bool]]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._held:
            self._held = True
            return True
        hub = _Present.hub
        if not blocking or hub.is_over:
            return hub.is_over
        me, got = current_actor(), [False]
        self._waiting.append((me, got))
        end = None if timeout < 0 else hub.now + timeout
        timer = None if end is None else hub.at(end, me.wake)
        while not got[0]:
            me.wait()
            if end is not None and hub.now >= end and not got[0]:
                self._waiting = deque(one for one in self._waiting if one[1] is not got)
                return False
        if timer is not None:
            timer.cancel()
        return True

    def release(self) -> None:
        if not self._held:
            if _Present.hub.is_over:
                return
            raise RuntimeError("release unlocked lock")
        while self._waiting:
            waiting, got = self._waiting.popleft()
            if not waiting.place.is_dead:
                got[0] = True  # it has it now
                waiting.wake()
                return
        self._held = False

    def locked(self) -> bool:
        return self._held

    acquire_lock, release_lock, locked_lock = acquire, release, locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


def _start(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> int:
    def work() -> None:
        try:
            function(*args, **(kwargs or {}))
        finally:
            sentinel = _SENTINELS.pop(id(getcurrent()), None)
            if sentinel is not None and sentinel.locked():
                sentinel.release()

    actor = Actor(_Present.hub.here, work, getattr(function, "__qualname__", "thread"))
    actor.wake()
    return id(actor.greenlet)


_SENTINELS: dict[int, SimLock] = {}


def _set_sentinel() -> SimLock:
    made = _SENTINELS[id(getcurrent())] = SimLock()
    return made


def _ident() -> int:
    return id(getcurrent())


def _now() -> float:
    return _Present.hub.now


def _wall() -> float:
    return _Present.hub.wall


def _sleep(delay_s: float) -> None:
    _Present.hub.sleep(delay_s)


async def _sleep_on_loop(delay: float, result: Any = None) -> Any:
    """As `asyncio.sleep`, with one callback less."""
    if delay <= 0:
        return await _USUAL_SLEEP(0, result)
    hub, future = _Present.hub, asyncio.get_running_loop().create_future()
    timer = hub.at(hub.now + delay, partial(_over, future, result))
    try:
        return await future
    finally:
        timer.cancel()


def _over(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


_USUAL_SLEEP = asyncio.sleep


def _urandom(size: int) -> bytes:
    return _Present.hub.random.randbytes(size)


def _excepthook(args: Any) -> None:
    if not issubclass(args.exc_type, GreenletExit):
        _USUAL_HOOK(args)


_USUAL_HOOK = threading.excepthook


def _numbered(one: Any) -> int:
    """A hash that does not hang on where in memory it is, for objects that stand in sets."""
    number: int | None = getattr(one, "_number", None)
    if number is None:
        number = one._number = next(_Present.numbers)
    return number


def number(*kinds: type) -> None:
    """Their objects are told apart by the order in which they were first asked for a hash."""
    for kind in kinds:
        kind.__hash__ = _numbered  # type: ignore[method-assign, assignment]


def install() -> None:
    threading.excepthook = _excepthook
    number(threading.Thread)
    for module in (_thread, threading):
        for name, made in (
            ("allocate_lock", SimLock), ("_allocate_lock", SimLock), ("Lock", SimLock), ("LockType", SimLock),
            ("start_new_thread", _start), ("_start_new_thread", _start), ("get_ident", _ident),
            ("_set_sentinel", _set_sentinel), ("_CRLock", None),
        ):  # fmt: skip
            if hasattr(module, name):
                setattr(module, name, made)
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[misc, attr-defined]
    threading._time = queue.time = _now  # type: ignore[attr-defined]
    for name in CLOCKS:
        setattr(time, name, _now)
        setattr(time, f"{name}_ns", lambda: int(_now() * 1e9))
    time.time, time.time_ns, time.sleep = _wall, lambda: int(_wall() * 1e9), _sleep
    asyncio.sleep = asyncio.tasks.sleep = _sleep_on_loop  # type: ignore[assignment]
    os.getpid = lambda: 1
    os.urandom = random._urandom = _urandom  # type: ignore[attr-defined]
