"""Whether a right answer may differ where it does: two engines, or two batches, add in another order.

The real model's logits there are computed once more, moved a little at random, and drawn from: if either token comes,
it was a near tie. The model is read when it is first asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvsampling.draw import Draw, Drawn
from kvsampling.sampler import sample
from tests.chaos.cases import Case
from tests.chaos.checker import Mismatch
from tests.chaos.layout import REAL

NEAR_TIE = 1e-4  # of two logits: below it the order of additions decides (DESIGN, section 6)
TRIES = 512


def is_near_tie(case: Case, mismatch: Mismatch) -> bool:
    if case.model != REAL or not case.ids:
        return False
    before = mismatch.expected[: mismatch.index]
    found = _draws(case, before, mismatch.choice)
    stops = _stop_ids()
    return all(_next(ids, mismatch.index, found, stops) for ids in (mismatch.expected, mismatch.got))


def _next(ids: Sequence[int], index: int, found: set[Drawn], stops: Sequence[int]) -> bool:
    """Whether what comes at an index is among the tokens found; an answer that ends there had one of `stops`."""
    return ids[index] in found if index < len(ids) else not found.isdisjoint(stops)


def _draws(case: Case, before: Sequence[int], choice: int) -> set[Drawn]:
    sampling, index = replace(case.sampling_of(), logprobs=None), len(before)
    with torch.inference_mode():
        logits = _model()(torch.tensor([[*case.ids, *before]])).logits[0, -1]
    noise = torch.rand(TRIES, len(logits), generator=torch.Generator().manual_seed(0)) * 2 - 1
    banned = _stop_ids() if index < sampling.min_tokens else ()
    draw = Draw(sampling, choice, index, case.ids, before, banned)
    return set(sample(torch.cat([logits[None], logits + noise * NEAR_TIE / 2]), [draw] * (TRIES + 1)))


@cache
def _model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


def _stop_ids() -> tuple[int, ...]:
    return tuple(_model().config.eos_token_id)
