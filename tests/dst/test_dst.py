"""Seeds of the simulated fleet keep every promise, and run again as they ran."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

FIRST, SEEDS = 1, 3  # that run twice


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.dst", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def lines_of(first: int, seeds: int) -> list[str]:
    done = ran("--first", str(first), "--seeds", str(seeds))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[:-1]


def test_a_seed_runs_again_as_it_ran() -> None:
    """In another process, with what happened, and when, to the last bit."""
    assert lines_of(FIRST, SEEDS) == lines_of(FIRST, SEEDS)


def test_seeds_of_the_day() -> None:
    """Others each day; a failure prints its own."""
    assert len(lines_of(datetime.now(UTC).toordinal() * 1000, 6)) == 6
