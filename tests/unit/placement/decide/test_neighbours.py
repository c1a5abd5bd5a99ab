"""When a request is referred to another region, and where a prompt's blocks are thought to be since."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.placement.decide.region_summaries import FAR_SOONER, TRACE_S, RegionSummaries
from kvproto.messages import RegionModel, RegionSummary, State, WorkerRecord
from kvproto.regions import FRESH_S, Regions, qualify, seal, split


def record(worker: str, model: str = "m", bundle: str = "b") -> WorkerRecord:
    return WorkerRecord(worker, "e", "l", State.READY, model, "", "h", 1, (1, 1), bundle=bundle)


def summary(region: str, wait_s: float = 0.0, ready: int = 1, placement: str = "p", model: str = "m") -> RegionSummary:
    return RegionSummary(region, placement, (RegionModel(model, ready, wait_s, record("w1", model)),))


def region_summaries(*heard: RegionSummary, now: float = 0.0) -> RegionSummaries:
    made = RegionSummaries("us", spill_s=2.0)
    for one in heard:
        made.regions.hear(one, now)
    return made


def test_it_stays_while_the_wait_is_short_and_goes_when_nobody_can() -> None:
    made = region_summaries(summary("eu"))
    assert made.refer("m", 2.0, (), 0.0) is None
    assert made.refer("m", 2.1, (), 0.0) == "eu"
    assert made.refer("m", None, (), 0.0) == "eu"
    assert made.refer("m", None, ("eu",), 0.0) is None
    assert made.refer("other", None, (), 0.0) is None
    assert made.referred_total == 2


def test_it_goes_to_whoever_waits_least_and_only_where_that_is_far_sooner() -> None:
    made = region_summaries(summary("eu", 3.0), summary("asia", 2.0))
    assert made.refer("m", 5.0, (), 0.0) == "asia"
    assert made.refer("m", 4.0, (), 0.0) is None, "twice as long, not more"
    assert made.refer("m", None, ("asia",), 0.0) == "eu", "whoever cannot be served here waits as long as it takes"


@given(st.floats(0, 100), st.floats(0, 100))
def test_two_regions_never_send_requests_to_each_other_at_once(us: float, eu: float) -> None:
    here, there = region_summaries(summary("eu", eu)), RegionSummaries("eu", spill_s=2.0)
    there.regions.hear(summary("us", us), 0.0)
    assert not (here.refer("m", us, (), 0.0) and there.refer("m", eu, (), 0.0))
    assert FAR_SOONER > 1


def test_a_region_that_says_nothing_or_has_nobody_is_not_counted_on() -> None:
    made = region_summaries(summary("eu", ready=0))
    assert made.refer("m", None, (), 0.0) is None
    made.regions.hear(summary("eu"), 1.0)
    assert made.refer("m", None, (), 1.0 + FRESH_S) == "eu"
    assert made.refer("m", None, (), 1.1 + FRESH_S) is None
    made.tick(1.1 + FRESH_S)
    assert made.regions.fresh_count == 0


def test_the_most_pessimistic_replica_of_a_region_is_believed() -> None:
    made = region_summaries(summary("eu", 0.0, placement="p1"), summary("eu", 9.0, placement="p2"))
    assert made.regions.ready("m", 0.0) == {"eu": 9.0}


def test_a_fleet_without_a_region_hears_nobody() -> None:
    made = RegionSummaries("", spill_s=2.0)
    made.regions.hear(summary("eu"), 0.0)
    assert made.refer("m", None, (), 0.0) is None
    own = region_summaries(summary("us"))
    assert own.refer("m", None, (), 0.0) is None, "its own summary is not another region's"


def hashes(count: int, seed: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(seed).integers(0, 2**63, size=(count, 2), dtype=np.uint64)


def test_what_continues_a_prompt_that_went_away_asks_there_if_it_is_worth_it() -> None:
    made = region_summaries(summary("eu"))
    chain = hashes(100)
    made.trace(chain[:80], "eu", 0.0)
    assert made.elsewhere(chain, 16, 0, 1000.0) == "eu"
    assert made.elsewhere(chain, 16, 80 * 16 - 90, 1000.0) == "", "90 tokens take less than a tenth of a second"
    assert made.elsewhere(chain[:79], 16, 0, 1000.0) == ""
    assert made.elsewhere(hashes(100, seed=2), 16, 0, 1000.0) == ""
    assert made.elsewhere(chain, 16, 0, 0.0) == "", "nothing was measured"
    made.check_integrity()
    (told,) = made.take_new()
    other = region_summaries(summary("eu"))
    other.learn(told, 0.0)
    assert other.elsewhere(chain, 16, 0, 1000.0) == "eu", "a replica knows what another one referred"
    other.refused(chain[:80])
    assert other.elsewhere(chain, 16, 0, 1000.0) == "", "it did not take it"
    made.regions.forget_silent(FRESH_S + 1)
    assert made.elsewhere(chain, 16, 0, 1000.0) == "", "a region that is gone is not asked"
    made.regions.hear(summary("eu"), TRACE_S)
    assert made.elsewhere(chain, 16, 0, 1000.0) == "eu"
    made.tick(TRACE_S + 1)
    made.check_integrity()
    assert made.elsewhere(chain, 16, 0, 1000.0) == ""


def test_names_across_regions() -> None:
    assert split("w1") == ("", "w1")
    assert split(qualify("eu", "w1")) == ("eu", "w1")


def test_a_seal_is_of_one_source_and_its_addresses() -> None:
    sealed = seal(b"key", "eu.w1", ("tcp:h:1",))
    assert sealed == seal(b"key", "eu.w1", ["tcp:h:1"])
    for other in (seal(b"k", "eu.w1", ("tcp:h:1",)), seal(b"key", "eu.w2", ("tcp:h:1",)), seal(b"key", "eu.w1", ())):
        assert sealed != other


@pytest.mark.parametrize("region", ["", "us"])
def test_regions_hears_only_others(region: str) -> None:
    made = Regions("us")
    made.hear(summary(region), 0.0)
    assert made.fresh_count == 0
