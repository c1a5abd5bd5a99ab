"""Whether two modules are alike: by what they are, or by what they compute in trials. Pure.

Modules of one signature run the same code with the same settings, and so differ in nothing but their numbers.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

TRIALS = ((1.0, 0.0), (1.0, 3.0), (1e-3, 0.0), (100.0, -50.0), (1e4, 0.0))  # (scale, mean) of its numbers
_INTERNAL = set(vars(nn.Module())) - {"training"}
_POSITION = {"layer_idx", "layer_id", "layer_index"}  # says which layer of all it is


def signature(module: nn.Module) -> Hashable:
    """Equal for modules that are alike. What is no plain setting counts as equal only if it is the same object."""
    return (
        tuple((name, type(part), _settings(part)) for name, part in module.named_modules()),
        tuple((name, part.shape, part.dtype) for name, part in module.named_parameters()),
        tuple((name, id(part)) for name, part in module.named_buffers()),
    )


def _settings(module: nn.Module) -> Hashable:
    return tuple(
        (name, value if _is_plain(value) else id(value))
        for name, value in sorted(vars(module).items())
        if name not in _INTERNAL | _POSITION
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, str | int | float | torch.dtype | None)


def same(found: object, wanted: object) -> bool:
    """Of one shape and kind, and apart by no more than what the order of sums explains."""
    if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        return False
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    scale = float(wanted.float().abs().max()) or 1.0
    error = float((found.float() - wanted.float()).abs().max())
    return error <= scale * (1e-5 if wanted.dtype is torch.float32 else 0.02)
