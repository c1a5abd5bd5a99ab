"""What a request changes in its logits, and the log probabilities it asks for, against the written formulas."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import Sampling
from kvsampling.changes import LogitChanges, apply
from kvsampling.draw import Draw, Scored
from kvsampling.sampler import sample

VOCAB = 60
PROMPT = (3, 3, 7, 41)
OUTPUT = (7, 7, 7, 12, 41, 59)


def draw(**fields: object) -> Draw:
    return Draw(Sampling(1, **({"temperature": 0.0} | fields)), 0, 0, PROMPT, OUTPUT)  # type: ignore[arg-type]


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def changed(one: Draw) -> list[float]:
    row = logits()
    apply(row, [LogitChanges.of(one, VOCAB)])
    return row[0].tolist()


def test_presence_and_frequency_as_openai_states_them() -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c counting the generated tokens."""
    counts = Counter(OUTPUT)
    expected = [mu - counts[j] * 0.7 - (counts[j] > 0) * -0.4 for j, mu in enumerate(logits()[0].tolist())]
    assert changed(draw(frequency_penalty=0.7, presence_penalty=-0.4)) == pytest.approx(expected, abs=1e-6)


def test_repetition_is_penalised_once_however_often_a_token_was_seen() -> None:
    expected = [
        mu if j not in PROMPT + OUTPUT else mu * 1.5 if mu < 0 else mu / 1.5
        for j, mu in enumerate(logits()[0].tolist())
    ]
    assert changed(draw(repetition_penalty=1.5)) == pytest.approx(expected, abs=1e-6)


def test_changes_happen_in_the_documented_order() -> None:
    """Repetition, then frequency and presence, then biases, then bans."""
    one = draw(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={7: 10.0, 12: 1.0})
    found = changed(replace(one, banned=(12,)))
    before = logits()[0].tolist()
    assert found[7] == pytest.approx(
        (before[7] * 2 if before[7] < 0 else before[7] / 2) - 3 * 1.0 - 0.5 + 10.0, abs=1e-5
    )
    assert found[12] == -math.inf


def test_each_row_has_its_own_changes_greedy_rows_too() -> None:
    rows = logits(5, seed=1)
    best = rows.argmax(dim=-1).tolist()
    drawn = sample(
        rows,
        [
            draw(),
            draw(logit_bias={11: 100.0}),
            replace(draw(), banned=(best[2],)),
            replace(draw(presence_penalty=50.0), output_ids=(best[3],)),
            draw(),
        ],
    )
    second = rows.topk(2, dim=-1).indices[:, 1].tolist()
    assert drawn == [best[0], 11, second[2], second[3], best[4]]


def test_a_huge_bias_decides_a_random_draw_too() -> None:
    rows = logits(100)
    assert set(sample(rows, [draw(temperature=1.0, seed=at, logit_bias={5: 100.0}) for at in range(100)])) == {5}
    never = [draw(temperature=100.0, seed=at, logit_bias=dict.fromkeys(range(2, VOCAB), -1e5)) for at in range(100)]
    assert set(sample(rows, never)) == {0, 1}


def test_banned_tokens_are_not_drawn_and_those_outside_of_the_vocabulary_do_not_matter() -> None:
    drawn = sample(
        torch.zeros(200, 4),
        [Draw(Sampling(1, seed=at), 0, 0, banned=(1, 3, 4, -1, 10**6)) for at in range(200)],
    )
    assert set(drawn) == {0, 2}


def test_a_row_whose_tokens_are_all_banned_fails_and_says_so() -> None:
    rows = logits(3)
    banned, fine = replace(draw(), banned=range(VOCAB)), draw(logit_bias={1: 1.0})
    drawn = sample(rows, [fine, banned, fine])
    assert isinstance(drawn[1], EngineFailure)
    assert "banned" in drawn[1].message
    assert isinstance(drawn[0], int)
    assert isinstance(drawn[2], int)


@pytest.mark.parametrize(
    "bias", [{VOCAB: 1.0}, {-1: 1.0}, {2**70: 1.0}, {1: math.nan}, {1: math.inf}, {1: -math.inf}, {1: 1e39}]
)
def test_a_bias_that_cannot_be_added_fails_its_request_alone(bias: dict[int, float]) -> None:
    drawn = sample(logits(2), [draw(logit_bias=bias), draw(logit_bias={1: 1.0})])
    assert isinstance(drawn[0], InvalidRequest)
    assert drawn[0].field == "logit_bias"
    assert isinstance(drawn[1], int)


def test_logits_that_are_not_finite_fail_a_changed_row_even_where_they_are_banned() -> None:
    rows = logits(2)
    rows[0, 4] = math.nan
    drawn = sample(rows, [replace(draw(), banned=(4,))] * 2)
    assert isinstance(drawn[0], EngineFailure)
    assert isinstance(drawn[1], int)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_are_the_models_own(temperature: float) -> None:
    rows = logits(40, seed=2)
    expected = rows.double().log_softmax(dim=-1)
    asked = [
        draw(temperature=temperature, seed=at, logprobs=at % 6, repetition_penalty=1.4, logit_bias={9: 6.0}, top_k=20)
        for at in range(40)
    ]
    for row, found in enumerate(sample(rows, asked)):
        assert isinstance(found, Scored)
        assert found.logprobs.logprob == pytest.approx(expected[row, found.token].item(), abs=1e-12)
        best = expected[row].topk(row % 6)
        assert found.logprobs.top_ids == tuple(best.indices.tolist())
        assert found.logprobs.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-12)


def test_asking_for_log_probabilities_changes_no_token() -> None:
    rows = logits(30)
    plain = sample(rows, [draw(temperature=1.0, seed=at) for at in range(30)])
    scored = sample(rows, [draw(temperature=1.0, seed=at, logprobs=2) for at in range(30)])
    assert [one.token for one in scored if isinstance(one, Scored)] == plain


def test_equal_alternatives_come_in_id_order_and_no_more_than_there_are() -> None:
    row = torch.zeros(1, 5)
    row[0, 3] = 1.0
    (found,) = sample(row, [draw(logprobs=3)])
    assert isinstance(found, Scored)
    assert found.logprobs.top_ids == (3, 0, 1)
    (found,) = sample(row, [draw(logprobs=128)])
    assert isinstance(found, Scored)
    assert found.logprobs.top_ids == (3, 0, 1, 2, 4)


def test_a_row_that_fails_has_no_log_probabilities() -> None:
    rows = torch.full((2, 5), math.nan)
    rows[1] = 0.0
    drawn = sample(rows, [draw(logprobs=1)] * 2)
    assert isinstance(drawn[0], EngineFailure)
    assert isinstance(drawn[1], Scored)
