"""Candidates of beams: the most probable tokens of each row, beside rows that draw one."""

from __future__ import annotations

import math

import pytest
import torch

from kvproto.errors import EngineFailure, InvalidRequest
from kvproto.messages import Beams, Sampling
from kvsampling.draw import ALL_BANNED, NOT_FINITE, Candidates, Draw
from kvsampling.sampler import ROWS_AT_ONCE, sample

VOCAB = 50
LOGITS = 3 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(3))


def wanting(count: int, banned: tuple[int, ...] = (), **sampling: object) -> Draw:
    return Draw(Sampling(8, beams=Beams(4), **sampling), 0, 0, banned=banned, candidates=count)  # type: ignore[arg-type]


def test_they_are_the_most_probable_and_best_first() -> None:
    draws = [wanting(3 + at % 5) for at in range(len(LOGITS))]
    plain = torch.log_softmax(LOGITS, dim=-1)
    assert len(draws) > 2 * ROWS_AT_ONCE
    for row, (found, draw) in enumerate(zip(sample(LOGITS, draws), draws, strict=True)):
        assert isinstance(found, Candidates)
        best = plain[row].topk(draw.candidates)
        assert found.tokens == tuple(best.indices.tolist())
        assert found.scores == tuple(best.values.tolist())
        assert found.logprobs_of(0) is None
    (whole,) = sample(LOGITS[:1], [wanting(9999)])
    assert isinstance(whole, Candidates)
    assert sorted(whole.tokens) == list(range(VOCAB))


def test_rows_beside_them_draw_what_they_draw_alone() -> None:
    greedy, random = Draw(Sampling(8, temperature=0.0), 0, 0), Draw(Sampling(8, seed=5), 0, 3)
    draws = [greedy, wanting(4), random, wanting(6, logprobs=2), greedy]
    together = sample(LOGITS[:5], draws)
    assert together == [sample(LOGITS[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert [isinstance(one, Candidates) for one in together] == [False, True, False, True, False]


def test_changes_are_of_the_scores_and_not_of_the_log_probabilities() -> None:
    plain = torch.log_softmax(LOGITS[0], dim=-1)
    first, second = plain.topk(2).indices.tolist()
    (found,) = sample(LOGITS[:1], [wanting(4, banned=(first,), logit_bias={second: -0.5, 7: 20.0}, logprobs=3)])
    assert isinstance(found, Candidates)
    assert found.tokens[0] == 7
    assert first not in found.tokens
    assert found.scores[0] == pytest.approx(float(plain[7]) + 20.0, abs=1e-5)
    scored = found.logprobs_of(0)
    assert scored is not None
    assert scored.logprob == float(plain[7])
    assert scored.top_ids[:2] == (first, second)
    assert scored.top_logprobs == tuple(plain.topk(3).values.tolist())


def test_an_error_is_of_its_row_alone() -> None:
    logits = LOGITS[:4].clone()
    logits[1, 5] = math.nan
    everything = tuple(range(VOCAB))
    draws = [wanting(2), wanting(2), wanting(2, banned=everything), wanting(2, logit_bias={VOCAB: 1.0})]
    fine, nan, banned, unknown = sample(logits, draws)
    assert isinstance(fine, Candidates)
    assert isinstance(nan, EngineFailure)
    assert NOT_FINITE in str(nan)
    assert isinstance(banned, EngineFailure)
    assert ALL_BANNED in str(banned)
    assert isinstance(unknown, InvalidRequest)
