"""Seeds see what breaks when one line of the product is another."""

from __future__ import annotations

import pytest

from tests.dst import mutate
from tests.dst.test_dst import ran
from tests.dst.test_dst_more import REPEATED

LEAST = 25


def test_there_are_enough_and_they_apply() -> None:
    assert len(mutate.names()) >= LEAST
    for name in mutate.names():
        mutation = mutate.read(name)
        compile(mutation.applied(), mutation.path, "exec")
        assert mutation.told
        assert mutation.seed is not None


@pytest.mark.parametrize("name", mutate.names())
def test_it_is_found(name: str) -> None:
    """By the seed in its file."""
    done = ran("run", "--seeds", "1", "--first", str(mutate.read(name).seed), "--mutation", name)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "WRONG" in done.stdout


@pytest.mark.parametrize("seed", sorted({mutate.read(name).seed or 1 for name in mutate.names()} - {*REPEATED}))
def test_without_it_nothing_is(seed: int) -> None:
    done = ran("run", "--seeds", "1", "--first", str(seed))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
