"""What a replacement is tried on, and when it computes the same. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

TRIALS = ((1.0, 0.0), (1.0, 3.0), (1e-3, 0.0), (100.0, -50.0), (1e4, 0.0))  # (scale, mean) of its numbers


def same(found: object, wanted: object) -> bool:
    """Of one shape and kind, and apart by no more than what the order of sums explains."""
    if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        return False
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    scale = float(wanted.float().abs().max()) or 1.0
    error = float((found.float() - wanted.float()).abs().max())
    return error <= scale * (1e-5 if wanted.dtype is torch.float32 else 0.02)
