"""What a draw is, in numbers that come out the same on every device. Pure.

A token's weight is a whole number, about 2**bits * probability / greatest probability:

    weight(x) = floor(2**bits * 2**z),   z = (x - peak) / (temperature * ln 2) <= 0

with 2**z by a fixed polynomial in float64, term by term and without fused operations. Sums of whole numbers do not
depend on their order, so the compiled kernels and the tensor operations (`portable`) draw the same token from the same
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

from kvcpu.sampling.sampling_call import MANTISSA_BITS
from kvfleet.worker.schedule.step_plan import Draw
from kvproto.messages import Sampling

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
