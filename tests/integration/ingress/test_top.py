"""`kvfleet top` as it is typed, before real worker loops and a real placement."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from ingress_rig import FLEET_KEY, Served, serve, start_placement, until
from typer.testing import CliRunner

from kvfleet.cli.commands import app
from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.subjects import Subjects
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

KEYS = f"""
[[keys]]
name = "alice"
sha256 = "{hash_key("alice")}"
tenant = "acme"

[[keys]]
name = "root"
sha256 = "{hash_key("root")}"
admin = true
"""
PROMPT = "Now is the winter of our discontent made glorious summer by this sun of York. " * 3


@pytest.fixture
async def served(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[Served]:
    workers = FakeFleet(nats_url, fleet_buckets)
    placement, connection = await start_placement(nats_url, fleet_buckets, "p0")
    for worker in ("w0", "w1"):
        await workers.start(worker, fleet_key=FLEET_KEY)
    served = await serve(nats_url, fleet_buckets, keys=KEYS)
    await until(lambda: len(list(placement.core.fleet.ready("demo").workers)) == 2)
    yield served
    await served.stop()
    await workers.stop()
    await placement.stop(grace_s=0)
    await connection.close()


async def top(served: Served, *flags: str) -> Any:
    command = ["top", f"--url={served.url}", "--interval=0.5", *flags]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def ask(served: Served, times: int, pause_s: float = 0.0) -> None:
    for _ in range(times):
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4}
        answer = await served.http.post("/v1/completions", json=body, headers={"authorization": "Bearer alice"})
        assert answer.status_code == 200, answer.text
        await asyncio.sleep(pause_s)


async def test_once_says_what_is_there_as_far_as_the_key_reaches(served: Served) -> None:
    await ask(served, 3)
    asking = asyncio.create_task(ask(served, 10, 0.1))
    as_json = await top(served, "--api-key=root", "--json")
    shown = await top(served, "--api-key=root")
    await asking
    assert (as_json.exit_code, shown.exit_code) == (0, 0), as_json.output + shown.output
    told = json.loads(as_json.stdout)
    assert told["stats"]["ready"] == 2
    assert set(told["workers"]) == {"w0", "w1"}
    assert 0.5 < told["hit_rate_last_minute"] <= 1.0
    assert told["tokens_per_s"] > 0
    assert {one["tenant"] for one in told["placements"]} == {"acme"}
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "workers ready 2 of 2, placements 1, vaults 0, models demo" in lines
    assert any(line.startswith("w0 ready demo ") for line in lines)
    assert any(line.startswith("device ") for line in lines)
    assert sum(" acme demo w" in line for line in lines) >= 1
    assert "\x1b" not in shown.stdout

    tenants = await top(served, "--api-key=alice", "--once", "--interval=0.1")
    assert tenants.exit_code == 0, tenants.output
    assert "workers and tiers need an admin key" in tenants.stdout
    assert "workers ready 2, placements 1, vaults 0, models demo" in tenants.stdout
    assert " acme " in tenants.stdout
    assert "oldest wait" not in tenants.stdout

    for flags, text in (
        ((), "no API key"),
        (("--api-key=wrong", "--json"), "this API key is not known"),
        (("--url=http://127.0.0.1:1",), "http://127.0.0.1:1: "),
    ):
        refused = await top(served, *flags)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert refused.stderr.startswith("kvfleet: ")
        assert text in refused.stderr
        assert refused.stderr.count("\n") == 1


class Terminal:
    """A pseudo-terminal of so many columns and lines with the command in it; `text` is all that was written."""

    def __init__(self, command: list[str], columns: int, lines: int) -> None:
        self.ours, self.theirs = pty.openpty()
        self.resize(columns, lines)
        self.mode = termios.tcgetattr(self.theirs)
        given = {name: said for name, said in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command,
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env=given | {"TERM": "xterm-256color"},
        )
        self.text = ""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, until: Callable[[str], bool], timeout_s: float = LIMIT_S) -> str:
        """What came until then."""
        found = ""
        end = time.monotonic() + timeout_s
        while not until(found):
            assert time.monotonic() < end, found[-4000:]
            if select.select([self.ours], [], [], 0.05)[0]:
                found += os.read(self.ours, 65536).decode(errors="replace")
        self.text += found
        return found

    def press(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


async def test_live_in_a_terminal(served: Served) -> None:
    """Both ends at once, since starting Python takes its time: q in one, SIGINT in the other."""
    await ask(served, 1)
    command = [sys.executable, "-P", "-m", "kvfleet.cli.main", "top", f"--url={served.url}", "--api-key=root"]
    terminals = [Terminal([*command, "--interval=0.2"], 120, 24) for _ in range(2)]
    try:
        for terminal in terminals:
            await asyncio.to_thread(terminal.read, lambda text: "q ends" in text)
            assert "\x1b[?1049h" in terminal.text, "the other screen"
            assert "oldest wait" in terminal.text
        first, second = terminals
        first.resize(70, 14)
        first.process.send_signal(signal.SIGWINCH)

        def is_narrow(text: str) -> bool:
            """Columns that do not fit are left out, once it has heard of it."""
            frame = text.split("\x1b[H")[-1]
            return "q ends" in frame and "oldest wait" not in frame

        await asyncio.to_thread(first.read, is_narrow)

        await served.go_away()
        await asyncio.to_thread(second.read, lambda text: f"{served.url}: " in text and "trying again" in text)
        await served.come_back()
        await asyncio.to_thread(second.read, lambda text: "q ends" in text.split("trying again")[-1])

        first.press(b"xq")
        second.process.send_signal(signal.SIGINT)
        for terminal in terminals:
            await asyncio.to_thread(terminal.read, lambda text: "\x1b[?1049l" in text)
            assert await asyncio.to_thread(terminal.process.wait, 10) == 0
            assert termios.tcgetattr(terminal.theirs) == terminal.mode
            assert "Traceback" not in terminal.text
    finally:
        for terminal in terminals:
            terminal.close()
