"""Finds out what a loaded model's attention really stores and asks for, by running it on a few tokens.

Configuration fields lie or are missing; the calls that attention receives do not. A model passes if every layer attends
once through transformers' AttentionInterface, causally, with keys and values of one shape, and asks for no feature that
the paged backends do not compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvproto.errors import UnsupportedModel
from services.worker.model.kv_pool import KvShape
from services.worker.model.support import name_of

NAME = "kvfleet_probe"
NOTES = "kvfleet_probe_notes"  # the keyword that carries what was seen
TOKENS = 3

# Keywords by which models ask their attention for more than causal softmax(QK)V.
FEATURES = {
    "softcap": "attention soft-capping",
    "sliding_window": "sliding window attention",
    "s_aux": "attention sinks",
    "position_bias": "position bias",
    "attention_chunk_size": "chunked attention",
    "indices": "sparse attention",
}


def probe(model: Any, context_length: int) -> KvShape:
    """What each layer stores per token. Raises UnsupportedModel naming the feature and the model."""
    try:
        stored = _attention_calls(model, context_length)
        return _one_shape(stored, model.config.num_hidden_layers)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name_of(model.config)}: {error.message} is not supported", field="model") from error


def _attention_calls(model: Any, context_length: int) -> list[tuple[int, Tensor, Tensor]]:
    """(layer, key, value) of each call to attention in one forward pass."""
    AttentionInterface.register(NAME, _note)
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, AttributeError) as error:
        raise UnsupportedModel("attention that cannot be replaced") from error
    if model.config._attn_implementation != NAME:
        raise UnsupportedModel("attention that cannot be replaced")
    device = model.get_input_embeddings().weight.device
    stored: list[tuple[int, Tensor, Tensor]] = []
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros((1, TOKENS), dtype=torch.int64, device=device),
                position_ids=torch.arange(TOKENS, device=device)[None],
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.int64, device=device),
                **{NOTES: (stored, context_length)},
            )
    except (TypeError, KeyError) as error:
        raise UnsupportedModel(f"a forward pass that refuses positions or passes no keywords on ({error})") from error
    return stored


def _note(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Attention that computes nothing and notes what it is asked for."""
    stored, context_length = keywords[NOTES]
    for keyword, feature in FEATURES.items():
        asked = keywords.get(keyword)
        if asked is None or (keyword == "sliding_window" and asked >= context_length):
            continue
        raise UnsupportedModel(feature)
    if attention_mask is not None or keywords.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedModel("attention that is not causal")
    stored.append((module.layer_idx, key, value))
    return torch.zeros_like(query).transpose(1, 2), None


def _one_shape(stored: list[tuple[int, Tensor, Tensor]], layers: int) -> KvShape:
    seen = [layer for layer, _, _ in stored]
    if sorted(seen) != list(range(layers)):
        raise UnsupportedModel(f"attention outside AttentionInterface (layers {seen} of {layers} use it)")
    key = stored[0][1]
    if any(k.shape != key.shape or v.shape != key.shape or k.dtype != v.dtype for _, k, v in stored):
        raise UnsupportedModel("storing keys and values of several shapes")
    return KvShape(layers, key.shape[1], key.shape[3], key.dtype)
