"""The sampler against a naive one that works on one row with plain Python, and its independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from engine_rig import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import EngineFailure
from kvproto.messages import Sampling
from services.worker.model.sampler import sample, uniform
from services.worker.step_plan import Draw


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(index: int = 0, choice: int = 0, **fields: object) -> Draw:
    return Draw(Sampling(1, **fields), choice, index)  # type: ignore[arg-type]


def naive(logits: list[float], wanted: Draw) -> int:
    """One row: order, cut, normalise, walk the cumulative distribution in token order."""
    sampling = wanted.sampling
    if sampling.temperature == 0:
        return logits.index(max(logits))
    peak = max(logits)
    weights = [math.exp((value - peak) / sampling.temperature) for value in logits]
    if 0 < sampling.top_k < len(logits):
        floor = sorted(logits, reverse=True)[sampling.top_k - 1]
        weights = [w if value >= floor else 0.0 for w, value in zip(weights, logits, strict=True)]
    total = math.fsum(weights)
    weights = [w / total for w in weights]
    if sampling.top_p < 1:
        mass = 0.0
        for floor in sorted(weights, reverse=True):
            mass += floor
            if mass >= sampling.top_p:
                break
        weights = [w if w >= floor else 0.0 for w in weights]
    point = uniform(sampling.seed, wanted.choice, wanted.index) * math.fsum(weights)
    mass = 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > point and weight:
            return token
    raise AssertionError


draws = st.builds(
    draw,
    index=st.integers(0, 1000),
    choice=st.integers(0, 3),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 3.0, 100.0]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 1000]),
)


@settings(relaxed, max_examples=200)
@given(st.lists(draws, min_size=1, max_size=40), st.integers(0, 2**31))
def test_equals_the_naive_sampler(wanted: list[Draw], seed: int) -> None:
    logits = torch.randn(len(wanted), 11, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [naive(row, one) for row, one in zip(logits.double().tolist(), wanted, strict=True)]
    assert sample(logits, wanted) == expected


@settings(relaxed, max_examples=50)
@given(st.lists(draws, min_size=2, max_size=40), st.randoms(use_true_random=False))
def test_a_token_does_not_depend_on_the_rest_of_the_batch(wanted: list[Draw], chance: object) -> None:
    logits = torch.randn(len(wanted), 50, generator=torch.Generator().manual_seed(1))
    together = sample(logits, wanted)
    assert together == [sample(logits[at : at + 1], [one])[0] for at, one in enumerate(wanted)]
    order = list(range(len(wanted)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    assert sample(logits[order], [wanted[at] for at in order]) == [together[at] for at in order]


def test_greedy_takes_the_first_of_equal_logits_and_never_divides() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, -5.0]])
    assert sample(logits, [draw(temperature=0.0, top_k=3, top_p=0.1)]) == [1]
    assert sample(logits.bfloat16(), [draw(temperature=0.0)]) == [1]


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    count = 4000
    tokens = sample(probabilities.log().repeat(count, 1), [draw(index=at, seed=7) for at in range(count)])
    for token, probability in enumerate(probabilities.tolist()):
        assert tokens.count(token) / count == pytest.approx(probability, abs=0.03)


def test_seed_choice_and_index_each_matter_and_nothing_else() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(1, 2, 3), uniform(2, 2, 3), uniform(1, 3, 3), uniform(1, 2, 4)}) == 4
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    assert all(0 <= uniform(seed, 0, 0) < 1 for seed in range(1000))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    tokens = sample(logits, [draw(temperature=temperature, seed=at) for at in range(3)])
    assert isinstance(tokens[1], EngineFailure)
    assert isinstance(tokens[0], int)
    assert isinstance(tokens[2], int)


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((200, 6), float("-inf"))
    logits[:, 2] = 0.0
    logits[:, 4] = -3.0
    tokens = sample(logits, [draw(seed=at, temperature=2.0) for at in range(200)])
    assert set(tokens) == {2, 4}


def test_nothing_to_draw() -> None:
    assert sample(torch.empty(0, 5), []) == []
