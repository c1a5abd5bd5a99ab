"""`kvfleet bench paper`, as users type it. What is a property must hold here; what is a time may be otherwise on a busy
machine, so that a criterion of that kind is judged and not asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvfleet.cli.paper.paper_work import TABLES
from tests.support.bench_command import COMMAND
from tests.support.up import command_of
from tests.support.waiting import wait_until

OF_TIME = ("first token", "tokens/s")  # what such criteria speak of
QUICK = ("oom", "snr")
MOST_S = 230.0  # of one table: fleets that start, beside other work


def paper(*flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the last line of stdout."""
    done = subprocess.run(
        [*COMMAND, "paper", *flags, "--json"], capture_output=True, text=True, timeout=MOST_S, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def check(name: str) -> None:
    code, found = paper(name, "--quick")
    assert (code == 0) is found["met"]
    assert found["quick"] is True
    assert "core" in found["machine"]
    (table,) = found["tables"]
    assert (table["name"], table["error"]) == (name, None)
    assert table["rows"]
    assert all("paper" in row for row in table["rows"])
    assert table["criteria"]
    properties = [one for one in table["criteria"] if not one["says"].startswith(OF_TIME)]
    assert [one for one in properties if not one["met"]] == []
    assert table["met"] is all(one["met"] for one in table["criteria"])


@pytest.mark.parametrize("name", QUICK)
def test_a_table(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in QUICK])
def test_a_long_table(name: str) -> None:
    check(name)


def test_tables_beside_each_other_and_in_the_terminal() -> None:
    """Those of one fleet share it; a pipe gets the tables as text."""
    done = subprocess.run(
        [*COMMAND, "paper", "--quick", "snr"], capture_output=True, text=True, timeout=MOST_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "snr: int8 by groups of a head",
        "52 dB at least",
        "met      dB of the worst block",
        "1 of 1 tables met",
    ):
        assert line in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_and_no_folder(number: int, tmp_path: Path) -> None:
    """The fleet that it started ends with it."""
    asked = subprocess.Popen(
        [*COMMAND, "paper", "--quick", "oom"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )  # fmt: skip
    mine = str(asked.pid)

    def fleets() -> list[int]:
        folders = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [int(entry.name) for entry in folders if _parent(entry) == mine and "up" in command_of(int(entry.name))]

    wait_until(lambda: bool(fleets()))
    (fleet,) = fleets()
    time.sleep(0.5)
    asked.send_signal(number)
    _, told = asked.communicate(timeout=MOST_S)
    assert asked.returncode == 130, told
    assert told.splitlines()[-1] == "kvfleet: interrupted"
    assert not command_of(fleet)
    assert list(tmp_path.iterdir()) == []


def _parent(process: Path) -> str:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
    except (OSError, IndexError):
        return ""
