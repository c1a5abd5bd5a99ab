"""Logits that depend on every token before them, through what lies in the cache's blocks. Pure.

The KV of a block is one number, the state after its last token. So a block that is found for other tokens, or another
tenant's, changes all that follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FIRST = 0x243F6A8885A308D3
_MASK = 2**64 - 1


def after(state: int, ids: Iterable[int]) -> int:
    for token in ids:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x165667B19E3779F9) & _MASK
        state ^= state >> 29
    return state


def logits(state: int, vocab_size: int) -> npt.NDArray[np.float32]:
    return np.random.Generator(np.random.PCG64(state)).standard_normal(vocab_size, np.float32) * 2


def prompt_scores(prompt: list[int], states: list[int], vocab_size: int, count: int) -> list[dict[str, Any] | None]:
    """As vLLM tells them: of each token but the first, and of the best `count` ones."""
    told: list[dict[str, Any] | None] = [None]
    for state, token in zip(states[: len(prompt) - 1], prompt[1:], strict=True):
        row = torch.from_numpy(logits(state, vocab_size).copy())
        values = torch.log_softmax(row, -1)
        best = torch.argsort(values, descending=True, stable=True)[:count].tolist()
        ranks = {token: int((values >= values[token]).sum())} | {one: at for at, one in enumerate(best, 1)}
        told.append({str(one): {"logprob": float(values[one]), "rank": at} for one, at in ranks.items()})
    return told


def logprobs(row: Tensor, drawn: int, count: int) -> list[tuple[int, float, int]]:
    """Id, log probability and rank of the drawn token and then of the best ones, `count` in all, as vLLM tells them."""
    values = torch.log_softmax(row, -1)
    ranked = torch.argsort(values, descending=True, stable=True)[:count].tolist()
    told = [drawn, *(token for token in ranked if token != drawn)][: max(count, 1)]
    return [(token, float(values[token]), int((values > values[token]).sum()) + 1) for token in told]
