"""Which models the engine computes exactly, by their configuration. Pure: refuses by feature and model name.

A model that is not named here is still probed after loading (`services.worker.model.loader`): what counts is that every
layer attends through transformers' AttentionInterface and asks for nothing that the backends do not compute.
"""

from __future__ import annotations

from typing import Any

from kvproto.errors import UnsupportedModel

CHUNKED_ATTENTION = "chunked_attention"
ATTENTION = {"full_attention", "sliding_attention", CHUNKED_ATTENTION, "attention"}
RECURRENT = {"linear_attention", "mamba", "conv", "recurrent", "hybrid"}
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
            feature = _chunked(config, context_length) or _length_dependent_rope(config, context_length)
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
    layers = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if kind in RECURRENT_MODELS or layers & RECURRENT:
        return "a recurrent or hybrid model (mamba or linear attention layers)"
    if layers - ATTENTION:
        return f"a model with layers of type {min(layers - ATTENTION)}"
    if kind in ALIBI_MODELS or getattr(config, "alibi", False):
        return "ALiBi position bias"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention"
    if getattr(config, "reorder_and_upcast_attn", False):
        return "reorder_and_upcast_attn"
    if getattr(config, "add_cross_attention", False):
        return "cross-attention"
    if getattr(config, "attn_temperature_tuning", False):
        return "attention temperature tuning"  # counts positions by the place in the batch
    return None


def _chunked(config: Any, context_length: int) -> str | None:
    """A chunk counts where some layer uses it and it is shorter than the context."""
    chunk = getattr(config, "attention_chunk_size", None)
    used = CHUNKED_ATTENTION in (getattr(config, "layer_types", None) or ())
    if used and chunk is not None and chunk < context_length:
        return f"chunked attention (chunks of {chunk} tokens)"
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
