"""The hook into transformers: one attention function for all models and backends. Adapter.

transformers hands a registered attention the layer's module, query, key, value and every keyword that the model was
called with, so the step travels as a keyword. A name without a mask function gets no mask at all, which is right: the
step knows who attends to what.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from services.worker.model.attention.base import AttentionForm, AttentionStep

NAME = "kvfleet_paged"
STEP = "kvfleet_step"  # the keyword that carries the AttentionStep


def register() -> None:
    """Make `NAME` known to transformers; more than once is fine."""
    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """`query` `[1, heads, T, head_dim]`, `key` and `value` `[1, kv_heads, T, head_dim]` of a flat ragged batch.

    Returns `[1, T, heads, head_dim]`. Which keywords a model may pass was settled when it was probed at load.
    """
    step: AttentionStep = keywords[STEP]
    out = step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionForm(
            scaling if scaling is not None else query.shape[-1] ** -0.5,
            keywords.get("sliding_window"),
            keywords.get("softcap"),
        ),
    )
    return out.unsqueeze(0), None
