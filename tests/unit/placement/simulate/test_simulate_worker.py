"""The simulated worker: its fluid arithmetic against one that goes step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_build import BLOCK, a_job, a_row, a_trace

from kvfleet.placement.simulate.fleet_shape import Speed
from kvfleet.placement.simulate.sim_cache import SimulatedJob
from kvfleet.placement.simulate.sim_worker import SimulatedProgress, SimWorker
from kvfleet.placement.simulate.trace import Trace

SPEED = Speed(prefill_tokens_per_s=1000.0, chunk_tokens=100, decode_base_s=0.02, decode_each_s=0.005, slots=3)
ENOUGH = 10_000


class Times:
    """When each request got its first token and ended, and what it had cached."""

    def __init__(self) -> None:
        self.first: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.cached: dict[int, int] = {}

    def note(self, progress: SimulatedProgress, now: float) -> None:
        for job in progress.started:
            self.cached[job.arrival.number] = job.cached_tokens
        for job in progress.first_token:
            self.first[job.arrival.number] = now
        for job in progress.ended:
            self.ended[job.arrival.number] = now


def serve(trace: Trace, speed: Speed = SPEED, cache_blocks: int = ENOUGH, look_s: float | None = None) -> Times:
    """Event by event; `look_s`: with looks in between too, as heartbeats take them."""
    times, worker = Times(), SimWorker("w0", speed, cache_blocks, trace.block_tokens)
    waiting, looked = list(trace.arrivals), 0.0
    while len(times.ended) < len(trace.arrivals):
        at = worker.next_at()
        if look_s is not None and looked + look_s < min(at or 1e9, waiting[0].at_s if waiting else 1e9):
            looked += look_s
            times.note(worker.advance(looked), looked)
            worker.load()
        elif waiting and (at is None or waiting[0].at_s <= at):
            arrival = waiting.pop(0)
            times.note(worker.submit(a_job(arrival), arrival.at_s), arrival.at_s)
        else:
            assert at is not None
            times.note(worker.advance(at), at)
    assert worker.load().waiting == worker.load().running == worker.load().queued_prefill_tokens == 0
    assert sum(worker.prefilled.values()) == pytest.approx(
        sum(one.prompt_tokens - times.cached[one.number] for one in trace.arrivals)
    )
    return times


def serve_in_small_steps(trace: Trace, speed: Speed, step_s: float) -> Times:
    """Nothing is planned: each step feeds and decodes what its length allows. Without a cache."""
    times, now = Times(), 0.0
    waiting: list[int] = []
    coming = list(trace.arrivals)
    left: dict[int, float] = {}
    decoding: dict[int, float] = {}
    while len(times.ended) < len(trace.arrivals):
        while coming and coming[0].at_s <= now:
            waiting.append(coming.pop(0).number)
        if not left and waiting and len(decoding) < speed.slots:
            number = waiting.pop(0)
            left = {number: float(trace.arrivals[number].prompt_tokens)}
        chunk_s = speed.chunk_tokens / speed.prefill_tokens_per_s
        decode_s = speed.decode_base_s + speed.decode_each_s * len(decoding)
        turn_s = (chunk_s if left else 0.0) + (decode_s if decoding else 0.0)
        now += step_s
        for number in list(decoding):
            decoding[number] -= step_s / turn_s
            if decoding[number] <= 0:
                times.ended[number] = now
                del decoding[number]
        for number in list(left):
            left[number] -= step_s / turn_s * speed.chunk_tokens
            if left[number] <= 0:
                times.first[number] = now
                left = {}
                decoding[number] = trace.arrivals[number].output_tokens - 1.0
                if not decoding[number]:
                    times.ended[number] = now
                    del decoding[number]
    return times


class TestOneAlone:
    def test_its_first_token_comes_after_its_prefill(self) -> None:
        times = serve(a_trace(a_row(0.0, "abc", tokens=500, output=11)))
        assert times.first[0] == pytest.approx(0.5)

    def test_it_ends_after_its_other_tokens(self) -> None:
        times = serve(a_trace(a_row(0.0, "abc", tokens=500, output=11)))
        assert times.ended[0] == pytest.approx(0.5 + 10 * 0.025)

    def test_one_token_is_the_first_one(self) -> None:
        times = serve(a_trace(a_row(0.0, "abc", tokens=500, output=1)))
        assert times.ended[0] == times.first[0]

    def test_what_is_cached_is_not_fed(self) -> None:
        times = serve(a_trace(a_row(0.0, "abcd", output=1), a_row(100.0, "abcdef", output=1)))
        assert times.cached[1] == 4 * BLOCK
        assert times.first[1] == pytest.approx(100 + 2 * BLOCK / 1000)


def test_equal_requests_take_turns() -> None:
    times = serve(a_trace(*(a_row(0.0, [name], tokens=500, output=1) for name in "abcd")))
    assert [times.first[number] for number in range(4)] == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_who_decodes_makes_a_prefill_longer() -> None:
    """A step is then 100 tokens in 0.1 s, and one token of the other in 0.025 s."""
    times = serve(a_trace(a_row(0.0, "a", tokens=500, output=1000), a_row(1.0, "b", tokens=500, output=1)))
    assert times.first[1] == pytest.approx(1.0 + 5 * 0.125)


def test_slots_and_blocks_keep_others_waiting() -> None:
    one_slot = Speed(1000.0, 100, 0.02, 0.005, slots=1)
    trace = a_trace(a_row(0.0, "ab", tokens=100, output=11), a_row(0.0, "xy", tokens=100, output=1))
    assert serve(trace, one_slot).first[1] == pytest.approx(0.1 + 0.25 + 0.1)
    assert serve(trace, cache_blocks=3).first[1] == pytest.approx(0.1 + 0.25 + 0.1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 600), st.integers(1, 40)), min_size=1, max_size=8),
    st.sampled_from([None, 0.07]),
)
def test_as_step_by_step(asked: list[tuple[float, int, int]], look_s: float | None) -> None:
    trace = a_trace(*(a_row(at, [n], tokens=tokens, output=out) for n, (at, tokens, out) in enumerate(asked)))
    step_s = 0.0005
    exact, slow = serve(trace, look_s=look_s), serve_in_small_steps(trace, SPEED, step_s)
    # A step too late each time somebody begins or ends: and who decodes a step longer slows down the others.
    near = 4 * step_s * len(asked) + 0.002
    assert exact.first == pytest.approx(slow.first, abs=near)
    assert exact.ended == pytest.approx(slow.ended, abs=near)


def test_blocks_are_told_when_they_are_computed_and_before_they_go() -> None:
    """In their order: a block that comes and goes at once is not left behind in an index."""
    trace = a_trace(*(a_row(float(n), path, output=1) for n, path in enumerate(["abc", "xyz", "abq"])))
    worker = SimWorker("w0", SPEED, 3, trace.block_tokens)
    index: set[int] = set()
    for arrival in trace.arrivals:
        for progress in (worker.submit(a_job(arrival), arrival.at_s), worker.advance(arrival.at_s + 0.9)):
            for removed, blocks, _ in progress.changes:
                assert not (index & set(blocks)) if not removed else index >= set(blocks)
                index = index - set(blocks) if removed else index | set(blocks)
        assert all((block in index) == bool(worker.cache.match([block])) for block in range(trace.distinct_blocks))


def test_a_worker_that_dies_says_whom_it_leaves_behind_and_how_far_they_were() -> None:
    trace = a_trace(*(a_row(0.0, [name], tokens=500, output=100) for name in "abc"))
    worker = SimWorker("w0", SPEED, ENOUGH, trace.block_tokens)
    for arrival in trace.arrivals:
        worker.submit(a_job(arrival), 0.0)
    worker.advance(0.76)  # the first one has its first token, and two more, each after 0.125 s
    assert {job.arrival.number: generated for job, generated in worker.abandon()} == {0: 3, 1: 0, 2: 0}
    assert worker.next_at() is None


def test_a_stream_goes_on_after_the_tokens_it_has() -> None:
    (arrival,) = a_trace(a_row(0.0, "a", tokens=500, output=100)).arrivals
    worker, times = SimWorker("w1", SPEED, ENOUGH, BLOCK), Times()
    worker.submit(SimulatedJob(arrival, 1, 0.0, generated=90), 0.0)
    while (at := worker.next_at()) is not None:
        times.note(worker.advance(at), at)
    assert times.first[0] == pytest.approx(0.59)
    assert times.ended[0] == pytest.approx(0.59 + 9 * 0.025)
