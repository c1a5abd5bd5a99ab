"""The alarm: on time, early when told, and patient after a stall."""

from __future__ import annotations

import asyncio
import time

from kvfleet.placement.io.timing import TICK_S, StallTimer


async def test_rings_early_when_told_and_steadily_otherwise() -> None:
    loop = asyncio.get_running_loop()
    rings: list[float] = []
    stall_timer = StallTimer(lambda: rings.append(loop.time()))
    began = loop.time()
    stall_timer.set(None)
    stall_timer.set(began + 0.02)
    await asyncio.sleep(0.02 + 2.5 * TICK_S)
    stall_timer.stop()
    assert 0.02 <= rings[0] - began < TICK_S
    assert len(rings) >= 2


async def test_after_a_stall_what_waits_is_read_first() -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []
    stall_timer = StallTimer(lambda: order.append("alarm"))
    stall_timer.set(loop.time() + 0.01)
    reader, writer = asyncio.Queue[str](), asyncio.create_task(asyncio.sleep(0))

    async def read() -> None:
        order.append(await reader.get())

    task = asyncio.create_task(read())
    await writer
    time.sleep(0.06)  # the whole loop stalls, past the alarm
    loop.call_soon(lambda: loop.call_soon(lambda: reader.put_nowait("answer")))  # takes turns of the loop to arrive
    await asyncio.sleep(0.06)
    stall_timer.stop()
    await task
    assert order[:2] == ["answer", "alarm"]


async def test_is_silent_once_stopped() -> None:
    rings: list[int] = []
    stall_timer = StallTimer(lambda: rings.append(1))
    stall_timer.set(None)
    stall_timer.stop()
    stall_timer.set(asyncio.get_running_loop().time())
    await asyncio.sleep(1.5 * TICK_S)
    assert rings == []
