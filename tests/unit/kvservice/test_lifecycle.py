"""A process's life: closers newest first, a failure is exit code 1 and one line, a signal is exit code 0."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from kvservice.lifecycle import Lifecycle, in_daemon_thread
from tests.support.waiting import LIMIT_S

PROGRAM = """
import asyncio, sys, time
from kvproto.errors import Unavailable
from kvservice import lifecycle

async def main(life):
    async def close():
        print("closed", flush=True)
    life.closing("thing", close)
    if sys.argv[1] == "refuse":
        raise Unavailable("no NATS server answers at x")
    if sys.argv[1] == "slow":
        print("up", flush=True)
        await asyncio.sleep(60)
    if sys.argv[1] == "loading":
        print("up", flush=True)
        await lifecycle.in_daemon_thread(lambda: time.sleep(60))
    if sys.argv[1] == "crash":
        async def broken():
            raise RuntimeError("boom")
        life.spawn(broken(), "loop")
    print("up", flush=True)

lifecycle.run("prog", main)
"""


async def test_closers_run_newest_first_and_one_that_fails_stops_none() -> None:
    life = Lifecycle()
    order: list[str] = []

    def closer(name: str, fails: bool = False):  # type: ignore[no-untyped-def]
        async def close() -> None:
            order.append(name)
            if fails:
                raise RuntimeError(name)

        return close

    life.closing("a", closer("a"))
    life.closing("b", closer("b", fails=True))
    life.closing("c", closer("c"))
    await life.close()
    assert order == ["c", "b", "a"]
    assert life.exit_code == 0


async def test_a_task_that_fails_ends_the_process() -> None:
    life = Lifecycle()

    async def broken() -> None:
        raise RuntimeError("boom")

    life.spawn(broken(), "loop")
    await asyncio.wait_for(life.stopping.wait(), LIMIT_S)
    assert life.exit_code == 1
    await life.close()


async def test_the_parents_end_ends_the_child() -> None:
    life = Lifecycle()
    life.spawn(life.watch_parent(os.getppid() + 1), "watch-parent")
    await asyncio.wait_for(life.stopping.wait(), LIMIT_S)
    assert life.exit_code == 0
    await life.close()


@pytest.mark.parametrize(
    ("mode", "code", "says"), [("refuse", 1, "prog: no NATS server answers at x"), ("crash", 1, "loop failed: boom")]
)
def test_exit_codes(mode: str, code: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == code
    assert says in done.stderr
    assert "closed" in done.stdout


@pytest.mark.parametrize("mode", ["fine", "slow", "loading"])
def test_a_signal_is_a_clean_end_even_while_starting(mode: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "closed\n"
        assert process.wait(LIMIT_S) == 0


async def test_a_daemon_threads_result_and_error_come_back() -> None:
    assert await in_daemon_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0)
