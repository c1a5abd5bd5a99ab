"""The seven names of a worker's load, from heartbeats and bookings."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st
from placement_build import a_beat, a_core, a_record, an_ask

from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import PlaceAsked, WorkerLeft, WorkerRegistered
from kvfleet.placement.workers.fleet import WorkerMetrics, metrics_of
from kvfleet.placement.workers.heard_demand import HITS_S, HITS_SAMPLE_S
from kvproto.messages import Heartbeat, Load, State


def shown(core: PlacementCore, booked: int = 0) -> WorkerMetrics:
    return metrics_of(core.fleet.workers["w1"], booked)


def beat(**load: int) -> Heartbeat:
    return Heartbeat("w1", "e1", State.READY, Load(**load))


def test_the_names_are_those_that_others_rely_on() -> None:
    assert [field.name for field in fields(WorkerMetrics)] == [
        "request_active_slots",
        "request_total_slots",
        "kv_active_blocks",
        "kv_total_blocks",
        "num_requests_waiting",
        "gpu_cache_usage_perc",
        "gpu_prefix_cache_hit_rate",
    ]


def test_a_heartbeat_is_shown_and_a_stranger_has_nothing() -> None:
    core = a_core("w1")
    assert shown(core) == WorkerMetrics()
    core.handle(beat(waiting=2, running=3, slots=8, blocks_used=25, blocks_total=100), 1.0)
    assert shown(core) == WorkerMetrics(3, 8, 25, 100, 2, 0.25, 0.0)
    core.handle(WorkerRegistered(a_record("w1", epoch="e2")), 2.0)
    assert shown(core) == WorkerMetrics()


def test_what_is_booked_takes_free_slots_first() -> None:
    core = a_core("w1")
    core.handle(beat(running=2, slots=4), 1.0)
    one = shown(core, booked=3)
    assert (one.request_active_slots, one.num_requests_waiting) == (4, 1)
    core.handle(beat(running=1, waiting=3, slots=4), 2.0)
    one = shown(core, booked=3)
    assert (one.request_active_slots, one.num_requests_waiting) == (1, 6), "who waits already goes first"


def test_the_hit_rate_is_that_of_the_last_minute() -> None:
    core = a_core("w1")
    core.handle(beat(prompt_tokens_total=1000, hit_tokens_total=900), 0.0)
    assert shown(core).gpu_prefix_cache_hit_rate == 0.0, "what was before is not known to be recent"
    core.handle(beat(prompt_tokens_total=1100, hit_tokens_total=925), 0.5)
    assert shown(core).gpu_prefix_cache_hit_rate == 0.25
    for second in range(1, 200):
        core.handle(beat(prompt_tokens_total=1100 + second * 10, hit_tokens_total=925 + second * 8), second)
    assert shown(core).gpu_prefix_cache_hit_rate == 0.8
    for second in (199 + HITS_SAMPLE_S, 199 + HITS_SAMPLE_S + HITS_S):
        core.handle(beat(prompt_tokens_total=3090, hit_tokens_total=2517), second)
    assert shown(core).gpu_prefix_cache_hit_rate == 0.0, "nothing came since"


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from([0.0, 0.5, 7.0, 61.0, 500.0])), max_size=60
    )
)
def test_shares_stay_shares_and_memory_is_bounded(steps: list[tuple[int, int, float]]) -> None:
    core = a_core("w1")
    now, prompt, hit = 0.0, 0, 0
    for tokens, found, passed in steps:
        now, prompt, hit = now + passed, prompt + tokens, hit + min(found, tokens)
        core.handle(beat(prompt_tokens_total=prompt, hit_tokens_total=hit, blocks_used=9, blocks_total=5), now)
        one = shown(core)
        assert 0.0 <= one.gpu_prefix_cache_hit_rate <= 1.0
        assert one.gpu_cache_usage_perc == 1.0
        assert len(core.fleet.workers["w1"].demand.hits) <= HITS_S / HITS_SAMPLE_S + 2


def test_the_core_keeps_them_for_one_life_of_a_worker() -> None:
    core = a_core("w1")
    core.handle(a_beat("w1", running=3), 1.0)
    core.handle(PlaceAsked("_ing.x", "public", an_ask()), 1.1)
    one = shown(core, core.bookings.requests_at("w1"))
    assert (one.request_active_slots, one.num_requests_waiting) == (3, 1)
    core.handle(a_beat("w1", epoch="e0", running=9), 1.2)
    assert shown(core, core.bookings.requests_at("w1")).request_active_slots == 3, "of a former life"
    core.handle(WorkerRegistered(a_record("w1", epoch="e2")), 2.0)
    assert shown(core, core.bookings.requests_at("w1")) == WorkerMetrics()
    core.handle(a_beat("w1", epoch="e2", running=1), 2.1)
    core.handle(WorkerLeft("w1"), 3.0)
    assert not core.fleet.workers
    core.handle(WorkerRegistered(a_record("w1")), 4.0)
    assert shown(core, core.bookings.requests_at("w1")) == WorkerMetrics()
