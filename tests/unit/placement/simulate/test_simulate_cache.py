"""The simulated cache and queue against slow ones that are obviously right."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_build import BLOCK, a_job, a_row, a_trace

from kvfleet.placement.simulate.figures import attainable_tokens
from kvfleet.placement.simulate.sim_cache import LruCache, SimulatedJob, Waiting
from kvfleet.placement.simulate.trace import Arrival


class NaiveCache:
    """One list of blocks in the order of their last use, and how often each is held."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.order: list[int] = []
        self.held: dict[int, int] = {}

    def hold(self, ids: tuple[int, ...]) -> None:
        for block in ids:
            self.held[block] = self.held.get(block, 0) + 1
            if block not in self.order:
                self.order.append(block)
        self.evict()

    def let_go(self, ids: tuple[int, ...]) -> None:
        for block in reversed(ids):
            self.held[block] -= 1
            if not self.held[block]:
                self.order.remove(block)
                self.order.append(block)
        self.evict()

    def evict(self) -> None:
        while len(self.order) > self.blocks:
            victim = next((block for block in self.order if not self.held.get(block)), None)
            if victim is None:
                return
            self.order.remove(victim)


def arrivals(paths: list[str]) -> list[Arrival]:
    return list(a_trace(*(a_row(number, path) for number, path in enumerate(paths))).arrivals)


PATHS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=12)
STEPS = st.lists(st.tuples(st.sampled_from(["hold", "let go", "wait", "take"]), st.integers(0, 99)), max_size=60)


@settings(max_examples=150, deadline=None)
@given(PATHS, STEPS, st.integers(1, 12))
def test_the_cache_and_what_waits_for_it(paths: list[str], steps: list[tuple[str, int]], blocks: int) -> None:
    known = arrivals(paths)
    cache, naive = LruCache(blocks), NaiveCache(blocks)
    waiting, jobs = Waiting(cache, BLOCK), list[SimulatedJob]()
    holding: list[tuple[int, ...]] = []
    told: set[int] = set()  # what somebody knows who only hears what came and what went
    for step, number in steps:
        arrival = known[number % len(known)]
        if step == "hold":
            new, gone = cache.hold(arrival.ids)
            naive.hold(arrival.ids)
            holding.append(arrival.ids)
            assert not told & set(new)
            told = (told | set(new)) - set(gone)
            waiting.on_changed((*new, *gone))
        elif step == "let go" and holding:
            ids = holding.pop(number % len(holding))
            gone = cache.let_go(ids)
            naive.let_go(ids)
            assert told >= set(gone)
            told -= set(gone)
            waiting.on_changed(gone)
        elif step == "wait":
            jobs.append(a_job(arrival))
            waiting.append(jobs[-1])
        elif step == "take" and jobs:
            assert waiting.first is jobs[0]
            assert waiting.popleft() is jobs.pop(0)
        assert told == set(naive.order)
        assert len(cache) == len(naive.order)
        assert cache.held == sum(count > 0 for count in naive.held.values())
        for one in known:
            present = [block in naive.order for block in one.ids]
            assert cache.match(one.ids) == (present.index(False) if False in present else len(present))
        assert len(waiting) == len(jobs)
        waiting.check_integrity()


def test_a_chain_goes_leaf_first() -> None:
    """So that what stays is of use: nothing is found behind a gap."""
    long, other = arrivals(["abcd", "xy"])
    cache = LruCache(4)
    cache.hold(long.ids)
    cache.let_go(long.ids)
    _, gone = cache.hold(other.ids)
    assert set(gone) == set(long.ids[2:])
    assert cache.match(long.ids) == 2


def test_a_prompt_larger_than_the_cache_fits_an_empty_one_only() -> None:
    long, short = arrivals(["abcdef", "x"])
    cache = LruCache(4)
    assert cache.fits(long.ids)
    cache.hold(short.ids)
    assert not cache.fits(long.ids)


class TestAttainable:
    def test_a_turn_finds_the_turn_before(self) -> None:
        trace = a_trace(a_row(0, "abc"), a_row(1, "abcde"))
        assert attainable_tokens(trace, 100) == 3 * BLOCK

    def test_one_token_is_always_fed(self) -> None:
        assert attainable_tokens(a_trace(a_row(0, "abc"), a_row(1, "abc")), 100) == 3 * BLOCK - 1

    def test_what_was_pushed_out_is_not_found(self) -> None:
        trace = a_trace(a_row(0, "ab"), a_row(1, "xyz"), a_row(2, "ab"))
        assert attainable_tokens(trace, 3) == 0
        assert attainable_tokens(trace, 4) == BLOCK
        assert attainable_tokens(trace, 5) == 2 * BLOCK - 1
