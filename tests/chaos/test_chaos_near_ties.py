"""What is forgiven as a near tie: draws that hardly differing logits lead to, greedy or not, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tests.chaos import near_ties
from tests.chaos.cases import Case
from tests.chaos.checker import Mismatch
from tests.chaos.history import Transport
from tests.chaos.layout import FAKE, REAL

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


def judge(monkeypatch: pytest.MonkeyPatch, model: Model, got: tuple[int, ...], **sampling: object) -> bool:
    monkeypatch.setattr(near_ties, "_model", lambda: model)
    case = Case("case", Transport.CLIENT, REAL, "public", 4, {"temperature": 0.0, **sampling}, PROMPT)
    return near_ties.is_near_tie(case, Mismatch(0, "case", 0, 0, 1, (3, 2), got))


def test_two_best_tokens_as_good_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(0.0, 0.0, 1.0, 1.00003)
    assert judge(monkeypatch, model, (3, 3))
    assert not judge(monkeypatch, model, (3, 1))
    assert not judge(monkeypatch, Model(0.0, 0.0, 1.0, 1.001), (3, 3))


def test_an_end_for_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge(monkeypatch, Model(1.0, 0.0, 1.00003, 0.0), (3,))
    assert not judge(monkeypatch, Model(1.0, 0.0, 1.00003, 0.0), (3,), min_tokens=4)


def test_a_sampled_token_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four are as probable, and no random number is where one ends and the other begins."""
    model = Model(-50.0, -50.0, 1.0, 1.0)
    assert any(judge(monkeypatch, model, (3, 2), temperature=1.0, seed=seed) for seed in range(9))
    assert not any(judge(monkeypatch, model, (3, 3), temperature=1.0, seed=seed) for seed in range(9))


def test_what_is_not_of_the_real_model_is_not_forgiven() -> None:
    case = Case("case", Transport.CLIENT, FAKE, "public", 4, {"temperature": 0.0}, PROMPT)
    assert not near_ties.is_near_tie(case, Mismatch(0, "case", 0, 0, 1, (3, 2), (3, 3)))
