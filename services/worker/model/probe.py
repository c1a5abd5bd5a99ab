"""Finds out what a loaded model's attention really stores and asks for, by running it on a few tokens.

Configuration fields lie or are missing; the calls that attention receives do not. A model passes if every layer attends
once through transformers' AttentionInterface, causally, with keys and values of one shape, and asks for no feature that
the paged backends do not compute. The paged backends get no mask, so the mask that the model builds is noted as the
function of two positions it is made of, and must say what the layer's keywords say. Attention must be all that mixes
tokens: the batch is one row in which sequences follow each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvproto.errors import UnsupportedModel
from services.worker.model.kv_pool import KvShape
from services.worker.model.support import name_of

NAME = "kvfleet_probe"
MASKLESS_NAME = "kvfleet_probe_maskless"
TOKEN = 1  # 0 may be padding, whose embedding is zero

# Keywords by which models ask their attention for more than the backends compute.
FEATURES = {
    "s_aux": "attention sinks",
    "position_bias": "position bias",
    "attention_chunk_size": "chunked attention",
    "indices": "sparse attention",
}
# What backends compute, and what changes nothing for them: positions are in queries and keys already.
KNOWN = {
    "sliding_window", "softcap", "is_causal", "scaling", "dropout", "position_ids", "cache_position", "use_cache",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> whether the query sees the key


@dataclass(frozen=True, slots=True)
class Attention:
    """What a model's layers store and how far they see."""

    kv_shape: KvShape
    windows: tuple[int | None, ...]  # of each layer; None: the whole context

    @property
    def window(self) -> int | None:
        """That of the layer which sees furthest."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's call to attention."""

    layer: int
    key: Tensor
    value: Tensor
    window: int | None


class _Notes:
    """Attention and mask function for one forward pass: compute nothing and note what they are asked for."""

    def __init__(self, context_length: int) -> None:
        self.calls: list[_Call] = []
        self._context_length = context_length
        self._masks: list[tuple[Tensor, MaskFunction]] = []

    def mask(self, *, mask_function: MaskFunction, device: Any = None, **_: Any) -> Tensor:
        """A tensor that only stands for the function which it is to be made of."""
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
        self._masks.append((mask, mask_function))
        return mask

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        for keyword, asked in keywords.items():
            if asked is not None and keyword not in KNOWN:
                raise UnsupportedModel(FEATURES.get(keyword, f"attention with {keyword!r}"))
        if keywords.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise UnsupportedModel("attention that is not causal")
        if value.shape != key.shape:
            raise UnsupportedModel("storing keys and values of several shapes")
        window = _within(keywords.get("sliding_window"), self._context_length)
        if attention_mask is not None:
            masked = _window_of(self._function_of(attention_mask), self._context_length, query.device)
            if masked != window:
                raise UnsupportedModel(
                    f"attention with a window of {masked} tokens by its mask and of {window} by its layer"
                )
        self.calls.append(_Call(module.layer_idx, key, value, window))
        return torch.zeros_like(query).transpose(1, 2), None

    def _function_of(self, mask: Tensor) -> MaskFunction:
        for noted, function in self._masks:
            if noted is mask:
                return function
        raise UnsupportedModel("attention under a mask of the model's own")


def probe(model: Any, context_length: int) -> Attention:
    """What each layer stores and sees. Raises UnsupportedModel naming the feature and the model."""
    try:
        calls = _attention_calls(model, context_length)
        shape = _one_shape(calls, model.config.num_hidden_layers)
        _check_tokens_do_not_mix(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name_of(model.config)}: {error.message} is not supported", field="model") from error
    return Attention(shape, tuple(call.window for call in sorted(calls, key=lambda call: call.layer)))


def _attention_calls(model: Any, context_length: int) -> list[_Call]:
    """The calls to attention for one sequence."""
    notes = _Notes(context_length)
    AttentionMaskInterface.register(NAME, notes.mask)
    logits = _run(model, NAME, notes, positions=[0, 1, 2], wanted=[1])
    if logits.shape[0] != 1:
        raise UnsupportedModel("a forward pass that ignores which logits are wanted")
    return notes.calls


def _check_tokens_do_not_mix(model: Any) -> None:
    """As attention gives nothing here, the same token at the same position must come out the same wherever it is."""
    notes = _Notes(context_length=0)
    logits = _run(model, MASKLESS_NAME, notes, positions=[1, 1, 1], wanted=[0, 1, 2])
    stored = [tensor[0].transpose(0, 1) for call in notes.calls for tensor in (call.key, call.value)]
    for rows in (logits, *stored):
        tolerance = min(0.05, 1e3 * torch.finfo(rows.dtype).eps)  # equal rows need not be equal to the bit
        if (rows - rows[:1]).abs().max() > tolerance * rows.abs().max():
            raise UnsupportedModel("mixing tokens outside attention")


def _run(model: Any, name: str, notes: _Notes, positions: list[int], wanted: list[int]) -> Tensor:
    """One forward pass in which `notes` stands for attention; logits `[wanted, vocab]`."""
    AttentionInterface.register(name, notes.attend)
    try:
        model.set_attn_implementation(name)
    except (ValueError, AttributeError) as error:
        raise UnsupportedModel("attention that cannot be replaced") from error
    if model.config._attn_implementation != name:
        raise UnsupportedModel("attention that cannot be replaced")
    device = model.get_input_embeddings().weight.device
    try:
        with torch.inference_mode():
            output = model(
                input_ids=torch.full((1, len(positions)), TOKEN, dtype=torch.int64, device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(wanted, device=device),
            )
    except (TypeError, KeyError) as error:
        raise UnsupportedModel(f"a forward pass that refuses positions or chosen logits ({error})") from error
    logits: Tensor = output.logits[0]
    return logits


def _window_of(sees: MaskFunction, context_length: int, device: torch.device) -> int | None:
    """The window that makes this mask, None for the whole context; read off at some rows of it."""
    keys = torch.arange(context_length, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    last = context_length - 1
    window = int(sees(zero, zero, zero + last, keys).sum())
    for query in (last, max(last - 1, 0), last // 2, 0):
        if not torch.equal(sees(zero, zero, zero + query, keys), (keys <= query) & (keys > query - window)):
            raise UnsupportedModel("attention that is neither causal nor a sliding window")
    return _within(window, context_length)


def _within(window: int | None, context_length: int) -> int | None:
    """A window as long as the context is none."""
    return window if window is not None and window < context_length else None


def _one_shape(calls: list[_Call], layers: int) -> KvShape:
    seen = [call.layer for call in calls]
    if sorted(seen) != list(range(layers)):
        raise UnsupportedModel(f"attention outside AttentionInterface (layers {seen} of {layers} use it)")
    key = calls[0].key
    if any(call.key.shape != key.shape or call.value.dtype != call.key.dtype for call in calls):
        raise UnsupportedModel("storing keys and values of several shapes")
    return KvShape(layers, key.shape[1], key.shape[3], key.dtype)
