"""Which models the engine computes exactly, by their configuration. Pure: refuses by feature and model name.

A model that is not named here is still probed after loading (`services.worker.model.loader`): what counts is that every
layer attends through transformers' AttentionInterface and asks for nothing that the backends do not compute.
"""

from __future__ import annotations

from typing import Any

from kvproto.errors import UnsupportedModel

FULL_ATTENTION = "full_attention"
WINDOWED = {"sliding_attention": "sliding window attention", "chunked_attention": "chunked attention"}
ALIBI_MODELS = {"bloom", "mpt"}
RECURRENT_MODELS = {"mamba", "mamba2", "rwkv", "falcon_mamba", "xlstm", "recurrent_gemma"}


def supported_context(config: Any, limit: int | None = None) -> int:
    """The context that can be served exactly: the model's own, or `limit` if that is shorter.

    Raises UnsupportedModel that names the feature and the model.
    """
    feature = _unsupported_architecture(config)
    if feature is None:
        own = _own_context(config)
        if own is None:
            feature = "a configuration that does not tell the context length"
        else:
            context_length = min(own, limit) if limit else own
            feature = _windowed(config, context_length) or _length_dependent_rope(config, context_length)
            if feature is None:
                return context_length
    raise UnsupportedModel(f"{name_of(config)}: {feature} is not supported", field="model")


def name_of(config: Any) -> str:
    """How to speak of the model: its folder or hub id where known, and its type."""
    kind = getattr(config, "model_type", "") or type(config).__name__
    path = getattr(config, "_name_or_path", "")
    return f"{path} ({kind})" if path else str(kind)


def _own_context(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return None


def _unsupported_architecture(config: Any) -> str | None:
    """The first feature, in words, that would be computed wrongly at any length; None if there is none."""
    kind = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model"
    if config.get_text_config() is not config:
        return "a multi-modal model"
    if getattr(config, "quantization_config", None):
        return "a quantized checkpoint"
    if kind in RECURRENT_MODELS or _recurrent_layers(config):
        return "a recurrent or hybrid model (mamba or linear attention layers)"
    if kind in ALIBI_MODELS or getattr(config, "alibi", False):
        return "ALiBi position bias"
    if getattr(config, "attn_logit_softcapping", None):
        return f"attention soft-capping (attn_logit_softcapping {config.attn_logit_softcapping})"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention"
    return None


def _recurrent_layers(config: Any) -> bool:
    kinds = [*(getattr(config, "layer_types", None) or []), *(getattr(config, "layers_block_type", None) or [])]
    return any(kind not in (FULL_ATTENTION, "attention", *WINDOWED) for kind in kinds)


def _windowed(config: Any, context_length: int) -> str | None:
    """A window counts where some layer uses it and it is shorter than the context."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if layer_types is not None:
        used = set(layer_types) & set(WINDOWED)
        if "chunked_attention" in used and chunk is not None and chunk < context_length:
            return f"{WINDOWED['chunked_attention']} (chunks of {chunk} tokens)"
        if "sliding_attention" not in used:
            return None
    if isinstance(window, int) and window < context_length:
        return f"{WINDOWED['sliding_attention']} (sliding_window {window}, context {context_length})"
    return None


def _length_dependent_rope(config: Any, context_length: int) -> str | None:
    """`longrope` picks its frequencies by the longest sequence of the batch, and would change those of the others.

    (`dynamic` does so only past `max_position_embeddings`, which is never served.)
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        if parameters.get("rope_type", parameters.get("type")) != "longrope":
            continue
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if not original or context_length > original:
            return f"a rotary embedding of type longrope beyond its original context of {original} tokens"
    return None
