"""A simulated fleet with workers for prompts and for what comes after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate_build import BLOCK, a_job, a_row, a_trace, run

from kvfleet.placement.simulate.figures import figures
from kvfleet.placement.simulate.fleet_shape import HAND_OVER_S, FleetShape, Speed
from kvfleet.placement.simulate.main import flags
from kvfleet.placement.simulate.sim_worker import SimWorker

LINK = 10e9
SPEED = Speed(chunk_tokens=256)
WHOLE = FleetShape(workers=2, cache_blocks=4096, replicas=1, speed=SPEED, link_bytes_per_s=LINK)
APART = replace(WHOLE, prefill_workers=1)
# Long answers, and long prompts that come while they are written.
TRACE = a_trace(
    *(a_row(0.01 * number, [f"short {number}"], output=2000) for number in range(8)),
    *(a_row(2.0 + number, [f"long {number}.{block}" for block in range(250)], output=40) for number in range(10)),
)


def test_answers_do_not_wait_for_prompts_at_other_workers() -> None:
    whole, apart = (figures("cost", TRACE, run(TRACE, shape), 0) for shape in (WHOLE, APART))
    assert whole.failed == apart.failed == 0
    assert apart.itl_p99_s < whole.itl_p99_s / 1.5
    assert apart.itl_p50_s == pytest.approx(SPEED.decode_s(8), rel=0.1)


def test_prompts_are_prefilled_at_their_worker_and_end_at_the_other() -> None:
    found = run(TRACE, APART)
    by_worker = {name: sum(minutes.values()) for name, minutes in found.prefilled.items()}
    assert by_worker["w0"] == pytest.approx(10 * 250 * BLOCK, rel=0.01)
    assert by_worker["w1"] < 8 * BLOCK + 20
    assert [one.attempts for one in found.outcomes[8:]] == [2] * 10
    assert all(one.ended for one in found.outcomes)


def test_a_fleet_of_one_role_is_as_it_was() -> None:
    plain = replace(WHOLE, link_bytes_per_s=0.0)
    assert [one.attempts for one in run(TRACE, plain).outcomes] == [1] * 18


def test_the_last_blocks_of_a_prompt_go_over_when_it_is_prefilled() -> None:
    tokens_s = SPEED.token_bytes / LINK
    assert APART.hand_over_s(4000, prefill_s=10.0) == pytest.approx(HAND_OVER_S + 256 * tokens_s)
    assert APART.hand_over_s(4000, prefill_s=0.0) == pytest.approx(HAND_OVER_S + 4000 * tokens_s)


def test_a_moved_job_leaves_its_blocks_in_the_cache() -> None:
    worker = SimWorker("w", SPEED, 64, BLOCK)
    job = a_job(TRACE.arrivals[0])
    job.then = "d"
    worker.submit(job, 0.0)
    progress = worker.advance(1.0)
    assert (progress.first_token, progress.moved, progress.ended) == ([job], [job], [])
    assert worker.running == 0
    assert worker.cache.match(job.arrival.ids) == 1


def test_flags_say_how_many() -> None:
    asked = flags().parse_args(["--trace", "t", "--workers", "8", "--prefill-workers", "3", "--link-gb-per-s", "5"])
    assert (asked.prefill_workers, asked.link_gb_per_s) == (3, 5.0)
