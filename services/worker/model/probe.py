"""Finds out what a loaded model's attention really stores and needs, by running it on a few tokens.

Configuration fields can be wrong or missing; the calls that attention receives cannot. A model passes if every layer
attends once through transformers' AttentionInterface, causally, with keys and values of one shape, and no feature that
the paged backends lack. They get no mask, so the function of two positions that the model's mask is made of must agree
with the layer's keywords. Only attention may mix tokens: sequences of a batch follow each other in one row. Recurrent
layers mix them too, by states of their own (`recurrent`): they are left out here. Positions start where the model's
plain forward pass starts: RoBERTa and its kin start behind the index of their padding token.

`layout_of` needs a `config.json` alone: it builds the model on torch's meta device. Where a forward pass depends on
numbers (some mixtures of experts), it reads the usual fields.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from kvcpu.blocks import KvShape
from kvfleet.worker.model.attention.latent import keep_latents, latent_heads, over_latents
from kvfleet.worker.model.kv_size import KvLayout
from kvfleet.worker.model.recurrent import Skipped, StateShape, attach_states, mixing, recurrent_modules, states_of
from kvfleet.worker.model.support import name_of, own_attention, refusal
from kvproto.errors import UnsupportedModel

NAME = "kvfleet_probe"
MASKLESS_NAME = "kvfleet_probe_maskless"
META_NAME = "kvfleet_kv_layout"
META_TOKENS = 2
TOKENS = (1, 2)  # the first that is not padding is used: padding has a zero embedding and may count for no position

# Keywords of features that the backends lack.
FEATURES = {
    "position_bias": "position bias",
    "attention_chunk_size": "chunked attention",
    "indices": "sparse attention",
}
# What backends compute, and what changes nothing for them, as positions are in queries and keys already.
KNOWN = {
    "sliding_window", "softcap", "s_aux", "is_causal", "scaling", "dropout", "position_ids", "cache_position",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> whether the query sees the key


@dataclass(frozen=True, slots=True)
class Attention:
    kv_shape: KvShape
    window: int | None  # of the layer that sees furthest; None: the whole context
    first_position: int  # of a sequence's first token, as the model counts
    sinks: bool  # in some layer
    states: StateShape | None = None  # of recurrent layers beside it


@dataclass(frozen=True, slots=True)
class _Call:
    layer: int
    module: Any  # that calls
    key: Tensor
    value: Tensor
    window: int | None
    sinks: bool
    latent: int  # numbers of the key that are the value; 0: values are others


@dataclass(eq=False, slots=True)
class _Notes:
    """Attention and mask function for one forward pass, which note their arguments and compute nothing."""

    context_length: int
    calls: list[_Call] = field(default_factory=list)
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)

    def mask(self, *, mask_function: MaskFunction, device: Any = None, **_: Any) -> Tensor:
        """A tensor that only stands for `mask_function`."""
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        self.masks.append((mask, mask_function))
        return mask

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        for keyword, asked in keywords.items():
            if asked is not None and keyword not in KNOWN:
                raise UnsupportedModel(FEATURES.get(keyword, f"attention with {keyword!r}"))
        if keywords.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise UnsupportedModel("attention that is not causal")
        latent = 0 if latent_heads(module) is None else value.shape[3]
        if value.shape != key.shape and not latent:
            raise UnsupportedModel("storing keys and values of several shapes")
        sinks: Tensor | None = keywords.get("s_aux")
        if sinks is not None and sinks.shape != query.shape[1:2]:
            raise UnsupportedModel("attention with sinks that are not one for each head")
        window = _within(keywords.get("sliding_window"), self.context_length)
        if attention_mask is not None:
            function = next((one for noted, one in self.masks if noted is attention_mask), None)
            if function is None:
                raise UnsupportedModel("attention under a mask of the model's own")
            masked = _window_of(function, self.context_length, query.device)
            if masked != window:
                windows = f"{masked} tokens by its mask and of {window} by its layer"
                raise UnsupportedModel(f"attention with a window of {windows}")
        self.calls.append(_Call(module.layer_idx, module, key, value, window, sinks is not None, latent))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def probe(model: Any, context_length: int) -> Attention:
    """Raises UnsupportedModel naming the feature and the model."""
    try:
        states = states_of(model)
        attach_states(model)
        calls = _attention_calls(model, context_length)
        shape = _one_shape(calls, model.config.num_hidden_layers, recurrent_modules(model).keys())
        for stored, call in enumerate(sorted(calls, key=lambda call: call.layer)):
            call.module.kv_layer = stored  # of the pool, which has no place for layers without attention
        _check_tokens_do_not_mix(model, context_length)
        first = _first_position(model)
    except UnsupportedModel as error:
        raise refusal(model.config, error.message) from error
    window = furthest([call.window for call in calls], context_length)
    return Attention(shape, window, first, any(call.sinks for call in calls), states)


def _attention_calls(model: Any, context_length: int) -> list[_Call]:
    notes = _Notes(context_length)
    AttentionMaskInterface.register(NAME, notes.mask)
    logits = _run(model, NAME, notes, positions=[0, 1, 2], wanted=[1])
    if logits.shape[0] != 1:
        raise UnsupportedModel("a forward pass that ignores which logits are wanted")
    return notes.calls


def _check_tokens_do_not_mix(model: Any, context_length: int) -> None:
    """As attention returns zeros here, a token at a position must come out the same anywhere in the batch and beside
    any other positions (`longrope` looks at the last of all)."""
    together = _computed(model, [1, 1, 1])
    beside = _computed(model, [1, 1, max(1, context_length - 1)])
    for rows, others in zip(together, beside, strict=True):
        if not (_same(rows, rows[:1]) and _same(rows[:2], others[:2])):
            raise UnsupportedModel("mixing tokens outside attention")


def _first_position(model: Any) -> int:
    """Where the model itself starts to count: at 0, or behind its padding's index."""
    padding = getattr(model.config, "pad_token_id", None)
    wanted = _computed(model, None)
    for first in (0, *([padding + 1] if isinstance(padding, int) else [])):
        try:
            found = _computed(model, [first, first + 1, first + 2])
        except IndexError:  # past the model's positions
            continue
        if all(_same(one, other) for one, other in zip(found, wanted, strict=True)):
            return first
    raise UnsupportedModel("positions that count neither from 0 nor from behind the padding token")


def _computed(model: Any, positions: list[int] | None) -> list[Tensor]:
    """Logits, keys and values `[3, ...]` of three equal tokens where attention returns zeros."""
    notes = _Notes(context_length=0)
    logits = _run(model, MASKLESS_NAME, notes, positions, wanted=[0, 1, 2])
    return [logits, *(tensor[0].transpose(0, 1) for call in notes.calls for tensor in (call.key, call.value))]


def _same(rows: Tensor, others: Tensor) -> bool:
    """Up to rounding."""
    tolerance = min(0.05, 1e3 * torch.finfo(rows.dtype).eps)
    return bool((rows - others).abs().max() <= tolerance * rows.abs().max())


def _run(model: Any, name: str, notes: _Notes, positions: list[int] | None, wanted: list[int]) -> Tensor:
    """One forward pass of three tokens in which `notes` stands for attention; logits `[wanted, vocab]`."""
    AttentionInterface.register(name, over_latents(notes.attend))
    try:
        model.set_attn_implementation(name)
    except (ValueError, AttributeError) as error:
        raise UnsupportedModel(own_attention(model)) from error
    if model.config._attn_implementation != name:
        raise UnsupportedModel(own_attention(model))
    device = model.get_input_embeddings().weight.device
    token = next(one for one in TOKENS if one != getattr(model.config, "pad_token_id", None))
    told = {} if positions is None else {"position_ids": torch.tensor([positions], device=device)}
    try:
        with torch.inference_mode(), mixing(Skipped()):
            output = model(
                input_ids=torch.full((1, 3), token, dtype=torch.int64, device=device),
                **told,
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=device),
            )
    except (TypeError, KeyError) as error:
        raise UnsupportedModel(f"a forward pass that refuses positions or chosen logits ({error})") from error
    logits: Tensor = output.logits[0]
    return logits


def _window_of(sees: MaskFunction, context_length: int, device: torch.device) -> int | None:
    """The window of this mask, None for the whole context; read from some of its rows."""
    keys = torch.arange(context_length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    last = context_length - 1
    window = int(sees(zero, zero, zero + last, keys).sum())
    for query in (last, max(last - 1, 0), last // 2, 0):
        if not torch.equal(sees(zero, zero, zero + query, keys), (keys <= query) & (keys > query - window)):
            raise UnsupportedModel("attention that is neither causal nor a sliding window")
    return _within(window, context_length)


def _within(window: int | None, context_length: int) -> int | None:
    """None where the window is as long as the context."""
    return window if window is not None and window < context_length else None


def furthest(windows: Sequence[int | None], context_length: int) -> int | None:
    """The window of the layer that sees furthest; None where one sees the whole context."""
    known = [window for window in windows if _within(window, context_length) is not None]
    return max(window for window in known if window is not None) if len(known) == len(windows) else None


def _named(layers: list[int]) -> str:
    most = 4
    shown = ", ".join(str(layer) for layer in layers[:most])
    return f"layers {shown}{', ...' if len(layers) > most else ''}" if len(layers) > 1 else f"layer {shown}"


def _one_shape(calls: list[_Call], layers: int, recurrent: Iterable[int] = ()) -> KvShape:
    often = Counter(call.layer for call in calls)
    silent = sorted(set(range(layers)) - set(often) - set(recurrent))
    if silent:
        raise UnsupportedModel(f"attention outside AttentionInterface (in {_named(silent)} of {layers})")
    several = sorted(layer for layer, count in often.items() if count > 1)
    if several:
        raise UnsupportedModel(
            f"attention that a layer calls several times ({type(calls[0].module).__name__}, in {_named(several)})"
        )
    if len(often) > layers or not often:
        raise UnsupportedModel(f"attention in {len(often)} layers where the configuration has {layers}")
    key, latent = calls[0].key, calls[0].latent
    alike = (call.key.shape == key.shape and call.latent == latent for call in calls)
    if not all(alike) or any(call.value.dtype != call.key.dtype for call in calls):
        raise UnsupportedModel("storing keys and values of several shapes")
    return KvShape(len(often), key.shape[1], key.shape[3], key.dtype, latent=latent)


def layout_of(config: Any, context_length: int) -> KvLayout:
    """Raises UnsupportedModel, naming feature and model, where the engine would refuse the attention."""
    try:
        model, calls = _meta_calls(config)
        states = states_of(model)
    except (RuntimeError, NotImplementedError):  # there are no numbers on the meta device
        return from_fields(config, context_length)
    shapes = {shape for shape, _ in calls.values()}
    if set(range(config.num_hidden_layers)) - calls.keys() - recurrent_modules(model).keys():
        raise refusal(config, own_attention(model))
    if len(shapes) != 1:
        raise refusal(config, "storing keys and values of several shapes")
    ((heads, head_dim, parts),) = shapes
    window = furthest([window for _, window in calls.values()], context_length)
    nbytes = 0 if states is None else states.nbytes
    return KvLayout(len(calls), heads, head_dim, context_length, window, parts, nbytes)


def from_fields(config: Any, context_length: int) -> KvLayout:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    reach = furthest(windows, context_length)
    if latent := getattr(config, "kv_lora_rank", None):
        return KvLayout(layers, 1, latent + config.qk_rope_head_dim, context_length, reach, parts=1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return KvLayout(layers, kv_heads, head_dim, context_length, reach)


def _meta_calls(config: Any) -> tuple[Any, dict[int, tuple[tuple[int, int, int], int | None]]]:
    """The model on the meta device; layer -> heads and head size of its keys, how many parts are stored, and its
    window."""
    calls: dict[int, tuple[tuple[int, int, int], int | None]] = {}

    def note(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        parts = 2 if latent_heads(module) is None else 1
        if parts == 2 and key.shape != value.shape:
            raise refusal(config, "storing keys and values of several shapes")
        calls[module.layer_idx] = (key.shape[1], key.shape[3], parts), keywords.get("sliding_window")
        return torch.empty((1, META_TOKENS, query.shape[1], value.shape[3]), dtype=query.dtype, device="meta"), None

    AttentionInterface.register(META_NAME, over_latents(note))
    with torch.device("meta"), torch.inference_mode():
        try:
            own = copy.deepcopy(config)  # the model writes into it
            model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
            keep_latents(model)
            model.set_attn_implementation(META_NAME)
        except (ValueError, AttributeError) as error:
            why = str(error).splitlines()[0]
            raise UnsupportedModel(f"{name_of(config)}: {why}", field="model") from error
        model.config.pad_token_id = None  # else the model reads ids, which the meta device does not have
        model(
            input_ids=torch.zeros((1, META_TOKENS), dtype=torch.int64),
            position_ids=torch.arange(META_TOKENS)[None],
            use_cache=False,
        )
    return model, calls
