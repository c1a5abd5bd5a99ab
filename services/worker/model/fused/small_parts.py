"""Fuses norms, MLPs and rotary embeddings into one compiled call each, where the result is the same.

Modules are recognised by their parts, and each replacement is tried on random numbers against what it replaces: a model
that computes something else under familiar names keeps its own code.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kvcpu.blocks import MULTIPLIED
from kvcpu.layers.layer_call import SILU, SILU_GATE, TANH, TANH_GATE
from kvcpu.layers.modules import FusedMlp, FusedNorm, Multiplier, PackedLinear, Rotary, can_pack, plain_weight
from kvcpu.vector.numbers import LANES

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
TOKENS = 5  # of a trial
ACT_NAMES = ("act_fn", "act", "activation_fn")
GATED_NAMES = ("gate_proj", "up_proj", "down_proj")
PLAIN_NAMES = (("c_fc", "c_proj"), ("fc1", "fc2"), ("fc_in", "fc_out"), ("dense_h_to_4h", "dense_4h_to_h"))
TRIALS = ((1.0, 0.0), (1.0, 3.0), (1e-3, 0.0), (100.0, -50.0), (1e4, 0.0))  # (scale, mean) of its numbers
_INTERNAL = set(vars(nn.Module())) - {"training"}
_POSITION = {"layer_idx", "layer_id", "layer_index"}
Candidates: TypeAlias = "partial[Iterator[nn.Module]]"


@dataclass(eq=False, slots=True)
class SmallParts:
    """Norms, MLPs and rotations of one model, and how many were fused. Modules that are alike are tried once."""

    multiplier: Multiplier
    rotary: Rotary
    done: dict[str, int] = field(default_factory=lambda: {"norms": 0, "mlps": 0, "rotary": 0})
    _verdicts: dict[object, int | None] = field(default_factory=dict)

    def fuse(self, model: nn.Module) -> None:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Dropout:  # does nothing outside training, but takes time
                model.set_submodule(name, nn.Identity())
                continue
            for kind, candidates in (("norms", _norms), ("mlps", _mlps)):
                found = self._equivalent(name, module, partial(candidates, multiplier=self.multiplier))
                if found is not None:
                    model.set_submodule(name, found)
                    self.done[kind] += 1
            self.done["rotary"] += _with_rotary(module, self.rotary)

    def _equivalent(self, name: str, module: nn.Module, candidates: Candidates) -> nn.Module | None:
        """The first candidate that computes what `module` does, None if there is none."""
        alike = (candidates.func, signature(module))
        if alike not in self._verdicts:
            self._verdicts[alike] = _tried(name, module, candidates)
        at = self._verdicts[alike]
        return None if at is None else next(islice(candidates(module), at, None))


def _tried(name: str, module: nn.Module, candidates: Candidates) -> int | None:
    """The index of the candidate that computes the same, if any. Tried on a copy in fp32, and on numbers of several
    sizes and means, which reveal an epsilon, a clamp and a mean that is or is not subtracted."""
    if next(candidates(module), None) is None:
        return None
    exact = copy.deepcopy(module).float()
    for at, candidate in enumerate(candidates(exact)):
        try:
            inputs = [torch.randn(TOKENS, _input_size(exact)) * scale + mean for scale, mean in TRIALS]
            if all(same(candidate(x[None]), exact(x[None])) for x in inputs):
                return at
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            log.debug("%s stays as it is: %s", name, error)
            return None
        log.debug("%s is not candidate %d: it computes something else", name, at)
    return None


def _input_size(module: nn.Module) -> int:
    for name in (GATED_NAMES[0], *(names[0] for names in PLAIN_NAMES)):
        layer = getattr(module, name, None)
        if can_pack(layer):
            return plain_weight(layer).shape[1]
    return int(next(module.parameters()).shape[-1])


def _norms(module: Any, multiplier: Multiplier) -> Iterator[nn.Module]:
    """Judged by parameters: one vector and an epsilon, and perhaps a bias."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if weight is None or not isinstance(eps, float) or not set(parameters) <= {"weight", "bias"}:
        return
    if "gate" in inspect.signature(type(module).forward).parameters:
        return  # of a recurrent layer, which multiplies by it
    if weight.dim() != 1 or len(weight) % LANES or weight.dtype not in MULTIPLIED or weight.device.type != "cpu":
        return
    bias = parameters.get("bias")
    for scale in (weight, weight.float() + 1):  # the second is how Gemma stores it
        for centered in (False, True):
            yield FusedNorm(multiplier.threads, scale, bias, eps, centered=centered)


def _mlps(module: Any, multiplier: Multiplier) -> Iterator[nn.Module]:
    act = next((getattr(module, name) for name in ACT_NAMES if hasattr(module, name)), None)
    kinds = _kinds_of(act) if callable(act) else None
    if kinds is None:
        return
    alone, gating = kinds
    gate, up, down = (getattr(module, name, None) for name in GATED_NAMES)
    if can_pack(gate) and can_pack(up) and can_pack(down):
        if gate.bias is None and up.bias is None and gate.weight.shape == up.weight.shape:
            first = PackedLinear(multiplier, plain_weight(up), None, plain_weight(gate), gating)
            yield FusedMlp(first, PackedLinear(multiplier, plain_weight(down), down.bias))
        return
    for names in PLAIN_NAMES:
        up, down = (getattr(module, name, None) for name in names)
        if can_pack(up) and can_pack(down):
            first = PackedLinear(multiplier, plain_weight(up), up.bias, act=alone)
            yield FusedMlp(first, PackedLinear(multiplier, plain_weight(down), down.bias))


def _kinds_of(act: Callable[[Tensor], Tensor]) -> tuple[int, int] | None:
    """The kernels' names of this activation, found by what it does: alone, and as a gate."""
    x = torch.linspace(-6, 6, 64)
    if torch.allclose(act(x), nn.functional.silu(x), atol=1e-6):
        return SILU, SILU_GATE
    if torch.allclose(act(x), nn.functional.gelu(x, approximate="tanh"), atol=1e-6):
        return TANH, TANH_GATE
    return None


def _with_rotary(module: Any, rotary: Rotary) -> bool:
    """Let an attention module's own code call `rotary` in place of its function, where both do the same. The code gets
    other globals, which binds the name for this one object only."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(forward, FunctionType) or ROTARY not in forward.__code__.co_names:
        return False
    theirs = forward.__globals__.get(ROTARY)
    size = getattr(module, "head_dim", None)
    weight = next(module.parameters(), None)
    if theirs is None or not isinstance(size, int) or weight is None or weight.dtype not in MULTIPLIED:
        return False
    ours = partial(rotary.instead_of, theirs)
    if weight.device.type != "cpu" or not _same_rotation(ours, theirs, size, weight.dtype):
        return False
    names = {**forward.__globals__, ROTARY: ours}
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(rebound, module)
    return True


def _same_rotation(ours: Callable[..., Any], theirs: Callable[..., Any], size: int, dtype: torch.dtype) -> bool:
    query, key = (torch.randn(1, TOKENS, heads, size).to(dtype).transpose(1, 2) for heads in (3, 2))
    angles = torch.randn(1, TOKENS, size)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    if not Rotary.fits(query, key, cosines, sines):
        return False
    try:
        wanted = theirs(query, key, cosines, sines)
        found = ours(query.clone(), key.clone(), cosines, sines)
    except (RuntimeError, TypeError, ValueError) as error:
        log.debug("rotary embedding stays as it is: %s", error)
        return False
    return all(same(one, other) for one, other in zip(found, wanted, strict=True))


def signature(module: nn.Module) -> Hashable:
    """Equal for modules that run the same code with the same settings, and so differ only in their numbers. Settings
    that are not plain values are equal only if they are the same object."""
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
    """Of one shape and dtype, and apart by no more than what the order of sums explains."""
    if not (isinstance(found, Tensor) and isinstance(wanted, Tensor)):
        return False
    if found.shape != wanted.shape or found.dtype is not wanted.dtype:
        return False
    scale = float(wanted.float().abs().max()) or 1.0
    error = float((found.float() - wanted.float()).abs().max())
    return error <= scale * (1e-5 if wanted.dtype is torch.float32 else 0.02)
