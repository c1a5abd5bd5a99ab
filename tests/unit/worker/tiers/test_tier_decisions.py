"""The pure parts of tiers: what experience says of reuse, what fetching is worth, how fast something is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.model.base import Copies
from kvfleet.worker.tiers.break_even import (
    HANDLING_S,
    LATE,
    SURE,
    Offer,
    RestoredPart,
    cheapest,
    going_on_s,
    look_limit_s,
)
from kvfleet.worker.tiers.host import Copier, CopyJob
from kvfleet.worker.tiers.link_speed import LEAST_BYTES, CopySpeed, LinkSpeed
from kvfleet.worker.tiers.offloader import FEWEST_BLOCKS, ReuseWatch
from kvproto.messages import Tier
from tests.support.waiting import LIMIT_S

ROOT = b"root of 16 bytes"


def names(start: int, count: int) -> list[bytes]:
    return [at.to_bytes(16, "big") for at in range(start, start + count)]


class TestReuse:
    def test_no_experience_is_none(self) -> None:
        watch = ReuseWatch()
        watch.ask(ROOT, names(0, int(FEWEST_BLOCKS) - 1))
        watch.ask(ROOT, [])
        assert watch.share(ROOT) == 0.0
        assert not watch.is_worth(ROOT, 1e-9, 1e9)

    def test_new_chains_only_is_a_share_of_nothing(self) -> None:
        watch = ReuseWatch()
        for at in range(20):
            assert watch.ask(ROOT, names(100 * at, 50)) == 0
        assert watch.share(ROOT) == 0.0

    def test_the_share_is_that_of_blocks_asked_again(self) -> None:
        watch = ReuseWatch()
        watch.ask(ROOT, names(0, 50))
        assert watch.ask(ROOT, [*names(0, 30), *names(500, 20)]) == 30
        assert watch.share(ROOT) == pytest.approx(0.3, rel=0.02)
        assert watch.is_worth(ROOT, offload_s=0.29, recompute_s=1.0)
        assert not watch.is_worth(ROOT, offload_s=0.31, recompute_s=1.0)

    def test_what_was_generated_counts_when_somebody_goes_on(self) -> None:
        watch = ReuseWatch()
        watch.ask(ROOT, names(0, 40))
        watch.extend(names(0, 60))
        assert watch.ask(ROOT, names(0, 64)) == 60

    def test_old_experience_fades(self) -> None:
        watch = ReuseWatch()
        for _ in range(10):
            watch.ask(ROOT, names(0, 100))
        before = watch.share(ROOT)
        for at in range(1, 400):
            watch.ask(ROOT, names(1000 * at, 100))
        assert before > 0.8
        assert watch.share(ROOT) < 0.01

    def test_tenants_have_their_own(self) -> None:
        watch = ReuseWatch()
        for _ in range(2):
            watch.ask(ROOT, names(0, 100))
        watch.ask(b"another one 16 b", names(5000, 100))
        assert watch.share(ROOT) > 0.4
        assert watch.share(b"another one 16 b") == 0.0

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=60))
    def test_what_is_known_of_a_chain_is_a_beginning_of_it(self, asked: list[tuple[int, int]]) -> None:
        """Bounded, and forgetful from the ends of chains on: so a few looks find how much is known."""
        watch = ReuseWatch(kept_names=40)
        for chain, length in asked:
            hashes = names(1000 * chain, length)
            known = [block_hash in watch._names for block_hash in hashes]
            assert watch.ask(ROOT, hashes) == sum(known)
            assert known == sorted(known, reverse=True)
            assert len(watch._names) <= 40


def offers(*ends: int, rate: float = 1e9, latency: float = 0.0) -> list[Offer]:
    tiers = (Tier.HOST, Tier.VAULT, Tier.PEER)
    return [Offer(tier, end, LinkSpeed(latency, rate)) for tier, end in zip(tiers, ends, strict=False)]


HOW: dict[str, Any] = {"block_bytes": 1_000_000, "compute_s": lambda start, end: 0.01 * (end - start)}


class TestBreakEven:
    def test_what_is_quicker_is_fetched(self) -> None:
        assert cheapest(offers(10), 2, **HOW) == [RestoredPart(Tier.HOST, 2, 10, pytest.approx(0.008))]

    def test_what_is_slower_is_computed(self) -> None:
        assert cheapest(offers(10, rate=1e8), 2, **HOW) == []

    def test_a_far_link_is_worth_it_for_many_blocks_alone(self) -> None:
        far = {"rate": 1e9, "latency": 0.05}
        assert cheapest(offers(6, **far), 2, **HOW) == []
        assert len(cheapest(offers(60, **far), 2, **HOW)) == 1

    def test_tiers_follow_one_another(self) -> None:
        parts = cheapest(offers(5, 20, 12), 2, **HOW)
        assert [(part.tier, part.start, part.end) for part in parts] == [(Tier.HOST, 2, 5), (Tier.VAULT, 5, 20)]

    def test_a_slow_tier_between_is_borne_where_the_next_one_makes_up_for_it(self) -> None:
        slow_then_fast = [
            Offer(Tier.HOST, 5, LinkSpeed(0, 5e7)),  # 20 ms a block
            Offer(Tier.VAULT, 100, LinkSpeed(0, 1e9)),
        ]
        assert len(cheapest(slow_then_fast, 0, **HOW)) == 2
        assert cheapest(slow_then_fast[:1], 0, **HOW) == []

    def test_unmeasured_links_are_no_offer(self) -> None:
        assert cheapest(offers(10, rate=0.0), 2, **HOW) == []

    @given(
        st.lists(st.tuples(st.integers(0, 300), st.floats(0, 0.1), st.floats(1e6, 1e10)), max_size=3),
        st.integers(0, 300),
        st.floats(0, 1e5),
    )
    def test_never_predicted_to_be_worse_than_computing(
        self, tiers: list[tuple[int, float, float]], start: int, rate: float
    ) -> None:
        made = [
            Offer(tier, end, LinkSpeed(latency, speed))
            for tier, (end, latency, speed) in zip((Tier.HOST, Tier.VAULT, Tier.PEER), tiers, strict=False)
        ]
        block_s = 16 / (rate or 1000.0)
        parts = cheapest(made, start, block_bytes=100_000, compute_s=lambda one, end: (end - one) * block_s)
        if not parts:
            return
        assert parts[0].start == start
        assert all(one.end == following.start for one, following in pairwise(parts))
        assert SURE * sum(part.seconds for part in parts) + HANDLING_S < (parts[-1].end - start) * block_s

    def test_a_late_restore_is_waited_for_if_it_gets_on(self) -> None:
        assert going_on_s(missing=5, arrived=10, elapsed_s=0.04, block_s=0.01) == pytest.approx(LATE * 0.02)
        assert not going_on_s(missing=10, arrived=10, elapsed_s=0.06, block_s=0.01)
        assert not going_on_s(missing=10, arrived=0, elapsed_s=0.001, block_s=0.01)
        assert not going_on_s(missing=0, arrived=10, elapsed_s=0.001, block_s=0.01)

    @pytest.mark.parametrize(("compute_s", "limit_s"), [(0.0, None), (2.0, None), (20.0, 0.2), (200.0, 1.0)])
    def test_a_question_may_take_a_share_of_what_it_may_save(self, compute_s: float, limit_s: float | None) -> None:
        assert look_limit_s(compute_s, usual_s=0.02) == limit_s


class TestSpeed:
    def test_small_copies_say_nothing(self) -> None:
        speed = CopySpeed()
        speed.observe(LEAST_BYTES - 1, 1.0)
        assert speed.bytes_per_s == 0.0
        assert speed.seconds(100) == 0.0

    def test_a_copy_that_waited_for_a_core_says_nothing(self) -> None:
        speed = CopySpeed()
        for seconds in (0.001, 0.001, 0.001, 1.0):
            speed.observe(10_000_000, seconds)
        assert speed.bytes_per_s == 1e10

    def test_slow_copies_count_when_they_are_most(self) -> None:
        speed = CopySpeed()
        for seconds in (0.001, 0.001, 0.001, 1.0, 1.0, 1.0):
            speed.observe(10_000_000, seconds)
        assert speed.bytes_per_s == 1e7


def copies(*moves: Callable[[], object]) -> Copies:
    for move in moves:
        move()
        yield 1


class TestCopier:
    def test_restores_go_before_what_goes_down(self) -> None:
        order: list[str] = []
        copier = Copier()
        gate = threading.Event()
        done = threading.Event()
        copier.offload(CopyJob(copies(lambda: gate.wait(2 * LIMIT_S)), 1, lambda: None))
        copier.offload(CopyJob(copies(lambda: order.append("down")), 1, done.set))
        copier.bring(CopyJob(copies(lambda: order.append("up")), 1, lambda: None))
        gate.set()
        assert done.wait(LIMIT_S)
        copier.close()
        assert order == ["up", "down"]

    def test_a_closed_job_copies_nothing_more(self) -> None:
        made: list[int] = []
        job = CopyJob(copies(*(partial(made.append, at) for at in range(5))), 7, lambda: None)
        assert job.close() == 0
        job.run()
        assert made == []
        assert job.ended

    def test_a_copy_that_fails_ends_its_job_alone(self) -> None:
        ended = threading.Event()

        def fails() -> None:
            raise RuntimeError("the device is gone")

        copier = Copier()
        bad = CopyJob(copies(lambda: None, fails, lambda: None), 10, lambda: None)
        copier.bring(bad)
        copier.bring(CopyJob(copies(lambda: None), 10, ended.set))
        assert ended.wait(LIMIT_S)
        assert (bad.done, bad.ended) == (1, True)
        copier.close()

    def test_a_job_can_be_closed_between_any_two_batches(self) -> None:
        """Also by a thread that comes when the copying one is within a batch: it waits for no more than that one."""
        begun, gate = threading.Event(), threading.Event()
        ended: list[str] = []

        def batches() -> Copies:
            try:
                for _ in range(1000):
                    begun.set()
                    gate.wait(2 * LIMIT_S)
                    yield 3
            finally:
                ended.append("copies")

        copier = Copier()
        job = CopyJob(batches(), 10, lambda: ended.append("job"))
        copier.bring(job)
        assert begun.wait(LIMIT_S)
        closing = threading.Thread(target=lambda: made.append(job.close()))
        made: list[int] = []
        closing.start()
        while not job._closed:
            time.sleep(0.001)
        gate.set()
        closing.join(LIMIT_S)
        copier.close()
        assert made == [3]
        assert sorted(ended) == ["copies", "job"]
        assert copier.speed_in.bytes_total == 30

    def test_waiting_for_steps_is_no_part_of_the_speed(self) -> None:
        def batches() -> Copies:
            time.sleep(0.5)
            yield 0
            yield 2

        job = CopyJob(batches(), 10, lambda: None)
        assert job.run() < 0.4
        assert (job.done, job.ended) == (2, True)

    def test_copies_that_fail_when_they_are_closed_fail_alone(self) -> None:
        def batches() -> Copies:
            try:
                yield 0
            finally:
                raise RuntimeError("the device is gone")

        job = CopyJob(batches(), 10, lambda: None)
        assert next(job.copies) == 0
        assert job.close() == 0
