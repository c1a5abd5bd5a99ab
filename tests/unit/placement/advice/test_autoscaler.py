"""What there is to do, measured from heartbeats and refusals, and who gets nothing new because it is about to go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_build import MODEL, a_beat, a_core, a_record, an_ask
from placement_rig import Rig, tokens

from kvfleet.placement.advice.autoscale import Rules
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.events import Fail, PlaceAsked, Tick, WorkerRegistered
from kvfleet.placement.settings import PlacementSettings
from kvfleet.placement.workers.heard_demand import HeardDemand
from kvfleet.placement.workers.prompts import HashedPrompts
from kvproto.errors import NoWorkers
from kvproto.messages import SPARE_PRIORITY, BookedBatch, Heartbeat, Load, ModelSignals, PriorityLoad, Rates, State

RATE = 1000.0


def a_scaled_core(name: str = "p0", *, by_ordinal: bool = False, rules: Rules | None = None) -> PlacementCore:
    return PlacementCore(
        name,
        f"_plc.{name}",
        lambda: 0.5,
        PlacementConfig(index_blocks=4096, rules=rules or Rules(minimum=0), models=(MODEL,), by_ordinal=by_ordinal),
        prompts=HashedPrompts(b"key"),
        unix_ms=lambda: 0,
    )


def signals(core: PlacementCore) -> ModelSignals:
    (one,) = core.autoscaler.signals()
    return one


def beat(core: PlacementCore, worker: str, now: float, load: Load, rate: float = RATE) -> None:
    core.handle(Heartbeat(worker, "e1", State.READY, load, Rates(rate)), now)


def run(core: PlacementCore, seconds: float, load: Load, *workers: str, since: float = 0.0) -> float:
    """Half a second after the other, with these loads."""
    now = since
    while now < since + seconds:
        for worker in workers:
            beat(core, worker, now, load)
        core.handle(Tick(), now)
        now += 0.5
    return now


def test_work_is_how_busy_workers_are() -> None:
    core = a_scaled_core()
    for worker in ("w0", "w1"):
        core.handle(WorkerRegistered(a_record(worker)), 0.0)
    busy, idle = Load(running=1, slots=8, queued_prefill_tokens=50), Load(slots=8)
    now = 0.0
    while now < 120:
        beat(core, "w0", now, busy)
        beat(core, "w1", now, busy if now % 2 < 1 else idle)
        core.handle(Tick(), now)
        now += 0.5
    assert signals(core).parts["work"] == pytest.approx(1.5, abs=0.1)


def test_work_is_more_than_busy_where_more_comes_than_is_fed() -> None:
    core = a_scaled_core()
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    for step in range(240):
        now = 0.5 * step  # 2,000 tokens come a second, 1,000 are fed
        load = Load(running=1, slots=99, queued_prefill_tokens=int(1000 * now), fed_tokens_total=int(1000 * now))
        beat(core, "w0", now, load)
        core.handle(Tick(), now)
    assert signals(core).parts["work"] == pytest.approx(2.0, rel=0.05)


def test_the_queue_is_measured_against_the_target() -> None:
    core = a_scaled_core(rules=Rules(target_ttft_s=4.0))
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    run(core, 6, Load(waiting=1, slots=8, queued_prefill_tokens=3000, oldest_wait_s=2.5), "w0")
    assert signals(core).parts["queue"] == pytest.approx(0.75)
    assert signals(core).oldest_wait_s == pytest.approx(2.5, abs=0.6)
    assert signals(core).queue_depth == 1


def test_slots_and_blocks_count_too() -> None:
    core = a_scaled_core()
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    run(core, 6, Load(running=6, waiting=2, slots=8, blocks_used=60, blocks_total=100), "w0")
    assert signals(core).parts["slots"] == pytest.approx(1.0)
    assert signals(core).parts["blocks"] == pytest.approx(0.6)
    assert signals(core).saturation == pytest.approx(1.0)


def test_work_that_may_wait_keeps_a_worker_and_wants_no_further_one() -> None:
    core = a_scaled_core()
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    spare = PriorityLoad(SPARE_PRIORITY, 8, 8, 5000)
    load = Load(running=8, slots=8, blocks_used=90, blocks_total=100, queued_prefill_tokens=5000, priorities=(spare,))
    run(core, 1000, load, "w0")
    told = signals(core)
    assert (told.saturation, told.desired) == (0.0, 1)
    run(core, 1000, Load(slots=8), "w0", since=1000.0)
    assert signals(core).desired == 0


def test_who_is_not_heard_of_makes_the_sample_unknown() -> None:
    core = a_scaled_core()
    for worker in ("w0", "w1"):
        core.handle(WorkerRegistered(a_record(worker)), 0.0)
    now = run(core, 10, Load(slots=8), "w0", "w1")
    assert signals(core).known
    assert signals(core).settled_s > 0
    run(core, 10, Load(slots=8), "w0", since=now)
    assert not signals(core).known
    assert signals(core).settled_s == 0


def test_before_the_first_sample_nothing_is_known() -> None:
    core = a_scaled_core(rules=Rules(minimum=1))
    core.handle(WorkerRegistered(a_record("w0")), 0.0)
    core.handle(WorkerRegistered(a_record("w1")), 0.0)
    assert (signals(core).desired, signals(core).known) == (1, False)
    beat(core, "w0", 0.0, Load(slots=8))
    beat(core, "w1", 0.0, Load(slots=8))
    core.handle(Tick(), 0.0)
    assert (signals(core).desired, signals(core).known) == (2, True)


def test_what_was_refused_is_told_to_the_other_replicas_and_counts_once() -> None:
    asked, told = a_scaled_core("p0"), a_scaled_core("p1")
    for now in (0.0, 1.0, 2.0):  # the same request comes again and again
        actions = asked.handle(PlaceAsked("_INBOX.x", "public", an_ask("r1")), now)
        assert any(isinstance(one, Fail) and one.failed.code == NoWorkers.code for one in actions)
        for one in actions:
            if isinstance(one, BookedBatch):
                told.handle(BookedBatch("p0", one.items, one.refused), now)
        for core in (asked, told):
            core.handle(Tick(), now)
    for core in (asked, told):
        core.handle(Tick(), 8.0)
        assert signals(core).queue_depth == 1
        assert signals(core).desired == 1
        assert signals(core).oldest_wait_s == pytest.approx(8.0)
    for core in (asked, told):
        core.handle(Tick(), 100.0)
        assert signals(core).queue_depth == 0
        assert signals(core).desired == 1  # who is on the way is not called back


def test_names_that_requests_invent_are_no_demand() -> None:
    core = a_scaled_core()
    core.handle(PlaceAsked("_INBOX.x", "public", an_ask("r1", model="invented")), 0.0)
    core.handle(Tick(), 10.0)
    assert [one.model for one in core.autoscaler.signals()] == [MODEL]


def test_signals_are_in_the_stats() -> None:
    core = a_core("w0")
    core.handle(a_beat("w0", running=1), 0.0)
    core.handle(Tick(), 0.0)
    (one,) = core.stats().models
    assert (one.model, one.desired, one.ready, one.living) == (MODEL, 1, 1, 1)


def test_busy_is_a_share_of_heartbeats_within_the_window() -> None:
    heard = HeardDemand()
    for step in range(100):
        load = Load(queued_prefill_tokens=5 if step >= 50 else 0)
        heard.hear(load, 0.5 * step)
        heard.sample(load, 0.5 * step, 10.0)
    assert heard.busy_share == pytest.approx(1.0)
    assert len(heard.totals) <= 22


# ------------------------------------------------------------------ who is about to go


def test_the_highest_ordinal_gets_nothing_new_while_it_is_to_go() -> None:
    rig = Rig("w-2", "w-9", "w-10")
    held = tokens(1, 640)
    rig.store("w-10", held)
    assert rig.place("before", (*held, *tokens(2, 20))).worker == "w-10"
    rig.core.fleet.next_to_go["demo"] = "w-10"  # as a pending scale-down sets it
    assert rig.place("continues", (*held, *tokens(3, 20))).worker == "w-10"  # its blocks are nowhere else
    fresh = {rig.place(f"new{number}", tokens(10 + number, 640)).worker for number in range(12)}
    assert fresh == {"w-2", "w-9"}
    assert rig.place("named", tokens(99, 64), policy="direct", worker="w-10").worker == "w-10"


def test_a_pending_scale_down_names_the_highest_ordinal() -> None:
    rules = Rules(minimum=1, up_s=1.8, down_s=1.8)
    core = a_scaled_core(by_ordinal=True, rules=rules)
    for worker in ("w-2", "w-9", "w-10"):
        core.handle(WorkerRegistered(a_record(worker)), 0.0)
    core.handle(Tick(), 0.0)
    assert core.fleet.next_to_go.get(MODEL) is None
    run(core, 4, Load(slots=8), "w-2", "w-9", "w-10")
    assert signals(core).desired == 2
    assert signals(core).next_ordinal == "w-10"
    assert core.fleet.next_to_go.get(MODEL) == "w-10"
    by_cost = a_scaled_core(rules=rules)
    for worker in ("w-2", "w-10"):
        by_cost.handle(WorkerRegistered(a_record(worker)), 0.0)
    run(by_cost, 4, Load(slots=8), "w-2", "w-10")
    assert signals(by_cost).desired == 1
    assert by_cost.fleet.next_to_go.get(MODEL) is None


# ------------------------------------------------------------------ settings


def test_settings_become_rules() -> None:
    settings = PlacementSettings(models=" a, b,,a ", min_replicas=2, max_replicas=5, target_ttft_s=1.5)
    config = settings.config()
    assert config.models == ("a", "b")
    assert config.rules == replace(Rules(), minimum=2, maximum=5, target_ttft_s=1.5, aim=pytest.approx(0.6))


def test_settings_that_say_nothing_are_the_defaults() -> None:
    assert replace(PlacementSettings().config(), rules=Rules()) == PlacementConfig()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"min_replicas": 5, "max_replicas": 4}, "is more than"), ({"scale_down_below": 0.5}, "at most half")],
)
def test_limits_in_the_wrong_order_are_refused(wrong: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PlacementSettings(**wrong)  # type: ignore[arg-type]
