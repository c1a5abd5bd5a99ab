"""Steps that do not fit into memory: computed in parts that do, each token once, and smaller for a while."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfleet.worker.schedule.step_pacer import RECOVER_STEPS, TokenBudget, run_step
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import OutOfMemory
from kvproto.messages import Sampling
from kvsampling.draw import Draw, Drawn

DRAW = Draw(Sampling(1), 0, 0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 60), st.sets(st.integers(0, 7)))
def test_every_token_is_computed_once_and_in_order(lengths: list[int], most: int, hopeless: set[int]) -> None:
    """`hopeless`: nothing of these sequences fits."""
    computed: dict[int, list[int]] = {at: [] for at in range(len(lengths))}

    def run(slices: Sequence[Slice]) -> list[Drawn]:
        if sum(len(part.ids) for part in slices) > most or hopeless & {part.blocks[0] for part in slices}:
            raise OutOfMemory("too much")
        for part in slices:
            assert part.start == len(computed[part.blocks[0]])
            computed[part.blocks[0]] += part.ids
        return [None if part.draw is None else part.blocks[0] for part in slices]

    slices = [Slice(list(range(length)), 0, [at], DRAW if at % 2 else None) for at, length in enumerate(lengths)]
    drawn = run_step(run, slices, TokenBudget(64))
    for at, length in enumerate(lengths):
        if at in hopeless:
            assert isinstance(drawn[at], OutOfMemory)
            assert not computed[at]
        else:
            assert drawn[at] == (at if at % 2 else None)
            assert computed[at] == list(range(length))


def test_the_budget_shrinks_and_comes_back() -> None:
    budget = TokenBudget(512)
    budget.fitted()
    budget.too_much(400)
    assert budget.tokens == 200
    budget.too_much(600)
    assert budget.tokens == 200, "that was no news"
    budget.too_much(3)
    assert budget.tokens == 16
    seen = []
    while budget.tokens < 512:
        before = budget.tokens
        for _ in range(RECOVER_STEPS):
            assert budget.tokens == before
            budget.fitted()
        seen.append(budget.tokens)
    assert seen[:3] == [21, 27, 34]
    assert seen == sorted(seen)


def test_what_did_not_fit_a_moment_ago_is_not_tried_again_at_once() -> None:
    tried: list[int] = []

    def run(slices: Sequence[Slice]) -> list[Drawn]:
        tried.append(len(slices))
        if len(slices) > 40:
            raise OutOfMemory("too much")
        return [1] * len(slices)

    budget, decodes = TokenBudget(48), [Slice([1], 5, [at], DRAW) for at in range(64)]
    for _ in range(2):
        assert run_step(run, decodes, budget) == [1] * 64
    assert tried == [64, 32, 32, 32, 32]


@pytest.mark.parametrize("most", [1, 8])
def test_a_small_budget_stays_what_it_was(most: int) -> None:
    budget = TokenBudget(most)
    budget.too_much(1)
    assert budget.tokens == most
