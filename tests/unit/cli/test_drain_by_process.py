"""`kvfleet drain --pid`: what a container's preStop hook says. The worker is a process that ends as one does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from tests.support.waiting import LIMIT_S

DRAINS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep({takes}), sys.exit(0)))
print("up", flush=True)
while True:
    time.sleep(60)
"""


Start = Callable[[float], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(takes: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", DRAINS.format(takes=takes)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def drain(*arguments: str) -> tuple[int, str]:
    # nobody listens there: NATS is not to be asked
    result = CliRunner().invoke(app, ["drain", *arguments], env={"KVFLEET_NATS_URL": "nats://127.0.0.1:1"})
    return result.exit_code, result.output


def test_it_is_told_to_drain_and_ends(start: Start) -> None:
    worker = start(0.0)
    assert drain("--pid", str(worker.pid)) == (0, "")
    assert worker.wait(LIMIT_S) == 0


def test_one_that_takes_too_long_is_said(start: Start) -> None:
    worker = start(60.0)
    code, told = drain("--pid", str(worker.pid), "--wait", "0.3")
    assert (code, told) == (1, f"kvfleet: process {worker.pid} is still there after 0.3 s\n")
    worker.kill()
    worker.wait()
    assert drain("--pid", str(worker.pid), "--wait", "5")[0] == 0, "who is gone has drained"


def test_it_names_one_worker_alone() -> None:
    for other in (["w0"], ["--cheapest"]):
        code, told = drain("--pid", "1", *other)
        assert (code, told) == (2, "kvfleet: --pid says which worker: name no other\n")
