"""A GPU's draws are a CPU's, bit for bit, whatever is asked for, log probabilities included. Interpreted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvproto.errors import EngineFailure, InvalidRequest, KvfleetError
from kvproto.messages import Sampling
from kvsampling import gpu, sampler
from kvsampling.draw import Draw, Drawn
from kvsampling.sampler import sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS: list[dict[str, Any]] = [
    {}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 5}, {"top_k": 300}, {"top_p": 0.3}, {"top_p": 0.95},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02}, {"temperature": 0.4, "top_p": 0.9, "top_k": 50},
    {"temperature": 2.5, "top_p": 0.7, "min_p": 0.1}, {"temperature": 1e-6}, {"top_p": 0.0}, {"min_p": 1.0},
]  # fmt: skip
CHANGES: list[dict[str, Any]] = [
    {}, {}, {"presence_penalty": 1.5}, {"frequency_penalty": -0.7}, {"repetition_penalty": 1.3},
    {"logit_bias": {1: 4.0, 7: -100.0}}, {"repetition_penalty": 0.8, "presence_penalty": 0.3, "logit_bias": {0: 1.0}},
]  # fmt: skip


def drawn(logits: Tensor, draws: list[Draw]) -> list[Drawn]:
    return gpu.begin(logits.to(DEVICE), draws).result()


def told(found: list[Drawn]) -> list[object]:
    return [(type(one), one.message) if isinstance(one, KvfleetError) else one for one in found]


def random_draw(chance: random.Random, row: int, vocab: int) -> Draw:
    output = [chance.randrange(vocab) for _ in range(chance.randrange(12))]
    asked = {**chance.choice(LIMITS), **chance.choice(CHANGES)}
    asked["logit_bias"] = {token: by for token, by in asked.get("logit_bias", {}).items() if token < vocab}
    logprobs = chance.choice([None, None, 0, 1, 5, 20])
    sampling = Sampling(1, seed=chance.randrange(2**40), logprobs=logprobs, **asked)
    banned = [chance.randrange(vocab) for _ in range(chance.choice([0, 0, 2]))]
    return Draw(sampling, chance.randrange(3), row, [chance.randrange(vocab) for _ in range(5)], output, banned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [8, 255, 256, 1500, 5000])
def test_any_batch(vocab: int, dtype: torch.dtype) -> None:
    chance = random.Random(vocab)
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[::5] = (logits[::5] * 2).round() / 2  # equal ones
    logits[1::5, ::3] = -math.inf
    draws = [random_draw(chance, row, vocab) for row in range(len(logits))]
    before = logits.to(dtype).clone()
    asked = logits.to(dtype)
    assert drawn(asked, draws) == sample(before, draws)
    assert torch.equal(asked, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_what_fails_in_a_row_fails_there_alone() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3))
    logits[0, 9] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    all_banned = Draw(Sampling(1, seed=1), 0, 0, banned=range(300))
    too_large = Draw(Sampling(1, seed=1, logit_bias={1: 1e31}), 0, 0)
    plain = Draw(Sampling(1, seed=1, logprobs=2), 0, 0)
    draws = [plain, plain, plain, all_banned, too_large, plain]
    found = drawn(logits, draws)
    assert told(found) == told(sample(logits, draws))
    assert [type(one) for one in found[:5]] == [EngineFailure] * 4 + [InvalidRequest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("vocab", "alternatives"), [(8, 0), (8, 20), (255, 1), (5000, 5)])
def test_scores_of_given_tokens(vocab: int, alternatives: int, dtype: torch.dtype) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits[::5] = (logits[::5] * 2).round() / 2  # equal ones
    logits[1::5, ::3] = -math.inf
    logits = logits.to(dtype)
    tokens = [row * 3 % vocab for row in range(len(logits))]  # of rows that have them, some at -inf
    found = gpu.begin_scores(logits.to(DEVICE), tokens, alternatives).result()
    assert found == sampler.score(logits, tokens, alternatives)
    assert any(one.logprob == -math.inf for one in found)
    assert {len(one.top_ids) for one in found} == {min(alternatives, vocab)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_of_no_numbers_are_an_error(bad: float) -> None:
    logits = torch.zeros(20, 300)
    logits[17, 5] = bad
    for score in (sampler.score, lambda *asked: gpu.begin_scores(*asked).result()):
        with pytest.raises(EngineFailure, match="finite"):
            score(logits.to(DEVICE), [0] * 20, 1)


def test_a_piece_is_scored_by_kernels_once_they_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    tokens = list(range(50))
    expected = sampler._score_in_parts(logits, tokens, 3)
    launched: list[int] = []
    launch = gpu.kernels.masses_and_best
    monkeypatch.setattr(gpu.kernels, "masses_and_best", lambda *asked: launched.append(len(asked[0])) or launch(*asked))
    monkeypatch.setattr(sampler, "_by_kernels", {logits.device.type})
    assert sampler.score(logits, tokens, 3) == expected
    assert sampler.score(logits[:0], [], 3) == []
    assert launched == [50]


def test_scores_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = gpu.begin_scores
    monkeypatch.setattr(gpu, "begin_scores", lambda logits, tokens, count: begin(logits, tokens[::-1], count))
    assert not sampler._kernels_agree(torch.device(DEVICE))


def test_kernels_are_tried_before_they_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler._kernels_agree(torch.device(DEVICE))
    draw = gpu.kernels.draw
    monkeypatch.setattr(gpu.kernels, "draw", lambda *asked: draw(*asked).clamp(max=2000))
    assert not sampler._kernels_agree(torch.device(DEVICE))
    monkeypatch.delattr(gpu.kernels, "draw")
    assert not sampler._kernels_agree(torch.device(DEVICE))


def test_negative_zero_is_zero() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]])
    for at in range(20):
        draws = [Draw(Sampling(1, seed=at, top_k=1 + at % 3, logprobs=3), 0, at)]
        assert drawn(logits, draws) == sample(logits, draws)
