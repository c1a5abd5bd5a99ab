"""Tasks that swallow a cancellation are ended all the same."""

from __future__ import annotations

import asyncio

from kvproto.tasks import end


async def test_a_task_that_swallows_its_first_cancellation_ends_too() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    async def failing() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("in its cleaning up")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end(tasks)
    assert all(task.done() for task in tasks)
    assert swallowed == 2
    await end([])
