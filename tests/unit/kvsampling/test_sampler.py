"""The sampler against a naive one that works on one row with plain Python, and its independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_rig import relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import EngineFailure
from kvproto.messages import Sampling
from kvsampling.draw import Draw
from kvsampling.portable import uniform
from kvsampling.sampler import sample


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
    if sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1:
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
    weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
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
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
)


@settings(relaxed, max_examples=200)
@given(st.lists(draws, min_size=1, max_size=40), st.integers(0, 2**31))
def test_equals_the_naive_sampler(wanted: list[Draw], seed: int) -> None:
    logits = torch.randn(len(wanted), 11, generator=torch.Generator().manual_seed(seed)) * 3
    expected = [naive(row, one) for row, one in zip(logits.double().tolist(), wanted, strict=True)]
    assert sample(logits, wanted) == expected


# Every feature at once: what one row asks for must not reach another.
demanding = st.builds(
    lambda one, extra, ids: replace(one, sampling=replace(one.sampling, **extra), prompt_ids=ids[:3], output_ids=ids),
    draws,
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.just(1.3),
            "frequency_penalty": st.just(0.7),
            "presence_penalty": st.just(-0.4),
            "logit_bias": st.dictionaries(st.integers(0, 299), st.floats(-5, 5), max_size=3),
            "logprobs": st.integers(0, 5),
        },
    ),
    st.lists(st.integers(0, 299), max_size=8),
)


@settings(relaxed, max_examples=60)
@given(st.lists(demanding, min_size=2, max_size=40), st.randoms(use_true_random=False), st.booleans())
def test_a_row_is_the_same_bit_for_bit_in_any_batch(wanted: list[Draw], chance: object, brain: bool) -> None:
    logits = torch.randn(len(wanted), 300, generator=torch.Generator().manual_seed(1)) * 3
    logits = logits.bfloat16() if brain else logits  # with many equal logits
    together = sample(logits, wanted)
    assert together == [sample(logits[at : at + 1], [one])[0] for at, one in enumerate(wanted)]
    order = list(range(len(wanted)))
    chance.shuffle(order)  # type: ignore[attr-defined]
    assert sample(logits[order], [wanted[at] for at in order]) == [together[at] for at in order]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample(logits, [draw(logit_bias={1: 5.0}, temperature=0.0), draw(seed=1), draw(logprobs=3)])
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_equal_logits_and_never_divides() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, -5.0]])
    assert sample(logits, [draw(temperature=0.0, top_k=3, top_p=0.1)]) == [1]
    assert sample(logits.bfloat16(), [draw(temperature=0.0)]) == [1]


@pytest.mark.parametrize("only_the_best", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}])
def test_where_only_the_best_may_come_the_first_of_them_does(only_the_best: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, -5.0]]).repeat(50, 1)
    assert set(sample(logits, [draw(seed=at, **only_the_best) for at in range(50)])) == {1}


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_a_tiny_temperature_overflows_nothing_and_is_greedy(temperature: float) -> None:
    logits = torch.randn(20, 700, generator=torch.Generator().manual_seed(3)) * 10
    tiny = [draw(seed=at, temperature=temperature, top_p=(1.0, 0.9)[at % 2]) for at in range(20)]
    assert sample(logits, tiny) == logits.argmax(dim=-1).tolist()


def test_a_limit_beyond_the_vocabulary_is_none() -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(4))
    for limit in (30, 31, 2**31 - 1):
        limited = sample(logits, [draw(seed=at, top_k=limit) for at in range(40)])
        assert limited == sample(logits, [draw(seed=at) for at in range(40)])


def test_negative_zero_is_zero() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0]])
    assert sample(logits, [draw(temperature=0.0)]) == [0]
    twin = torch.tensor([[0.0, -0.0, -1.0]])
    for at in range(50):
        for fields in ({}, {"top_k": 2}, {"top_p": 0.5}, {"repetition_penalty": 2.0}):
            one = replace(draw(seed=at, **fields), prompt_ids=(0, 1))
            assert sample(logits, [one]) == sample(twin, [one])


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


def test_a_vocabulary_without_a_finite_logit_fails() -> None:
    assert isinstance(sample(torch.full((1, 5), float("-inf")), [draw()])[0], EngineFailure)


def test_what_raises_in_one_row_fails_that_row_alone() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(5))
    fine = [draw(seed=at, presence_penalty=0.5) for at in range(4)]
    broken = [*fine[:2], replace(fine[2], output_ids=object()), fine[3]]
    expected = sample(logits, fine)
    drawn = sample(logits, broken)
    assert [drawn[at] == expected[at] for at in (0, 1, 3)] == [True] * 3
    assert isinstance(drawn[2], EngineFailure)
    assert "sampling failed: TypeError" in drawn[2].message


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((200, 6), float("-inf"))
    logits[:, 2] = 0.0
    logits[:, 4] = -3.0
    tokens = sample(logits, [draw(seed=at, temperature=2.0) for at in range(200)])
    assert set(tokens) == {2, 4}


def test_nothing_to_draw() -> None:
    assert sample(torch.empty(0, 5), []) == []
