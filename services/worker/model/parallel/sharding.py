"""Cuts a model by its own tensor-parallel plan (`tp_plan` of transformers) to one rank's part. Adapter.

Weights stay plain tensors, so that kernels and layers take them as they take a whole model's. What a plan names:

    colwise          rows of the weight              each rank computes some of the outputs
    rowwise          columns of the weight           each rank adds to all outputs; the ranks' sums are added
    packed_colwise   rows of each half of it         gate and up in one weight
    ..._gather_output, ..._split_input               ranks exchange outputs, or take their part of whole inputs

Weights of a checkpoint are pages of its file until they are copied. A rank copies what it keeps, so that ranks do not
fill the host's memory with whole models.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

Forward = Callable[..., Any]
UNCUT = "`--tensor-parallel-size 1` serves it where it fits on one card"
# Styles of weights that every rank has; `local_params` is of a module whose weights have styles of their own.
WHOLE = {"replicated_with_grad_allreduce", "replicate", "local_params"}


@dataclass(frozen=True, slots=True)
class RankPart:
    """What is one rank's of a group. Sizes need not divide: the last ranks have less."""

    rank: int
    ranks: int

    def span(self, size: int) -> tuple[int, int]:
        """Where its share of `size` begins, and how long that is."""
        width = -(-size // self.ranks)
        begin = min(self.rank * width, size)
        return begin, min(width, size - begin)


def unknown_styles(plan: dict[str, str]) -> list[str]:
    return sorted(set(plan.values()) - set(STYLES) - WHOLE)


def shard(model: Any, part: RankPart) -> None:
    """Leave this rank's part of the weights that the plan names, and have forward passes exchange what they must. The
    plan's styles must be known."""
    cut = _Cut(part)
    for name, module in list(model.named_modules()):
        style = _style(model, name)
        for weight in list(module._parameters):
            if (own := _style(model, f"{name}.{weight}") or style) is not None:
                own.cut(cut, module, weight)
        if style is not None:
            style.exchange(module, part)


def _style(model: Any, name: str) -> _Style | None:
    return STYLES.get(model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts parameters. Those that several modules share stay shared."""

    part: RankPart
    _done: dict[tuple[nn.Parameter, bool, int], nn.Parameter] = field(default_factory=dict)

    def rows(self, module: nn.Module, name: str) -> None:
        self._keep(module, name, columns=False)

    def columns(self, module: nn.Module, name: str) -> None:
        """A bias is added once, after the sum: see `_sum`."""
        if name != "bias":
            self._keep(module, name, columns=True)

    def halves(self, module: nn.Module, name: str) -> None:
        self._keep(module, name, columns=False, pieces=2)

    def _keep(self, module: nn.Module, name: str, *, columns: bool, pieces: int = 1) -> None:
        whole = module._parameters[name]
        if whole is None:
            return
        key = whole, columns, pieces
        if key not in self._done:
            dim = whole.ndim - 1 if columns else max(whole.ndim - 2, 0)
            each: Tensor = whole.data.unflatten(dim, (pieces, -1))  # type: ignore[no-untyped-call]
            begin, length = self.part.span(each.shape[dim + 1])
            own = each.narrow(dim + 1, begin, length).flatten(dim, dim + 1)
            self._done[key] = nn.Parameter(own.clone(memory_format=torch.contiguous_format), requires_grad=False)
        module._parameters[name] = self._done[key]


def _nothing(module: nn.Module, part: RankPart) -> None:
    """Ranks need nothing of each other's outputs here."""


def _sum(module: nn.Module, part: RankPart) -> None:
    bias = module._parameters.get("bias")
    if bias is not None:
        module.register_parameter("bias", None)
        module.register_parameter("bias_of_sum", bias)
    forward: Forward = module.forward

    def summed(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        dist.all_reduce(output)
        return output if (bias := module._parameters.get("bias_of_sum")) is None else output + bias

    module.forward = summed


def _split_and_sum(module: nn.Module, part: RankPart) -> None:
    _sum(module, part)
    forward: Forward = module.forward

    def split(whole: Tensor) -> Any:
        return forward(whole.narrow(-1, *part.span(whole.shape[-1])))

    module.forward = split


def _gather(module: nn.Module, part: RankPart) -> None:
    forward: Forward = module.forward
    size: int = module.out_features  # type: ignore[assignment]

    def gathered(*arguments: Any, **keywords: Any) -> Tensor:
        own: Tensor = forward(*arguments, **keywords)
        padded = functional.pad(own, (0, -(-size // part.ranks) - own.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(part.ranks)]
        dist.all_gather(parts, padded)
        return torch.cat(parts, dim=-1)[..., :size]

    module.forward = gathered


def _look_up(module: nn.Module, part: RankPart) -> None:
    forward: Forward = module.forward
    begin, length = part.span(module.num_embeddings)  # type: ignore[arg-type]

    def looked_up(ids: Tensor) -> Tensor:
        elsewhere = (ids < begin) | (ids >= begin + length)
        found: Tensor = forward((ids - begin).masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0)
        dist.all_reduce(found)
        return found

    module.forward = looked_up


@dataclass(frozen=True, slots=True)
class _Style:
    cut: Callable[[_Cut, nn.Module, str], None]
    exchange: Callable[[nn.Module, RankPart], None]


def _keep_all(cut: _Cut, module: nn.Module, name: str) -> None:
    """The plan names such a module's weights themselves."""


STYLES = {
    "colwise": _Style(_Cut.rows, _nothing),
    "colwise_gather_output": _Style(_Cut.rows, _gather),
    "colwise_rep": _Style(_Cut.rows, _gather),  # what older versions call it
    "rowwise": _Style(_Cut.columns, _sum),
    "rowwise_split_input": _Style(_Cut.columns, _split_and_sum),
    "packed_colwise": _Style(_Cut.halves, _nothing),
    "embedding_rowwise": _Style(_Cut.rows, _look_up),
    "moe_tp_experts": _Style(_keep_all, _sum),
}
