"""More seeds of the day, and more that run twice."""

from __future__ import annotations

import pytest

from tests.dst.test_dst import PART, PARTS, SEEDS, TWICE, check_again, seeds_of_the_day

MORE = 8
REPEATED = range(TWICE[0], TWICE[0] + 20)


@pytest.mark.parametrize("part", range(PARTS, PARTS + MORE))
def test_more_seeds_of_the_day(part: int) -> None:
    assert 1 <= len(seeds_of_the_day(part)) <= SEEDS


@pytest.mark.parametrize("first", REPEATED[PART::PART])
def test_more_seeds_run_again_as_they_ran(first: int) -> None:
    check_again(first)
