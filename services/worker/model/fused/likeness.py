"""Whether two modules run the same code with the same settings, and so differ in nothing but their numbers. Pure."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

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
