"""What a draw is, in numbers that come out the same on every device, and how tensor operations compute it.

Tests compare the compiled kernels, a CPU's and a GPU's, with these operations.
Logits are `[rows, vocab]` float32 with a finite largest value in each row.

A token's weight is a whole number, about 2**bits * probability / greatest probability:

    weight(x) = floor(2**bits * 2**z),   z = (x - peak) / (temperature * ln 2) <= 0

with 2**z by a fixed polynomial in float64, term by term and without fused operations. Sums of whole numbers do not
depend on their order, so the compiled kernels and the tensor operations draw the same token from the same
logits bit for bit, in any batch, split over threads or not. `bits` is as large as a sum over the vocabulary allows, 44
for 151,936 tokens.

Kept are, one after the other: the `top_k` largest logits; the largest of these that together reach `top_p` of their
weight; of these, whose weight is `min_p` of the greatest. Equal logits stay or go together. Of a kept total W the
random number u picks the first token whose cumulated weight, in token order, exceeds floor(u * W).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcpu.sampling.sampling_call import DEEPEST, MANTISSA_BITS, POWERS_OF_2
from kvproto.messages import Sampling, TokenLogprobs
from kvsampling.draw import Draw

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NATURAL = 1 / math.log(2)  # the scale of temperature 1
LEAST_TEMPERATURE = 1e-300  # below, only the largest logits have weight anyway


def weight_bits(vocab: int) -> int:
    """The weight of the most probable token is 2 to this power: `vocab` of them sum to less than 2**62."""
    return min(MANTISSA_BITS, 62 - vocab.bit_length())


def is_greedy(sampling: Sampling) -> bool:
    """Whether only the most probable token (the first of equal ones) may be drawn."""
    return sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0 or sampling.min_p == 1


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number of one draw, in [0, 1), a multiple of 2**-53: a hash, so that it has no state."""
    raw = struct.pack("<QII", seed & (2**64 - 1), choice & (2**32 - 1), index & (2**32 - 1))
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """How each of some rows is drawn, one entry a row."""

    bits: int
    scale: Floats  # 1 / (temperature * ln 2)
    top_k: Ints  # 0: no limit
    top_p: Floats
    least: Ints  # weight below which a token goes
    points: Floats  # the random numbers

    @classmethod
    def of(cls, draws: Sequence[Draw], vocab: int) -> DrawSettings:
        bits = weight_bits(vocab)
        asked = [draw.sampling for draw in draws]
        return cls(
            bits,
            np.array([NATURAL / max(one.temperature, LEAST_TEMPERATURE) for one in asked]),
            np.array([one.top_k if one.top_k < vocab else 0 for one in asked], dtype=np.int64),
            np.array([one.top_p for one in asked]),
            np.array([math.ceil(one.min_p * 2.0**bits) for one in asked], dtype=np.int64),
            np.array([uniform(draw.sampling.seed or 0, draw.choice, draw.index) for draw in draws]),
        )


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The first of each row's largest logits (`argmax` promises any), and that logit, NaN where the row has any."""
    peaks = logits.amax(dim=-1, keepdim=True)
    last = logits.shape[-1] - 1
    places = torch.arange(last + 1, device=logits.device)
    return torch.where(logits == peaks, places, last).amin(dim=-1).tolist(), peaks[:, 0].tolist()


def draw(logits: Tensor, settings: DrawSettings) -> list[int]:
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


def masses_and_best(logits: Tensor, count: int) -> tuple[Ints, Ints]:
    """`[rows]` sums of all weights at temperature 1; `[rows, count]` ids of the largest, equal ones in id order."""
    scale = torch.full((len(logits), 1), NATURAL, dtype=torch.float64, device=logits.device)
    masses = _weights(logits, scale, weight_bits(logits.shape[-1])).sum(dim=-1)
    best = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return masses.cpu().numpy(), best.cpu().numpy()


def logprobs_of(mass: int, ids: Sequence[int], values: Sequence[float], asked: int, vocab: int) -> TokenLogprobs:
    """The model's own of a token and of `asked` alternatives. `mass`: of all weights at temperature 1; `ids`: of the
    largest logits; `values`: the token's logit, then those."""
    own, *found = values
    whole = found[0] + math.log(mass) - weight_bits(vocab) * math.log(2)  # log of the sum of e**logit
    return TokenLogprobs(own - whole, tuple(ids[:asked]), tuple(value - whole for value in found[:asked]))


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


def _kth_largest(logits: Tensor, top_k: Ints) -> Tensor:
    """`[rows, 1]`: the least logit that `top_k` keeps."""
    largest = int(top_k.max())
    if not largest:
        return torch.full((len(logits), 1), float("-inf"), device=logits.device)
    limit = _column(top_k, logits)
    found = logits.topk(largest, dim=-1).values.gather(-1, (limit - 1).clamp(min=0))
    return found.masked_fill(limit == 0, float("-inf"))


def _mass_floor(logits: Tensor, weights: Tensor, top_p: Floats) -> Tensor:
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
