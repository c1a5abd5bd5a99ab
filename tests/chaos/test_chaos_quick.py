"""The chaos suite's quick form: a whole fleet of processes, every kind of fault once, and every promise kept.

It runs last: kernels are compiled by then. `make chaos` is the long one. A failure prints the seed, the promises that
were not kept and the requests' histories.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cases import Wanted
from tests.chaos.report import page
from tests.chaos.run import Plan, run, tell
from tests.chaos.schedule import kinds_in
from tests.chaos.timeline import timeline

QUICK = Plan(seed=24, duration_s=30.0, faults=20, cases=Wanted(8, 16), users=(3, 7))


@pytest.mark.last
@pytest.mark.usefixtures("sockets_of_nats_py")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_every_promise_is_kept(tmp_path: Path) -> None:
    outcome = await run(QUICK, tmp_path)
    assert not outcome.verdict.violations, tell(outcome)
    counts = outcome.verdict.counts
    assert {one.fault.kind for one in outcome.history.faults} == set(kinds_in(QUICK.layout))
    assert counts["finished"] > 50, counts
    assert counts["tokens"] > 3000, counts
    assert outcome.history.counts["canaries"] > 5
    assert outcome.history.counts["tokens from vault"] + outcome.history.counts["tokens from peer"] > 0, (
        "tiers are used"
    )
    text = page(QUICK.seed, 1.0, outcome.history, QUICK.layout, outcome.verdict, outcome.near_ties)
    assert "| **requests lost** | **0** |" in text
    assert all(kind.value in text for kind in kinds_in(QUICK.layout))
    assert timeline(outcome.history, QUICK.layout).startswith("<svg")
