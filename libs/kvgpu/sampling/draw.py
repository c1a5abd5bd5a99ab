"""Launches the kernels of a draw. Nothing here waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcpu.sampling.sampling_call import MANTISSA_BITS, POWERS_OF_2
from kvgpu.sampling import kernels
from kvgpu.triton_language import INTERPRETED

GREEDY = -1.0  # in place of a random number: the first of the largest logits
WIDEST = 4096  # logits at a time

_terms: dict[torch.device, Tensor] = {}


def draw(
    logits: Tensor, peaks: Tensor, scale: Tensor, top_k: Tensor, top_p: Tensor, least: Tensor, points: Tensor, bits: int
) -> Tensor:
    """Tokens `[rows]` int64, of `logits` `[rows, vocab]` float32 whose largest are `peaks`; what they are where a peak
    is not finite means nothing. All else is `[rows]` as in `kvsampling.portable.DrawSettings`, or `GREEDY`."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    kernels.draw[(len(logits),)](
        logits, peaks, scale, top_k, top_p, least, points, _of(logits.device), tokens, logits.stride(0),
        logits.shape[-1], **_shape(logits, bits),
    )  # fmt: skip
    return tokens


def masses_and_best(logits: Tensor, peaks: Tensor, natural: Tensor, count: int, bits: int) -> tuple[Tensor, Tensor]:
    """`[rows]` sums of all weights at temperature 1, and `[rows, count]` ids of the largest logits."""
    rows = len(logits)
    masses = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    kernels.masses_and_best[(rows,)](
        logits, peaks, _of(logits.device), natural, masses, best, logits.stride(0), logits.shape[-1], count,
        **_shape(logits, bits),
    )  # fmt: skip
    return masses, best


def _of(device: torch.device) -> Tensor:
    """The polynomial's terms there: made once."""
    if device not in _terms:
        _terms[device] = torch.tensor(POWERS_OF_2, dtype=torch.float64, device=device)
    return _terms[device]


def _shape(logits: Tensor, bits: int) -> dict[str, Any]:
    block = min(WIDEST, max(256, 1 << (logits.shape[-1] - 1).bit_length()))
    launch = {} if INTERPRETED else {"num_warps": max(4, block // 256), "enable_fp_fusion": False}
    return {"SHIFT": MANTISSA_BITS - bits, "BLOCK": block, **launch}
