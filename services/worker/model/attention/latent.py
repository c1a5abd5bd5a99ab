"""Attention over latents: the pool keeps a token's latent and rotated key for all heads, not each head's K and V.

    K of a head = [latent · keys | rotated]     V of a head = latent · values      by its rows of `kv_b_proj`
    query · K   = [query · keys | query's rotated part] · [latent | rotated]

So a query is brought to where latents are, all heads share one kv head, and the sum of latents that each of them has
gathered becomes its V (DeepSeek-V2, arXiv:2405.04434, section 2.1). Adapter: latent attention of transformers goes
through `expand_kv` and `kv_b_proj`, which are replaced where they compute what is above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Attend = Callable[..., tuple[Tensor, Tensor | None]]


class LatentHeads(nn.Module):
    """In the place of `kv_b_proj`, with its weight `[heads * (inner + values), latent]`. A query has `inner` numbers
    for the latent, then those that are rotated."""

    def __init__(self, weight: nn.Parameter, inner: int, values: int) -> None:
        super().__init__()
        self.weight = weight
        self._inner, self._values = inner, values

    def absorb(self, query: Tensor) -> Tensor:
        """`[1, heads, T, inner + rotated]` to `[1, heads, T, latent + rotated]`."""
        inner, rotated = query.tensor_split([self._inner], dim=-1)
        return torch.cat((inner @ self._rows()[:, : self._inner], rotated), dim=-1)

    def expand(self, gathered: Tensor) -> Tensor:
        """`[1, T, heads, latent]` to `[1, T, heads, values]`."""
        values = self._rows()[:, self._inner :].transpose(1, 2)
        return (gathered.transpose(1, 2) @ values).transpose(1, 2)

    def _rows(self) -> Tensor:
        return self.weight.view(-1, self._inner + self._values, self.weight.shape[1])


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """Of an attention module that attends over latents."""
    found = module._modules.get("kv_b_proj")
    return found if isinstance(found, LatentHeads) else None


def over_latents(attend: Attend) -> Attend:
    """An attention function that is given latents as keys, `[1, 1, T, latent + rotated]`, and their first numbers as
    values, where a module has them; else what the module gives."""

    def attended(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, Tensor | None]:
        heads = latent_heads(module)
        if heads is None:
            return attend(module, query, key, value, attention_mask, **keywords)
        if keywords.get("scaling") is None:
            keywords["scaling"] = query.shape[-1] ** -0.5
        gathered, weights = attend(module, heads.absorb(query), key, value, attention_mask, **keywords)
        return heads.expand(gathered), weights

    return attended


def keep_latents(model: nn.Module) -> None:
    """Have the model's latent attention hand over latents. Modules that compute something else stay as they are, and so
    do those that do already."""
    module: Any
    for module in model.modules():
        if callable(getattr(module, "expand_kv", None)) and isinstance(module._modules.get("kv_b_proj"), nn.Linear):
            heads = _heads_of(module)
            if heads is not None:
                module.kv_b_proj, module.expand_kv = heads, _handed_over


def _handed_over(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv`, of `[1, 1, T, ...]`."""
    key = torch.cat((latent, rotated), dim=-1)
    return key, key[..., : latent.shape[-1]]


@torch.inference_mode()
def _heads_of(module: Any) -> LatentHeads | None:
    """None if `expand_kv` computes something else; without numbers, on the meta device, its sizes are believed."""
    product = module.kv_b_proj
    sizes: list[Any] = [getattr(module, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if product.bias is not None or not all(isinstance(size, int) for size in sizes):
        return None
    inner, rotated, values = sizes
    if product.out_features % (inner + values):
        return None
    heads = LatentHeads(product.weight, inner, values)
    if product.weight.is_meta:
        return heads
    chance = torch.Generator().manual_seed(0)
    latent, turned = (
        torch.randn(1, 1, 3, size, generator=chance).to(product.weight) for size in (product.in_features, rotated)
    )
    keys, own_values = module.expand_kv(latent, turned)
    basis = torch.eye(inner + rotated).to(product.weight).expand(1, keys.shape[1], -1, -1)
    scores = heads.absorb(basis) @ _handed_over(latent, turned)[0].transpose(2, 3)
    expanded = heads.expand(latent.expand(-1, keys.shape[1], -1, -1).transpose(1, 2)).transpose(1, 2)
    if not (_same(scores.transpose(2, 3), keys) and _same(expanded, own_values)):
        return None
    return heads


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Up to rounding."""
    most = min(0.05, 1e3 * torch.finfo(ours.dtype).eps) * float(theirs.abs().max())
    return ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= most
