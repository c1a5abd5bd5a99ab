"""The hook into transformers: one attention function for all models and backends. Adapter.

The model is called with the step as a keyword; it is taken off before the model sees it and given to every layer's
attention, because some models pass no keywords on to their layers. As every layer asks for the step, that is also where
a pass that nobody waits for any more ends. transformers hands a registered attention the
layer's module, query, key and value. A name without a mask function gets no mask at all, which is right: the step knows
who attends to what.
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
STEP = "kvfleet_step"  # the keyword that carries the AttentionStep
ABORT = "kvfleet_abort"  # and the one that may carry an Abort


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
    """Make all layers of `model` attend through the step that it is called with; more than once is fine."""
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    model.register_forward_pre_hook(_take_step, with_kwargs=True)
    model.register_forward_hook(_drop_step, always_call=True)


def _take_step(model: Any, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if STEP in keywords:
        _running.step, _running.abort = keywords.pop(STEP), keywords.pop(ABORT, None)
    return arguments, keywords


def _drop_step(model: Any, arguments: Any, output: Any) -> None:
    _running.step = _running.abort = None


def current_step() -> AttentionStep:
    """The step of the forward pass that the caller, a layer, is in. Raises StepAborted if nobody waits for it."""
    step = _running.step
    assert step is not None, "attention outside of a forward pass that was given a step"
    if _running.abort is not None:
        _running.abort.check()
    return step


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Lets a part of a model be called by itself."""
    before, _running.step = _running.step, step
    try:
        yield
    finally:
        _running.step = before


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
    out = current_step().attend(
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
