"""Draws by tensor operations, as `weights` defines bit for bit: used on CUDA, and to test the compiled kernels.

Logits are `[rows, vocab]` float32 with a finite largest value in each row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcpu.sampling.sampling_call import DEEPEST, MANTISSA_BITS, POWERS_OF_2
from kvfleet.worker.model.sampling.weights import NATURAL, DrawSettings, weight_bits

ROWS_AT_ONCE = 16  # bounds the float64 copies of large vocabularies


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The first of each row's largest logits (`argmax` promises any), and that logit, NaN where the row has any."""
    peaks = logits.amax(dim=-1, keepdim=True)
    last = logits.shape[-1] - 1
    places = torch.arange(last + 1, device=logits.device)
    return torch.where(logits == peaks, places, last).amin(dim=-1).tolist(), peaks[:, 0].tolist()


def draw(logits: Tensor, settings: DrawSettings) -> list[int]:
    """One token per row."""
    cumulated = kept_weights(logits, settings).cumsum(dim=-1)
    total = cumulated[:, -1]
    target = torch.minimum((_column(settings.points, logits)[:, 0] * total.double()).long(), total - 1)
    found: list[int] = torch.searchsorted(cumulated, target[:, None], right=True)[:, 0].tolist()
    return found


def kept_weights(logits: Tensor, settings: DrawSettings) -> Tensor:
    """`[rows, vocab]` int64: the weights of the tokens that may be drawn, 0 elsewhere."""
    weights = _weights(logits, _column(settings.scale, logits), settings.bits)
    weights = weights.masked_fill(logits < _kth_largest(logits, settings.top_k), 0)
    weights = weights.masked_fill(logits < _mass_floor(logits, weights, settings.top_p), 0)
    return weights.masked_fill(weights < _column(settings.least, logits), 0)


def masses_and_best(logits: Tensor, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`[rows]` sums of all weights at temperature 1; `[rows, count]` ids of the largest, equal ones in id order."""
    scale = torch.full((len(logits), 1), NATURAL, dtype=torch.float64, device=logits.device)
    masses = _weights(logits, scale, weight_bits(logits.shape[-1])).sum(dim=-1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return masses.cpu().numpy(), best.cpu().numpy()


def _weights(logits: Tensor, scale: Tensor, bits: int) -> Tensor:
    wide = logits.double()
    z = ((wide - wide.amax(dim=-1, keepdim=True)) * scale).clamp_(min=DEEPEST)
    whole = z.round()
    part = z - whole
    power = torch.full_like(part, POWERS_OF_2[0])
    for coefficient in POWERS_OF_2[1:]:
        power = power.mul_(part).add_(coefficient)  # two roundings, as in the kernel
    shift = (MANTISSA_BITS - bits - whole.long()).clamp_(max=63)
    return (power * 2.0**MANTISSA_BITS).long() >> shift


def _kth_largest(logits: Tensor, top_k: npt.NDArray[np.int64]) -> Tensor:
    """`[rows, 1]`: the least logit that `top_k` keeps."""
    largest = int(top_k.max())
    if not largest:
        return torch.full((len(logits), 1), float("-inf"), device=logits.device)
    limit = _column(top_k, logits)
    found = logits.topk(largest, dim=-1).values.gather(-1, (limit - 1).clamp(min=0))
    return found.masked_fill(limit == 0, float("-inf"))


def _mass_floor(logits: Tensor, weights: Tensor, top_p: npt.NDArray[np.float64]) -> Tensor:
    """`[rows, 1]`: the least logit of the smallest set of largest ones whose weights reach `top_p` of all."""
    floor = torch.full((len(logits), 1), float("-inf"), device=logits.device)
    rows = torch.from_numpy(np.flatnonzero(top_p < 1)).to(logits.device)
    if not len(rows):
        return floor
    ordered, places = logits[rows].sort(dim=-1, descending=True)
    mass = weights[rows].gather(-1, places).cumsum(dim=-1)
    need = (_column(top_p, logits)[rows] * mass[:, -1:].double()).long().clamp_(min=1)
    floor[rows] = ordered.gather(-1, torch.searchsorted(mass, need))
    return floor


def _column(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
