"""Which models the engine computes exactly, by their configuration. Pure; `probe` tests the loaded model as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from kvfleet.worker.model.model_folder import CONTEXT_KEYS, context_length_of
from kvproto.errors import UnsupportedModel

CHUNKED_ATTENTION = "chunked_attention"
ATTENTION = {"full_attention", "sliding_attention", CHUNKED_ATTENTION, "attention"}
RECURRENT = {"linear_attention", "mamba", "mamba2", "hybrid"}  # whose states transformers' cache keeps, see `recurrent`
ALIBI_MODELS = {"bloom", "mpt"}
RECURRENT_MODELS = {"mamba", "mamba2", "rwkv", "falcon_mamba", "xlstm", "recurrent_gemma"}
ELSEWHERE = "what runs the model's own code, such as `transformers serve`, serves it"

FIRST_TRIED = (0, 1, 2)
MOST_TRIED = 48  # a trial costs as much as a step of so many tokens
_WORDS = ("position", "window", "chunk", "context", "ctx", "length", "seq", "floor")


class Obstacle(NamedTuple):
    """A feature that would be computed wrongly, and what would serve the model. Parts of an error text."""

    feature: str
    instead: str = ELSEWHERE


def supported_context(config: Any, limit: int | None = None) -> int:
    """The model's context, or `limit` if that is shorter. Raises UnsupportedModel that names the feature and the model,
    and what would serve it."""
    obstacle = _unsupported_architecture(config)
    if obstacle is not None:
        raise refusal(config, *obstacle)
    own = own_context(config)
    if own is None:
        instead = f"write it into config.json as {CONTEXT_KEYS[0]} (or {', '.join(CONTEXT_KEYS[1:])})"
        raise refusal(config, "a configuration that does not tell the context length", instead)
    context_length = min(own, limit) if limit else own
    obstacle = _chunked(config, context_length) or _length_dependent_rope(config, context_length)
    if obstacle is not None:
        raise refusal(config, *obstacle)
    return context_length


def refusal(config: Any, feature: str, instead: str = ELSEWHERE) -> UnsupportedModel:
    return UnsupportedModel(f"{name_of(config)}: {feature} is not supported; {instead}", field="model")


def own_attention(model: Any) -> str:
    """The feature of a model whose attention cannot be replaced."""
    classes = sorted({type(module).__name__ for module in model.modules() if "Attention" in type(module).__name__})
    where = f" ({', '.join(classes)})" if classes else ""
    return f"attention in code of the model's own{where}, which does not go through transformers' AttentionInterface,"


def name_of(config: Any) -> str:
    """Its folder or hub id where known, and its type."""
    kind = getattr(config, "model_type", "") or type(config).__name__
    path = getattr(config, "_name_or_path", "")
    return f"{path} ({kind})" if path else str(kind)


def own_context(config: Any) -> int | None:
    return context_length_of(lambda name: getattr(config, name, None))


def _unsupported_architecture(config: Any) -> Obstacle | None:
    """The first obstacle at any length."""
    kind = getattr(config, "model_type", "")
    if getattr(config, "is_encoder_decoder", False):
        return Obstacle("an encoder-decoder model")
    if config.get_text_config() is not config:
        return Obstacle("a multi-modal model", f"its text model may be served alone; {ELSEWHERE}")
    if getattr(config, "quantization_config", None):
        return Obstacle("a quantized checkpoint", "the same model in bfloat16, float16 or float32 may be served")
    layers = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if kind in RECURRENT_MODELS or (layers and layers <= {"linear_attention", "mamba", "mamba2"}):
        return Obstacle("a recurrent model without attention")
    if unknown := layers - ATTENTION - RECURRENT:
        return Obstacle(f"a model with layers of type {min(unknown)}")
    if kind in ALIBI_MODELS or getattr(config, "alibi", False):
        return Obstacle("ALiBi position bias")
    if getattr(config, "reorder_and_upcast_attn", False):
        instead = "without it in config.json, which changes rounding alone, the model is served"
        return Obstacle("reorder_and_upcast_attn", instead)
    if getattr(config, "add_cross_attention", False):
        return Obstacle("cross-attention")
    if getattr(config, "attn_temperature_tuning", False):
        return Obstacle("attention temperature tuning")  # counts positions by the place in the batch
    return None


def _chunked(config: Any, context_length: int) -> Obstacle | None:
    """Only where some layer uses chunks that are shorter than the context."""
    chunk = getattr(config, "attention_chunk_size", None)
    used = CHUNKED_ATTENTION in (getattr(config, "layer_types", None) or ())
    if used and chunk is not None and chunk < context_length:
        instead = f"with {CONTEXT_KEYS[0]} of {chunk} in config.json it is served up to there"
        return Obstacle(f"chunked attention (chunks of {chunk} tokens)", instead)
    return None


def _length_dependent_rope(config: Any, context_length: int) -> Obstacle | None:
    """`longrope` picks its frequencies by the longest sequence of the batch, which changes the others. (`dynamic` does
    so only past `max_position_embeddings`, which is never served.)"""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        if parameters.get("rope_type", parameters.get("type")) != "longrope":
            continue
        key = "original_max_position_embeddings"
        original = parameters.get(key) or getattr(config, key, None)
        if not original or context_length > original:
            return Obstacle(f"a rotary embedding of type longrope beyond its original context of {original} tokens")
    return None


def trial_positions(config: Any, context_length: int) -> tuple[int, ...]:
    """Positions from which on a model may compute otherwise, in order, each below `context_length`.

    Some models change past lengths that their configuration names: a window, or the context of their first training,
    beyond which Ministral 3 scales its queries. Powers of four, and the last position, cover unnamed thresholds."""
    around = {at + step for at in _lengths(config.to_dict()) for step in (-1, 0, 1)}
    powers = takewhile(lambda at: at < context_length, (4**power for power in range(1, 32)))
    wanted = sorted(at for at in {*FIRST_TRIED, *around, *powers, context_length - 1} if 0 <= at < context_length)
    return tuple(wanted[: len(FIRST_TRIED)] + wanted[len(FIRST_TRIED) :][-(MOST_TRIED - len(FIRST_TRIED)) :])


def _lengths(settings: object, name: str = "") -> Iterator[int]:
    """Integers under names that contain one of _WORDS, at any depth."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            yield from _lengths(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _lengths(value, name)
    elif isinstance(settings, int) and not isinstance(settings, bool) and any(word in name for word in _WORDS):
        yield settings
