"""The simulated worker with a tier below its device: restores, pauses, and whole fleets of such workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate_build import BLOCK, a_job, a_row, a_trace, conversations, run

from kvfleet.placement.simulate.fleet_shape import Below, FleetShape, Speed
from kvfleet.placement.simulate.sim_returns import SimulatedReturns, shared_blocks
from kvfleet.placement.simulate.tiered_worker import TieredWorker
from kvfleet.placement.simulate.trace import Trace, parse_trace
from kvservice.return_times import FEWEST, ReturnSpan

SPEED = Speed(prefill_tokens_per_s=100.0, chunk_tokens=100, decode_base_s=0.02, decode_each_s=0.005, slots=8)
RATE = 1000.0  # tokens/s from below
PATHS = ["abcdefgh", "stuvwxyz"]  # 8 blocks each: together more than the device
TRACE = a_trace(*(a_row(float(at), path, output=1) for at, path in enumerate(PATHS * 2)))


def a_worker(trace: Trace = TRACE, blocks: int = 10) -> TieredWorker:
    shared = shared_blocks(trace)
    return TieredWorker("w0", SPEED, blocks, trace.block_tokens, below=Below(100, RATE), shared=shared)


def serve(worker: TieredWorker, number: int, at_s: float, trace: Trace = TRACE) -> float:
    """One request alone. Returns its TTFT."""
    progress = worker.submit(a_job(trace.arrivals[number]), at_s)
    while not progress.first_token:
        at = worker.next_at()
        assert at is not None
        progress = worker.advance(at)
    first = worker.now
    while worker.running:
        worker.advance(worker.next_at() or 0.0)
    return first - at_s


def test_what_was_evicted_is_restored_at_the_links_rate() -> None:
    worker = a_worker()
    assert serve(worker, 0, 0.0) == pytest.approx(8 * BLOCK / 100)
    serve(worker, 1, 10.0)
    cached = worker.cache.match(TRACE.arrivals[2].ids)
    assert cached < 8
    took = serve(worker, 2, 20.0)
    assert took == pytest.approx((8 - cached) * BLOCK / RATE + 1 / 100)  # one token is always fed
    assert worker.restored_tokens == (8 - cached) * BLOCK


def paused(worker: TieredWorker, soonest_s: float = 30.0, latest_s: float = 60.0) -> float:
    serve(worker, 0, 0.0)
    now = worker.now
    worker.expect(TRACE.arrivals[0].session, TRACE.arrivals[0].ids, ReturnSpan(soonest_s, latest_s), now)
    return now


def test_a_paused_conversation_is_up_before_its_return() -> None:
    worker = a_worker(blocks=12)
    now = paused(worker)
    serve(worker, 1, now + 1)
    assert worker.cache.match(TRACE.arrivals[0].ids) < 8
    worker.advance(now + 30)
    assert worker.cache.match(TRACE.arrivals[0].ids) == 8
    assert worker.brought_blocks > 0
    again = replace(TRACE.arrivals[2], session=TRACE.arrivals[0].session)
    worker.submit(a_job(again), now + 31)
    assert worker.saved_s > 0
    assert worker.restored_tokens == 0


def test_a_no_show_makes_room_first() -> None:
    worker = a_worker(blocks=16)
    now = paused(worker)
    serve(worker, 1, now + 1)
    worker.advance(now + 100)
    other = a_trace(a_row(0.0, "ABCDEFGH", output=1)).arrivals[0]
    worker.cache.hold(tuple(block + 1000 for block in other.ids))
    assert worker.cache.match(TRACE.arrivals[0].ids) == 0
    assert worker.cache.match(TRACE.arrivals[1].ids) == 8


def test_what_others_share_is_not_evicted_first() -> None:
    trace = a_trace(a_row(0.0, "abcd", output=1), a_row(1.0, "abxy", output=1))
    arrivals = [replace(one, session=f"s{number}") for number, one in enumerate(trace.arrivals)]
    shared = shared_blocks(replace(trace, arrivals=tuple(arrivals)))
    assert shared == {*arrivals[0].ids[:2]}
    worker = TieredWorker("w0", SPEED, 10, BLOCK, below=Below(100, RATE), shared=shared)
    assert worker._own(arrivals[0].ids) == arrivals[0].ids[2:]


def test_short_pauses_do_not_pay() -> None:
    worker = a_worker()
    paused(worker, soonest_s=0.01)
    assert worker.paused_total == 0


def test_a_trace_says_which_tool_an_answer_calls() -> None:
    line = '{"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1], "tool": "build"}'
    plain = line.replace(', "tool": "build"', "")
    assert [one.tool for one in parse_trace([line, plain]).arrivals] == ["build", ""]


def test_pauses_are_measured_as_they_come() -> None:
    returns, arrival = SimulatedReturns(), replace(TRACE.arrivals[0], tool="build")
    for number in range(FEWEST):
        assert returns.ended(arrival, 100.0 * number) is None
        returns.came(arrival, 100.0 * number + 60)
    span = returns.ended(arrival, 1000.0)
    assert span is not None
    assert span.soonest_s == 60
    assert returns.ended(TRACE.arrivals[0], 0.0) is None


@pytest.mark.parametrize("churn_s", [0.0, 2.0])
def test_a_fleet_with_pauses_serves_everybody(churn_s: float) -> None:
    trace = conversations(150, every_s=0.3)
    trace = replace(trace, arrivals=tuple(replace(one, tool="build") for one in trace.arrivals))
    below = Below(2000, 20_000.0, pauses=True)
    shape = FleetShape(workers=3, cache_blocks=60, speed=replace(SPEED, prefill_tokens_per_s=4000.0), below=below,
                       churn_s=churn_s)  # fmt: skip
    found = run(trace, shape)
    assert all(one.ended for one in found.outcomes)
    assert sum(one.restored_tokens for one in found.tiered) > 0
