"""Recurrent layers of hybrid models (state space, linear attention): what they keep, and their part in a step. Adapter.

transformers' own modules compute them. They ask a cache for their states by `get_conv_state` and `get_recurrent_state`
and hand it the new ones; here that cache is filled from the state pool for each call:

    decodes of a step      one call for all:     [B, 1, hidden], states gathered and scattered by slot
    a prompt's chunk       one call a piece:     [1, n, hidden], cut where a snapshot is to be taken

What a module keeps, and whether it goes on from there as if it had never stopped, is tried when a model is loaded.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kvproto.errors import UnsupportedModel

Part = tuple[str, int]  # "conv" or "recurrent", and which of a layer's
Parts = dict[Part, Tensor]  # each [sequences, ...]
ALIGNED = 64  # bytes, so that any dtype can be viewed where a part begins
TRIED = (7, 3, 1, 1)  # tokens of the pieces that have to give what they give at once


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor that one layer keeps of a sequence."""

    layer: int
    name: Part
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes, in a sequence's state

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateShape:
    """All that recurrent layers keep of a sequence, as one piece of memory."""

    parts: tuple[StatePart, ...]
    nbytes: int


class LayerMixing(Protocol):
    """What stands for the recurrent layers' past in a forward pass."""

    def mix(self, layer: int, forward: Callable[..., Tensor], hidden: Tensor, keywords: dict[str, Any]) -> Tensor:
        """What `forward` gives for `hidden` `[1, T, hidden]`, a flat ragged batch."""


class _Running(threading.local):
    mixing: LayerMixing | None = None


_running = _Running()


@contextmanager
def mixing(step: LayerMixing | None) -> Iterator[None]:
    """Recurrent layers of forward passes within go through this; None: as transformers has them, without a past."""
    before, _running.mixing = _running.mixing, step
    try:
        yield
    finally:
        _running.mixing = before


class Skipped:
    """Recurrent layers give zeros, so that what else mixes tokens can be seen."""

    def mix(self, layer: int, forward: Callable[..., Tensor], hidden: Tensor, keywords: dict[str, Any]) -> Tensor:
        return torch.zeros_like(hidden)


@dataclass(eq=False, slots=True)
class StateCache:
    """What a recurrent module asks of transformers' cache, for one call. A part that it does not have is None, as for a
    sequence that begins; updates leave the new states in `parts`."""

    parts: Parts = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.parts)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:
        held = self.parts.get(("conv", state_idx))
        if held is None:
            held = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        whole = torch.cat((held, conv_states), dim=-1)
        self.parts["conv", state_idx] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.parts["recurrent", state_idx] = recurrent_states
        return recurrent_states


def recurrent_modules(model: nn.Module) -> dict[int, Any]:
    """By their layer: modules that keep their past in a cache's states."""
    found: dict[int, Any] = {}
    for module in model.modules():
        takes = inspect.signature(type(module).forward).parameters
        if "cache_params" in takes and "hidden_states" in takes and isinstance(getattr(module, "layer_idx", None), int):
            found[int(module.layer_idx)] = module  # type: ignore[arg-type]
    return found


def attach_states(model: nn.Module) -> None:
    """Have the recurrent layers go through the step that `mixing` names. Idempotent."""
    for layer, module in recurrent_modules(model).items():
        if "forward" not in vars(module):
            module.forward = partial(_through_step, layer, module.forward)


def _through_step(
    layer: int, own: Callable[..., Tensor], hidden_states: Tensor, cache_params: object = None, **keywords: Any
) -> Tensor:
    step = _running.mixing
    if step is None:
        return own(hidden_states, cache_params=cache_params, **keywords)
    keywords["attention_mask"] = None  # the step knows which tokens follow one another
    return step.mix(layer, own, hidden_states, keywords)


def own_forward(module: Any) -> Callable[..., Tensor]:
    """A recurrent module's, whether it goes through steps or not."""
    found = vars(module).get("forward")
    forward: Callable[..., Tensor] = found.args[1] if isinstance(found, partial) else module.forward
    return forward


@torch.inference_mode()
def states_of(model: nn.Module) -> StateShape | None:
    """None for a model without recurrent layers. Raises UnsupportedModel where one does not go on from its state as if
    it had never stopped; without numbers, on the meta device, that is believed."""
    parts: list[StatePart] = []
    offset = 0
    for layer, module in sorted(recurrent_modules(model).items()):
        for name, tensor in _kept_by(module).items():
            part = StatePart(layer, name, tuple(tensor.shape[1:]), tensor.dtype, offset)
            parts.append(part)
            offset += -(-part.nbytes // ALIGNED) * ALIGNED
    return StateShape(tuple(parts), offset) if parts else None


def _kept_by(module: Any) -> Parts:
    like = next(module.parameters())
    width = _width(module)
    forward, kind = own_forward(module), type(module).__name__
    chance = np.random.default_rng(0)  # torch's own would import its compiler, see `quick_imports`
    hidden = torch.from_numpy(chance.standard_normal((1, sum(TRIED), width))).to(like)
    try:
        whole = StateCache()
        wanted = forward(hidden, cache_params=whole)
        parts = {name: torch.zeros_like(tensor) for name, tensor in whole.parts.items()}
        pieces = []
        for piece in torch.split(hidden, [*TRIED], dim=1):
            cache = StateCache(parts)
            pieces.append(forward(piece, cache_params=cache))
            parts = cache.parts
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(f"a recurrent layer ({kind}) with a cache of its own kind ({error})") from error
    if not parts:
        raise UnsupportedModel(f"a recurrent layer ({kind}) that keeps no state")
    if like.is_meta:
        return whole.parts
    same = _same(torch.cat(pieces, dim=1), wanted) and all(_same(parts[name], whole.parts[name]) for name in parts)
    if not same or parts.keys() != whole.parts.keys():
        raise UnsupportedModel(f"a recurrent layer ({kind}) that does not go on from its state")
    return whole.parts


def _width(module: Any) -> int:
    found = getattr(module, "hidden_size", None)
    if not isinstance(found, int):
        raise UnsupportedModel(f"a recurrent layer ({type(module).__name__}) of unknown width")
    return found


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Up to rounding."""
    most = min(0.05, 1e4 * torch.finfo(ours.dtype).eps) * float(theirs.abs().max())
    return ours.shape == theirs.shape and float((ours.float() - theirs.float()).abs().max()) <= most
