"""What a model stores per token, from its `config.json` alone: no weights are read or made.

Fields of configurations are ignored by some families and missing in others. So the model is built without memory, on
torch's meta device, and what its attention is given in one forward pass counts. Where a forward pass needs numbers to
go on (some mixtures of experts), the usual fields are believed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kvfleet.worker.model.kv_size import KvLayout
from kvfleet.worker.model.probe import furthest
from kvfleet.worker.model.support import name_of, own_attention, refusal
from kvproto.errors import UnsupportedModel

NAME = "kvfleet_kv_layout"
TOKENS = 2


def layout_of(config: Any, context_length: int) -> KvLayout:
    """Raises UnsupportedModel, naming feature and model, where the engine would refuse what the attention does."""
    try:
        model, calls = _calls(config)
    except (RuntimeError, NotImplementedError):  # there are no numbers on the meta device
        return from_fields(config, context_length)
    shapes = {(heads, head_dim) for heads, head_dim, _ in calls.values()}
    if len(calls) != config.num_hidden_layers:
        raise refusal(config, own_attention(model))
    if len(shapes) != 1:
        raise refusal(config, "storing keys and values of several shapes")
    ((heads, head_dim),) = shapes
    window = furthest([window for _, _, window in calls.values()], context_length)
    return KvLayout(len(calls), heads, head_dim, context_length, window)


def from_fields(config: Any, context_length: int) -> KvLayout:
    """By the names that most families use."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return KvLayout(layers, kv_heads, head_dim, context_length, furthest(windows, context_length))


def _calls(config: Any) -> tuple[Any, dict[int, tuple[int, int, int | None]]]:
    """The model without numbers; layer -> heads and head size of the keys it gives to attention, and its window."""
    calls: dict[int, tuple[int, int, int | None]] = {}

    def note(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        calls[module.layer_idx] = key.shape[1], key.shape[3], keywords.get("sliding_window")
        return torch.empty((1, TOKENS, query.shape[1], value.shape[3]), dtype=query.dtype, device="meta"), None

    AttentionInterface.register(NAME, note)
    with torch.device("meta"), torch.inference_mode():
        try:
            own = copy.deepcopy(config)  # the model writes into it
            model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
            model.set_attn_implementation(NAME)
        except (ValueError, AttributeError) as error:
            why = str(error).splitlines()[0]
            raise UnsupportedModel(f"{name_of(config)}: {why}", field="model") from error
        model.config.pad_token_id = None  # else ids, which are not there, are looked at
        model(
            input_ids=torch.zeros((1, TOKENS), dtype=torch.int64),
            position_ids=torch.arange(TOKENS)[None],
            use_cache=False,
        )
    return model, calls
