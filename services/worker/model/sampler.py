"""Logits to tokens, a batch at a time.

A token depends on its own logits and on (seed, choice, index) alone, never on what else is in the batch or on a
generator's state: a sequence that is moved, preempted or replayed draws the same tokens. The random number is a hash
of the three, turned into a point of [0, 1) and looked up in the cumulative distribution in token order; probabilities
are float64, so the 53 bits of that point all count.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvproto.errors import EngineFailure
from services.worker.model.base import Drawn
from services.worker.step_plan import Draw

ROWS_AT_ONCE = 16  # bounds the float64 copies of large vocabularies


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number of one draw, in [0, 1), a multiple of 2**-53."""
    raw = struct.pack("<QII", seed & (2**64 - 1), choice & (2**32 - 1), index & (2**32 - 1))
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token per row of `logits` `[rows, vocab]`; an error in place of one whose logits are not finite."""
    if not draws:
        return []
    peaks, greedy = logits.max(dim=-1)
    tokens: list[Drawn] = list(greedy.tolist())
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    for at in range(0, len(random), ROWS_AT_ONCE):
        rows = random[at : at + ROWS_AT_ONCE]
        index = torch.tensor(rows, device=logits.device)
        drawn = _draw(logits[index].double(), [draws[row] for row in rows])
        for row, token in zip(rows, drawn.tolist(), strict=True):
            tokens[row] = token
    for row in (~torch.isfinite(peaks)).nonzero().flatten().tolist():
        tokens[row] = EngineFailure("the model computed logits that are not finite")
    return tokens


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`[rows]` tokens, drawn from float64 `logits` `[rows, vocab]`, temperatures above 0."""
    device = logits.device
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64, device=device)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    weights = _keep_top_p(_keep_top_k(logits, draws).softmax(dim=-1), draws)
    cumulative = weights.cumsum(dim=-1)
    points = torch.tensor(
        [[uniform(draw.sampling.seed or 0, draw.choice, draw.index)] for draw in draws],
        dtype=torch.float64,
        device=device,
    )
    found = torch.searchsorted(cumulative, points * cumulative[:, -1:], right=True).squeeze(-1)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(found, last)  # rounding must not lead past the last possible token


def _keep_top_k(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """-inf for what is below the k-th largest logit; ties with it stay."""
    vocab = logits.shape[-1]
    limits = [draw.sampling.top_k if 0 < draw.sampling.top_k < vocab else 0 for draw in draws]
    largest = max(limits)
    if not largest:
        return logits
    top = logits.topk(largest, dim=-1).values
    at = torch.tensor([max(limit - 1, 0) for limit in limits], device=logits.device)
    floor = top.gather(-1, at[:, None])
    unlimited = torch.tensor([not limit for limit in limits], device=logits.device)[:, None]
    return logits.masked_fill((logits < floor) & ~unlimited, float("-inf"))


def _keep_top_p(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """0 for what is less probable than the smallest set of most probable tokens that reaches p; ties stay."""
    limited = [row for row, draw in enumerate(draws) if draw.sampling.top_p < 1]
    if not limited:
        return weights
    rows = torch.tensor(limited, device=weights.device)
    mass = torch.tensor([[draws[row].sampling.top_p] for row in limited], dtype=torch.float64, device=weights.device)
    chosen = weights[rows]
    ordered = chosen.sort(dim=-1, descending=True).values
    last = (ordered.cumsum(dim=-1) < mass).sum(dim=-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    weights[rows] = chosen.masked_fill(chosen < ordered.gather(-1, last), 0.0)
    return weights
