"""What is forgiven as a near tie: draws that hardly differing logits lead to, greedy or not, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvproto.messages import Sampling
from kvsampling.draw import Draw
from kvsampling.sampler import sample
from tests.support import near_ties

PROMPT = (5, 6, 7)


class Model:
    """Each prompt is followed by the same logits."""

    class config:
        eos_token_id = (0,)

    def __init__(self, *logits: float) -> None:
        self._logits = torch.tensor(logits)

    def __call__(self, ids: torch.Tensor) -> Model:
        self.logits = self._logits.expand(1, ids.shape[1], -1)
        return self


def judge(monkeypatch: pytest.MonkeyPatch, model: Model, got: tuple[int, ...], **sampling: Any) -> bool:
    monkeypatch.setattr(near_ties, "_model", lambda: model)
    asked = Sampling(4, **{"temperature": 0.0, **sampling})
    return near_ties.is_near_tie(PROMPT, asked, 0, (3, 2), got)


def test_two_best_tokens_as_good_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(0.0, 0.0, 1.0, 1.00003)
    assert judge(monkeypatch, model, (3, 3))
    assert not judge(monkeypatch, model, (3, 1))
    assert not judge(monkeypatch, Model(0.0, 0.0, 1.0, 1.001), (3, 3))


def test_an_end_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch, Model(1.0, 0.0, 1.00003, 0.0), (3,))
    assert not judge(monkeypatch, Model(1.0, 0.0, 1.00003, 0.0), (3,), min_tokens=4)


def test_a_sampled_token_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the logits for which the same random number gives one token and those for which it gives the other."""
    asked = Sampling(4, temperature=1.0, seed=1)

    def second(logit: float) -> bool:
        return sample(torch.tensor([[-50.0, -50.0, 1.0, logit]]), [Draw(asked, 0, 1)]) == [3]

    least, most = -20.0, 20.0
    assert not second(least)
    assert second(most)
    for _ in range(40):
        middle = (least + most) / 2
        least, most = (least, middle) if second(middle) else (middle, most)
    for off, forgiven in ((0.0, True), (0.001, False), (-0.001, False)):
        model = Model(-50.0, -50.0, 1.0, most + off)
        assert judge(monkeypatch, model, (3, 3), temperature=1.0, seed=1) == forgiven
