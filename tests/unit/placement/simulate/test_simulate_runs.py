"""Whole simulations: nothing is lost, nothing depends on anything but trace, fleet and seed."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from simulate_build import BLOCK, a_row, a_trace, conversations, run

from kvfleet.placement.simulate.figures import (
    Outcome,
    SimulationRun,
    attainable_tokens,
    capacity_speed,
    figures,
    load_cov,
    moved_per_change,
    moves,
    ttfts,
)
from kvfleet.placement.simulate.fleet_shape import Delays, FleetShape, Speed
from kvfleet.placement.simulate.study import POLICIES, make_study
from kvfleet.placement.simulate.trace import Trace
from kvservice import launch

TRACE = conversations()
SLOW = Speed(prefill_tokens_per_s=2000.0, chunk_tokens=256)
SHAPE = FleetShape(workers=4, cache_blocks=300, speed=SLOW)


@pytest.mark.parametrize("policy", POLICIES)
class TestEveryPolicy:
    def test_every_request_ends_and_every_prompt_token_is_fed_or_found(self, policy: str) -> None:
        found = run(TRACE, SHAPE, policy)
        assert all(outcome.ended and outcome.attempts == 1 for outcome in found.outcomes)
        cached = sum(outcome.cached_tokens for outcome in found.outcomes)
        assert found.fed_tokens + cached == TRACE.prompt_tokens
        assert sum(sum(one.values()) for one in found.prefilled.values()) == pytest.approx(found.fed_tokens)

    def test_workers_that_leave_take_no_request_with_them(self, policy: str) -> None:
        found = run(TRACE, replace(SHAPE, churn_s=1.0), policy)
        assert len(found.changes) > 5
        assert all(outcome.ended for outcome in found.outcomes)
        assert any(outcome.attempts > 1 for outcome in found.outcomes)
        for name, (came, went) in found.lives.items():
            assert came < went
            assert sum(found.prefilled[name].values()) <= (went - came) * SLOW.prefill_tokens_per_s * 1.001

    def test_the_same_seed_gives_the_same_figures(self, policy: str) -> None:
        shape = replace(SHAPE, churn_s=3.0)
        first, again = (figures(policy, TRACE, run(TRACE, shape, policy), 1) for _ in range(2))
        assert first == again

    def test_one_worker_attains_what_is_attainable(self, policy: str) -> None:
        """With all of the cache, one after the other, in calm: by the definition of attainable."""
        calm = TRACE.at_speed(0.01)
        found = run(calm, replace(SHAPE, workers=1, cache_blocks=400), policy)
        assert sum(outcome.cached_tokens for outcome in found.outcomes) == attainable_tokens(calm, 400)


class TestThePolicyDoesNotChangeWhatIsAttainable:
    def test_the_study_reckons_it_once(self) -> None:
        study = make_study(TRACE, SHAPE)
        ratios = [one.figures.hit_rate / one.figures.hit_of_attainable for one in study.run(POLICIES)]
        assert ratios == pytest.approx([attainable_tokens(TRACE, 4 * 300) / TRACE.prompt_tokens] * len(POLICIES))

    def test_it_does_not_depend_on_the_speed_either(self) -> None:
        assert make_study(TRACE, SHAPE).attainable == make_study(TRACE, SHAPE, load=0.9).attainable


def test_figures_do_not_depend_on_the_order_of_hashed_sets(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {50 * n}, "input_length": {512 * (2 + n // 8)}, "output_length": 9, '
        f'"hash_ids": [0, {", ".join(f"{1 + n % 8}{d:03}" for d in range(1 + n // 8))}]}}'
        for n in range(60)
    ]
    trace.write_text("\n".join(lines))
    flags = ["--trace", str(trace), "--workers", "3", "--policy", "all", "--churn-s", "1", "--json"]
    command = launch.command("kvfleet.placement.simulate.main", *flags)
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        outputs.add(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert len(outputs) == 1


class TestWhatReplicasHear:
    def test_late_events_cost_hits_only_if_nothing_is_promised(self) -> None:
        """Two turns within the delay of events meet all the same: the first one's blocks were promised."""
        trace = a_trace(*(a_row(0.2 * n, [s, *range(10 * (n // 4 + 1))]) for n in range(40) for s in [n % 4]))
        found = run(trace, replace(SHAPE, replicas=1, delays=Delays(event_s=0.3)))
        attainable = attainable_tokens(trace, 1200)
        assert sum(outcome.cached_tokens for outcome in found.outcomes) >= 0.99 * attainable

    def test_more_replicas_place_as_well_when_they_share(self) -> None:
        burst = a_trace(*(a_row(0.0, [n], tokens=2000) for n in range(40)))
        shared = run(burst, replace(SHAPE, replicas=4))
        counts = [sum(o.worker == f"w{n}" for o in shared.outcomes) for n in range(4)]
        assert max(counts) <= 12


class TestCapacity:
    def queue(self, load: float) -> tuple[float, float]:
        """Mean TTFT of the middle and of the last quarter of a long calm stream on one worker."""
        trace = a_trace(*(a_row(1.0 * n, [n], tokens=900 + 40 * (n % 6), output=30) for n in range(800)))
        speed = load * capacity_speed(trace, 1, SLOW, 0)
        found = run(trace.at_speed(speed), FleetShape(workers=1, cache_blocks=10_000, replicas=1, speed=SLOW))
        waits = ttfts(found)
        return float(waits[300:500].mean()), float(waits[600:].mean())

    def test_below_it_queues_stay_short(self) -> None:
        middle, last = self.queue(0.95)
        assert last < 1.2 * middle < 3.0

    def test_above_it_they_grow(self) -> None:
        middle, last = self.queue(1.2)
        assert last > 1.4 * middle > 20.0

    def test_it_grows_with_workers_and_shrinks_with_what_is_missed(self) -> None:
        one = capacity_speed(TRACE, 1, SLOW, 0)
        assert capacity_speed(TRACE, 4, SLOW, 0) == pytest.approx(4 * one, rel=0.05)
        assert capacity_speed(TRACE, 1, SLOW, TRACE.prompt_tokens // 2) > 1.3 * one

    def test_slots_bound_it(self) -> None:
        long = a_trace(*(a_row(float(n), [n], output=5000) for n in range(50)))
        assert capacity_speed(long, 1, replace(SLOW, slots=2), 0) < 0.2 * capacity_speed(long, 1, SLOW, 0)

    def test_where_nothing_takes_time_it_ends_too(self) -> None:
        free = Speed(prefill_tokens_per_s=1e15, decode_base_s=0.0, decode_each_s=0.0)
        assert capacity_speed(TRACE, 1, free, 0) > 1e6


def a_run(placed: list[tuple[float, str, str]], changes: list[float]) -> SimulationRun:
    """Requests as (seconds, session, worker)."""
    trace = a_trace(*(a_row(at, [n]) for n, (at, _, _) in enumerate(placed)))
    outcomes = [
        Outcome(replace(arrival, session=session, at_s=at), worker)
        for arrival, (at, session, worker) in zip(trace.arrivals, placed, strict=True)
    ]
    return SimulationRun(outcomes, {}, {}, changes)


class TestMoves:
    def test_a_turn_elsewhere_than_the_one_before_moved(self) -> None:
        assert moves(a_run([(0, "a", "w0"), (1, "a", "w1"), (2, "a", "w1"), (3, "b", "w0")], [])) == (1, 2)

    def test_without_changes_there_is_nothing_per_change(self) -> None:
        assert moved_per_change(a_run([(0, "a", "w0"), (1, "a", "w1")], [])) is None

    def test_one_change_between_turns_moves_its_share(self) -> None:
        placed = [(0.0, f"s{n}", "w0") for n in range(8)]
        placed += [(2.0, f"s{n}", "w1" if n < 2 else "w0") for n in range(8)]
        assert moved_per_change(a_run(placed, [1.0])) == pytest.approx(0.25)

    def test_of_two_changes_each_moves_its_share_of_who_is_left(self) -> None:
        placed = [(0.0, f"s{n}", "w0") for n in range(16)]
        placed += [(3.0, f"s{n}", "w1" if n < 7 else "w0") for n in range(16)]  # 1 - (3/4)^2 = 7/16
        assert moved_per_change(a_run(placed, [1.0, 2.0])) == pytest.approx(0.25)

    def test_who_moved_without_a_change_does_not_count(self) -> None:
        placed = [(0.0, "a", "w0"), (0.5, "a", "w1"), (2.0, "a", "w1")]
        assert moved_per_change(a_run(placed, [1.0])) == pytest.approx(0, abs=1e-9)

    def test_a_ring_moves_the_share_of_who_left(self) -> None:
        """End to end: what left had a quarter of the keys, and what joined takes a quarter of what is there."""
        turns = a_trace(*(a_row(0.1 * n, [n % 200, *range(1 + n // 200)], output=1) for n in range(1200)))
        share = moved_per_change(run(turns, replace(SHAPE, churn_s=9.0), "ring"))
        assert share is not None
        assert 0.2 < share < 0.6


class TestLoad:
    def a_run(self, *workers: dict[int, float], went: float = 1e9) -> SimulationRun:
        names = [f"w{n}" for n in range(len(workers))]
        lives = dict.fromkeys(names, (0.0, 1e9)) | {names[-1]: (0.0, went)}
        return SimulationRun([], dict(zip(names, workers, strict=True)), lives, [])

    def test_variation_is_taken_minute_by_minute(self) -> None:
        assert load_cov(self.a_run({0: 10.0, 1: 30.0}, {0: 30.0, 1: 10.0}), 120.0) == pytest.approx(0.5)

    def test_who_had_nothing_to_do_counts(self) -> None:
        assert load_cov(self.a_run({0: 10.0}, {}), 60.0) == pytest.approx(1.0)

    def test_who_was_gone_does_not(self) -> None:
        assert load_cov(self.a_run({1: 10.0}, {1: 10.0}, {0: 5.0}, went=70.0), 120.0) == pytest.approx(
            (2**0.5 + 0.0) / 2
        )

    def test_what_is_shorter_than_a_minute_is_taken_whole(self) -> None:
        assert load_cov(self.a_run({0: 10.0}, {0: 30.0}), 5.0) == pytest.approx(0.5)


@pytest.mark.parametrize("workers", [1, 3])
def test_edges_end_as_well(workers: int) -> None:
    """One request; all at once; prompts without blocks; prompts larger than a cache."""
    traces: list[Trace] = [
        a_trace(a_row(0.0, "abc")),
        a_trace(*(a_row(0.0, "abc") for _ in range(20))),
        a_trace(*(a_row(float(n), [], tokens=100) for n in range(5))),
        a_trace(*(a_row(0.1 * n, range(30)) for n in range(10))),
    ]
    for trace in traces:
        study = make_study(trace, replace(SHAPE, workers=workers, cache_blocks=10))
        for result in study.run(["cost", "bounded_ring"]):
            assert result.figures.failed == 0
            missing = {name for name, value in asdict(result.figures).items() if value is None}
            assert missing <= {"moved_per_change", "return_ttft_p50_s", "pauses_saved_s"}
    assert traces[2].arrivals[0].hashes.shape == (0, 2)
    assert traces[0].block_tokens == BLOCK
