"""Made-up traces: what their prompts have in common, and when they come."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import mean

import pytest

from benchmarks.policies._shapes import BLOCK_TOKENS, LEVELS, QUESTIONS, RATE, SHAPES, STEP_S, STEPS, TREES, make_shape
from kvfleet.placement.simulate.trace import Arrival, Trace

COUNT = 4000


def sessions(trace: Trace) -> dict[str, list[Arrival]]:
    found = defaultdict(list)
    for arrival in trace.arrivals:
        found[arrival.session].append(arrival)
    return found


def common(one: Arrival, other: Arrival) -> int:
    """Blocks from the start."""
    return next((n for n, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b), len(one.ids))


@pytest.mark.parametrize("shape", SHAPES)
class TestEvery:
    def test_it_comes_from_its_seed(self, shape: str) -> None:
        def told(seed: int) -> list[tuple[object, ...]]:
            trace = make_shape(shape, 300, seed)
            return [(one.at_s, one.prompt_tokens, one.output_tokens, one.ids, one.session) for one in trace.arrivals]

        assert told(1) == told(1) != told(2)

    def test_as_many_requests_as_were_asked_for_at_an_even_rate(self, shape: str) -> None:
        trace = make_shape(shape, COUNT)
        assert len(trace.arrivals) == pytest.approx(COUNT, rel=0.2)
        assert trace.duration_s == pytest.approx(COUNT / RATE, rel=0.1)

    def test_a_block_stands_for_all_before_it(self, shape: str) -> None:
        trace = make_shape(shape, 500)
        before: dict[int, tuple[int, int]] = {}
        for arrival in trace.arrivals:
            assert len(arrival.ids) == -(-arrival.prompt_tokens // BLOCK_TOKENS)
            for depth, block in enumerate(arrival.ids):
                parent = depth, arrival.ids[depth - 1] if depth else -1
                assert before.setdefault(block, parent) == parent


def test_prompts_of_trees_share_deep_prefixes_some_of_them_often() -> None:
    trace = make_shape("tree", COUNT)
    assert len(sessions(trace)) == len(trace.arrivals)
    assert len({arrival.ids[0] for arrival in trace.arrivals}) == TREES
    asked = Counter(block for arrival in trace.arrivals for block in arrival.ids)
    shared = [sum(asked[block] > 1 for block in arrival.ids) for arrival in trace.arrivals]
    assert mean(shared) > 2 * LEVELS
    assert mean(len(arrival.ids) for arrival in trace.arrivals) > 1.2 * mean(shared)  # the rest is each one's own
    deepest = Counter(arrival.ids[:depth] for arrival, depth in zip(trace.arrivals, shared, strict=True))
    assert deepest.most_common(1)[0][1] > 10 * len(trace.arrivals) / 4**LEVELS


def test_a_loop_of_an_agent_goes_on_with_its_own_context_after_a_pause() -> None:
    trace = make_shape("agents", COUNT)
    loops = sessions(trace)
    pauses = []
    for steps in loops.values():
        for one, following in pairwise(steps):
            assert common(one, following) >= one.prompt_tokens // BLOCK_TOKENS
            assert following.prompt_tokens > one.prompt_tokens
            pauses.append(following.at_s - one.at_s)
    assert min(pauses) > 1.0
    assert mean(pauses) == pytest.approx(STEP_S, rel=0.25)
    assert max(pauses) > 5 * STEP_S
    early = [steps for steps in loops.values() if steps[0].at_s < trace.duration_s / 4]
    assert STEPS / 2 < mean(map(len, early)) < 1.5 * STEPS
    first = [steps[0] for steps in loops.values()]
    assert len({arrival.ids[:2] for arrival in first}) < len(first) / 2  # agents of a kind begin alike


def test_a_document_is_asked_about_five_times() -> None:
    trace = make_shape("documents", COUNT)
    found = list(sessions(trace).values())
    whole = [asked for asked in found if asked[0].at_s < trace.duration_s / 3]
    assert max(map(len, found)) == QUESTIONS
    assert mean(len(asked) == QUESTIONS for asked in whole) > 0.5
    for asked in whole:
        for one, following in pairwise(asked):
            assert common(one, following) >= len(one.ids) - 2  # all but the question


def test_half_way_everything_changes() -> None:
    trace = make_shape("shift", COUNT)
    half = trace.duration_s / 2
    before = {block for one in trace.arrivals if one.at_s < half - 1 for block in one.ids}
    after = {block for one in trace.arrivals if one.at_s > half + 1 for block in one.ids}
    assert len(before) > 100 < len(after)
    assert not before & after


def test_no_such_shape() -> None:
    with pytest.raises(KeyError):
        make_shape("square")
