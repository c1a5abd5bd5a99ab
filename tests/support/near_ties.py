"""Whether a right answer may differ where it does: two engines, or two batches, add in another order.

The demo model's logits there are computed once more, moved a little at random, and drawn from: if either token comes,
it was a near tie. The model is read when it is first asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvproto.messages import Sampling
from kvsampling.draw import Draw, Drawn
from kvsampling.sampler import sample

NEAR_TIE = 1e-4  # of two logits: below it the order of additions decides (DESIGN, section 6)
TRIES = 512


def is_near_tie(
    prompt: Sequence[int], sampling: Sampling, choice: int, one: Sequence[int], other: Sequence[int]
) -> bool:
    """Of two answers of the demo model, whether they may part where they first do."""
    index = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    found = _draws(prompt, sampling, choice, one[:index])
    return all(_next(ids, index, found, _stop_ids()) for ids in (one, other))


def _next(ids: Sequence[int], index: int, found: set[Drawn], stops: Sequence[int]) -> bool:
    """Whether what comes at an index is among the tokens found; an answer that ends there had one of `stops`."""
    return ids[index] in found if index < len(ids) else not found.isdisjoint(stops)


def _draws(prompt: Sequence[int], sampling: Sampling, choice: int, before: Sequence[int]) -> set[Drawn]:
    index = len(before)
    with torch.inference_mode():
        logits = _model()(torch.tensor([[*prompt, *before]])).logits[0, -1]
    noise = torch.rand(TRIES, len(logits), generator=torch.Generator().manual_seed(0)) * 2 - 1
    banned = _stop_ids() if index < sampling.min_tokens else ()
    draw = Draw(replace(sampling, logprobs=None), choice, index, prompt, before, banned)
    return set(sample(torch.cat([logits[None], logits + noise * NEAR_TIE / 2]), [draw] * (TRIES + 1)))


@cache
def _model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


def _stop_ids() -> tuple[int, ...]:
    return tuple(_model().config.eos_token_id)
