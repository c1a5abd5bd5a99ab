"""Makes a loaded model fast on a CPU, in place: decoder layers made of the usual parts in the usual order run as one
compiled call each, small operations of all others are fused, linear layers packed.

A layer is judged by its parts and proved by trial: on a copy in fp32, called as the model calls it, against its own
code, at positions around all that the configuration names. Layers that differ only in their weights need one trial.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from kvcpu.blocks import AttentionForm, KvShape
from kvcpu.layers.modules import FusedMlp, FusedNorm, Multiplier, PackedLinear, Rotary, can_pack, pack, plain_weight
from kvcpu.vector.memory import keep_freed_memory
from kvfleet.worker.model.attention.interface import attending
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.fused.layer import FusedLayer, LayerChain, Parts, Widths, Workspace
from kvfleet.worker.model.fused.small_parts import TRIALS, SmallParts, same, signature
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
# What a layer may raise when it is called by itself: it stays as it is, and the model loads.
REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, AttributeError, AssertionError)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of a layer's parts, and of its attention's."""

    attention: str
    first_norm: str
    second_norm: str
    attending: tuple[str, ...]  # products for queries, keys and values: one for all, or three
    out: str
    mlp: str = "mlp"


KNOWN = (
    _Names("self_attn", "input_layernorm", "post_attention_layernorm", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    _Names("attn", "ln_1", "ln_2", ("c_attn",), "c_proj"),
)


@dataclass(frozen=True, slots=True)
class _Call:
    inputs: Tensor
    others: tuple[Any, ...]
    keywords: dict[str, Any]


class LayerFuser:
    """Decoder layers of one model. `run` calls the model on a few tokens."""

    def __init__(self, model: Any, multiplier: Multiplier, rotary: Rotary, run: Callable[[], object]) -> None:
        self._model = model
        self._multiplier = multiplier
        self._rotary = rotary
        self._workspaces: dict[Widths, Workspace] = {}
        self._calls = _calls({name: layer for name, layer in model.named_modules() if _names(layer)}, run)

    def usual(self) -> dict[str, tuple[int, AttentionForm]]:
        """Names of the layers that do what a fused one does, with the attention of each."""
        verdicts: dict[object, bool] = {}
        found = {}
        for name, call in self._calls.items():
            layer = self._model.get_submodule(name)
            attended = _attention_of(layer, call)
            if attended is None:
                continue
            alike = signature(layer)
            if alike not in verdicts:
                verdicts[alike] = self._agrees(name, layer, call)
            if verdicts[alike]:
                found[name] = attended
        return found

    def replace(self, usual: dict[str, tuple[int, AttentionForm]]) -> int:
        """Needs fused small parts; returns how many layers were replaced. Neighbours in a list run together."""
        replaced = 0
        for name, attended in usual.items():
            fused = self._fused(self._model.get_submodule(name), *attended)
            if fused is not None:
                self._model.set_submodule(name, fused)
                replaced += 1
        for container in self._model.modules():
            if isinstance(container, nn.ModuleList):
                for alike, several in groupby(container, key=_workspace_of):
                    layers = [layer for layer in several if isinstance(layer, FusedLayer)]
                    if alike is not None and len(layers) > 1:
                        LayerChain(layers, self._multiplier.threads)
        return replaced

    def _agrees(self, name: str, layer: nn.Module, call: _Call) -> bool:
        original, other = copy.deepcopy(layer).float(), copy.deepcopy(layer).float()
        exact = _Call(call.inputs.float(), call.others, {key: _floats(value) for key, value in call.keywords.items()})
        try:
            attended = _attention_of(original, exact)
            SmallParts(self._multiplier, self._rotary).fuse(other)
            fused = None if attended is None else self._fused(other, *attended)
            if fused is None:
                return False
            for scale, mean in TRIALS:
                x = torch.randn(call.inputs.shape) * scale + mean
                (found, asked), (wanted, theirs) = _called(fused, x, exact), _called(original, x, exact)
                if asked != theirs or not same(found, wanted):
                    log.debug("%s stays as it is: it computes something else", name)
                    return False
        except REFUSALS as error:
            log.debug("%s stays as it is: %s", name, error)
            return False
        return True

    def _fused(self, layer: Any, index: int, form: AttentionForm) -> FusedLayer | None:
        names = _names(layer)
        assert names is not None
        attention = getattr(layer, names.attention)
        first, second, mlp = (getattr(layer, name) for name in (names.first_norm, names.second_norm, names.mlp))
        if not (isinstance(first, FusedNorm) and isinstance(second, FusedNorm) and isinstance(mlp, FusedMlp)):
            return None
        products = [getattr(attention, name) for name in names.attending]
        out, head_dim = getattr(attention, names.out), attention.head_dim
        if not all(can_pack(one) for one in (*products, out)):
            return None
        weights = [plain_weight(one) for one in products]
        queries = plain_weight(out).shape[1]
        keys, odd = divmod(sum(len(weight) for weight in weights) - queries, 2)
        widths = Widths(plain_weight(out).shape[0], queries, keys, mlp.up.out_features, head_dim, weights[0].dtype)
        if odd or [len(weight) for weight in weights] not in ([queries, keys, keys], [queries + 2 * keys]):
            return None
        if widths.hidden != weights[0].shape[1] or keys % head_dim or queries % keys:
            return None
        rotary = self._rotary if len(products) > 1 else None
        if rotary is not None and head_dim % Rotary.SIZES:
            return None
        joined = PackedLinear.joined(self._multiplier, products)
        out = PackedLinear(self._multiplier, plain_weight(out), out.bias)
        parts = Parts(first, joined, rotary, form, index, out, second, mlp)
        fused = FusedLayer(parts, self._workspaces.setdefault(widths, Workspace(widths)), self._multiplier.threads)
        for name, value in vars(layer).items():  # models look at some, such as the kind of a layer's attention
            if isinstance(value, str | int | float) and not hasattr(fused, name):
                setattr(fused, name, value)
        return fused.eval()


def _workspace_of(layer: nn.Module) -> tuple[Workspace, bool] | None:
    return (layer.workspace, layer.parts.rotary is not None) if isinstance(layer, FusedLayer) else None


def _names(layer: nn.Module) -> _Names | None:
    """None if the layer has other parts, or its attention more than products (and dropout)."""
    children = dict(layer.named_children())
    for names in KNOWN:
        if set(children) == {names.attention, names.first_norm, names.second_norm, names.mlp}:
            attention = children[names.attention]
            inside = {at for at, child in attention.named_children() if not isinstance(child, nn.Dropout | nn.Identity)}
            if inside == {*names.attending, names.out} and isinstance(getattr(attention, "head_dim", None), int):
                return names
    return None


def _calls(layers: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, _Call]:
    seen: dict[str, _Call] = {}
    hooks = []
    for name, layer in layers.items():

        def note(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], name: str = name) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                seen[name] = _Call(inputs[0], inputs[1:], keywords)

        hooks.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    try:
        if layers:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@dataclass(eq=False, slots=True)
class _Noting:
    """An AttentionStep of one sequence, by the reference backend, that notes its calls."""

    tokens: int
    asked: list[tuple[int, AttentionForm]] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self.asked.append((layer, form))
        blocks = range(-(-self.tokens // BLOCK_SIZE))
        pool = KvPool(KvShape(1, key.shape[1], key.shape[2], key.dtype), len(blocks), BLOCK_SIZE, key.device)
        batch = RaggedBatch.of([Slice([0] * self.tokens, 0, blocks, None)], BLOCK_SIZE)
        return ReferenceBackend().prepare(batch, pool).attend(0, query, key, value, form)


def _called(layer: nn.Module, x: Tensor, call: _Call) -> tuple[object, list[tuple[int, AttentionForm]]]:
    step = _Noting(x.shape[1])
    with attending(step):
        return layer(x, *call.others, **call.keywords), step.asked


def _attention_of(layer: nn.Module, call: _Call) -> tuple[int, AttentionForm] | None:
    try:
        asked = _called(layer, call.inputs, call)[1]
    except REFUSALS as error:
        log.debug("a layer stays as it is: %s", error)
        return None
    return asked[0] if len(asked) == 1 else None


def _floats(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return tuple(_floats(part) for part in value) if isinstance(value, tuple) else value


def fuse(model: Any, multiplier: Multiplier, run: Callable[[], object]) -> dict[str, int]:
    """Replace usual decoder layers, and the parts of all others, in place, before `pack`; returns the number of each
    kind. `run` calls the model on a few tokens, to see how it calls its layers."""
    rotary = Rotary(multiplier.threads)
    small = SmallParts(multiplier, rotary)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = LayerFuser(model, multiplier, rotary, run)
        usual = layers.usual()
        small.fuse(model)
        whole = layers.replace(usual)
    return {"layers": whole, **small.done}


def optimise(model: Any, threads: int, run: Callable[[], object]) -> None:
    """The model must be called from one thread from now on. `run` calls it at `trial_positions`."""
    began = time.monotonic()
    keep_freed_memory()
    multiplier = Multiplier(threads)
    fused = fuse(model, multiplier, run)
    packed = pack(model, multiplier)
    took, kinds = time.monotonic() - began, ", ".join(f"{count} {kind}" for kind, count in fused.items())
    log.info("optimised for %d threads in %.1f s: %s, %d more linear layers packed", threads, took, kinds, packed)
