"""Seeds of the simulated fleet keep every promise, and run again as they ran; nothing of the machine is below them."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

TWICE, PART = 20, 5  # seeds, and of one test
PARTS, SEEDS = 10, 20  # of the day: each as long as a test may be on a busy machine


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.dst", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=230)


def lines_of(first: int, seeds: int, *more: str) -> list[str]:
    """A line a seed, with a digest of all that happened, and when, to the last bit."""
    done = ran("run", "--first", str(first), "--seeds", str(seeds), *more)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[:-1]


def seeds_of_the_day(part: int) -> list[str]:
    """Others each day; a failure prints its own."""
    first = datetime.now(UTC).toordinal() * 1000 + part * SEEDS
    return lines_of(first, SEEDS, "--jobs", "1")


def test_nothing_is_real_below_it() -> None:
    done = ran("guard")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-3000:]


@pytest.mark.parametrize("first", range(1, 1 + TWICE, PART))
def test_a_seed_runs_again_as_it_ran(first: int) -> None:
    """In other processes, and in another order."""
    lines = lines_of(first, PART, "--jobs", "1")
    assert lines == lines_of(first, 2, "--jobs", "2") + lines_of(first + 2, PART - 2)
    assert len(set(lines)) == PART


@pytest.mark.parametrize("part", range(PARTS))
def test_seeds_of_the_day(part: int) -> None:
    assert len(seeds_of_the_day(part)) == SEEDS
