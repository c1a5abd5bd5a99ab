"""More seeds of the day."""

from __future__ import annotations

import pytest

from tests.dst.test_dst import PARTS, SEEDS, seeds_of_the_day

MORE = 15


@pytest.mark.parametrize("part", range(PARTS, PARTS + MORE))
def test_more_seeds_of_the_day(part: int) -> None:
    assert len(seeds_of_the_day(part)) == SEEDS
