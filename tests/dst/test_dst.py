"""Seeds of the simulated fleet keep every promise, and run again as they ran; nothing of the machine is below them."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

PART = 2  # seeds that one test runs twice
HYBRID = 40  # the first seed of those with recurrent states
TWICE = (1, HYBRID)
PARTS, SEEDS = 4, 20  # of the day
WITHIN_S = 30  # four beside each other on two cores; a slow machine runs fewer in it


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.dst", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def lines_of(first: int, seeds: int, *more: str) -> list[str]:
    """A line a seed, with a digest of all that happened, and when, to the last bit."""
    done = ran("run", "--first", str(first), "--seeds", str(seeds), *more)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[:-1]


def seeds_of_the_day(part: int) -> list[str]:
    """Others each day; a failure prints its own."""
    first = datetime.now(UTC).toordinal() * 1000 + part * SEEDS
    return lines_of(first, SEEDS, "--jobs", "1", "--within", str(WITHIN_S))


def test_nothing_is_real_below_it() -> None:
    done = ran("guard")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr[-3000:]


def check_again(first: int) -> None:
    """In other processes, and in another order."""
    lines = lines_of(first, PART, "--jobs", "1")
    assert lines == lines_of(first, 1, "--jobs", "2") + lines_of(first + 1, PART - 1)
    assert len(set(lines)) == PART


@pytest.mark.parametrize("first", TWICE)
def test_a_seed_runs_again_as_it_ran(first: int) -> None:
    check_again(first)


@pytest.mark.parametrize("part", range(PARTS))
def test_seeds_of_the_day(part: int) -> None:
    assert 1 <= len(seeds_of_the_day(part)) <= SEEDS
