"""Waiting for what must come: how long a test does, and until a condition holds.

A limit here says only when a test gives up, never how fast something is: other work may hold the machine's cores. A
promise in seconds is asserted where it is tested, with its own number; so is a pause in which nothing may come.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 60.0
PAUSE_S = 0.005

Found = TypeVar("Found")
Told = str | Callable[[], str]  # said of a condition that did not come to hold; by default its source


async def until(
    condition: Callable[[], Found], limit_s: float = LIMIT_S, *, told: Told = "", pause_s: float = PAUSE_S
) -> Found:
    """What the condition returns once that is true. Raises AssertionError after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, _words(condition, limit_s, told)
        await asyncio.sleep(pause_s)
    return found


def wait_until(
    condition: Callable[[], Found], limit_s: float = LIMIT_S, *, told: Told = "", pause_s: float = PAUSE_S
) -> Found:
    """As `until`, where no event loop runs."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, _words(condition, limit_s, told)
        time.sleep(pause_s)
    return found


def _words(condition: Callable[[], object], limit_s: float, told: Told) -> str:
    if not told:
        try:
            told = inspect.getsource(condition).strip()
        except (OSError, TypeError):  # it has none: a bound method of a built-in type, a partial
            told = repr(condition)
    return f"not within {limit_s:g} s: {told if isinstance(told, str) else told()}"
