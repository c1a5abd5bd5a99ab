"""The hook into transformers: one attention function for all models and backends. Adapter.

The model is called within `attending`, which keeps the step for every layer's attention: some models pass no keywords
on to their layers. As every layer asks for the step, that is also where a pass that nobody waits for any more ends.
transformers hands a registered attention the layer's module, query, key and value. A name without a mask function gets
no mask at all, which is right: the step knows who attends to what.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

from torch import Tensor
from transformers import AttentionInterface

from kvcpu.blocks import AttentionForm
from kvfleet.worker.model.base import Abort
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool

NAME = "kvfleet_paged"


class AttentionStep(Protocol):
    """Attention of one step, called by every layer in turn; what they share was prepared once."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Store `key`, `value` `[T, kv_heads, head_dim]` of the step's tokens and let `query` `[T, heads, head_dim]`
        attend, each token to its own sequence up to itself. Returns `[T, heads, head_dim]`.

        `heads` is a multiple of `kv_heads`; consecutive heads share one (grouped-query attention). The tensors may be
        strided views.
        """


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
    """Make all layers of `model` attend through the step that it is called within; more than once is fine."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)


@contextmanager
def attending(step: AttentionStep, abort: Abort | None = None) -> Iterator[None]:
    """What a model, or a part of it, computes within attends by this step, and ends early where `abort` says so."""
    before = _running.step, _running.abort
    _running.step, _running.abort = step, abort
    try:
        yield
    finally:
        _running.step, _running.abort = before


def current_step() -> AttentionStep:
    """The step of the forward pass that the caller, a layer, is in. Raises StepAborted if nobody waits for it."""
    step = _running.step
    assert step is not None, "attention outside of a forward pass that was given a step"
    if _running.abort is not None:
        _running.abort.check()
    return step


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
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = current_step().attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionForm(scaling, keywords.get("sliding_window"), keywords.get("softcap")),
    )
    return out.unsqueeze(0), None
