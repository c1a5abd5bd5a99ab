"""The hook into transformers: one attention function for all models and backends. Adapter.

`attending` keeps the step in a thread local, as some models pass no keywords on to their layers. transformers builds no
mask for a name without a mask function, which is right: the step knows which tokens attend to which.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import AttentionInterface

from kvcpu.blocks import AttentionForm
from kvfleet.worker.model.attention.latent import over_latents
from kvfleet.worker.model.base import Abort
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool

NAME = "kvfleet_paged"


class AttentionStep(Protocol):
    """Attention of one step, called by every layer in turn."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Store `key`, `value` `[T, kv_heads, head_dim]` of the step's tokens, then attend with `query` and return
        `[T, heads, head_dim]`: each token sees its own sequence up to itself. Consecutive heads share a kv head
        (grouped-query attention). The tensors may be strided views. A pool of latents stores `key` alone; `value` is
        its first numbers, and so is what is returned."""


class AttentionBackend(Protocol):
    """Attention over one pool. Backends share one behaviour suite: the exactness tests run on every one."""

    name: ClassVar[str]

    def prepare(self, batch: RaggedBatch, pool: KvPool) -> AttentionStep: ...


class _Running(threading.local):
    """The step of the forward pass that this thread is in."""

    step: AttentionStep | None = None
    abort: Abort | None = None


_running = _Running()


def attach(model: Any) -> None:
    """Make all layers of `model` attend through the current step. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)


@contextmanager
def attending(step: AttentionStep, abort: Abort | None = None) -> Iterator[None]:
    """Forward passes within attend by this step, and raise StepAborted where `abort` says so."""
    before = _running.step, _running.abort
    _running.step, _running.abort = step, abort
    try:
        yield
    finally:
        _running.step, _running.abort = before


def current_step() -> AttentionStep:
    """The step of the forward pass that the calling layer is in. Raises StepAborted where `Abort.check` does."""
    step = _running.step
    assert step is not None, "attention outside of a forward pass that was given a step"
    if _running.abort is not None:
        _running.abort.check()
    return step


@over_latents
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
    """From `query` `[1, heads, T, head_dim]`, `key` and `value` `[1, kv_heads, T, head_dim]` of a flat ragged batch to
    `[1, T, heads, head_dim]`. `probe` checked at load which keywords the model passes."""
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    sinks: Tensor | None = keywords.get("s_aux")
    sinks = None if sinks is None else sinks.float().contiguous()
    form = AttentionForm(scaling, keywords.get("sliding_window"), keywords.get("softcap"), sinks)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    layer: int | None = getattr(module, "kv_layer", None)
    layer = module.layer_idx if layer is None else layer
    return current_step().attend(layer, q, k, v, form).unsqueeze(0), None
