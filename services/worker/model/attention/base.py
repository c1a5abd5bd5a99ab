"""The seam between a model's layers and an attention backend.

Once per step a backend prepares what all layers share (indices, lengths); then each layer stores its new K and V in
the pool and attends. Backends share one behaviour suite: the exactness tests run on every one.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from torch import Tensor

from kvcpu.blocks import AttentionForm
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool


class AttentionStep(Protocol):
    """Attention of one step, called by every layer in turn."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Store `key`, `value` `[T, kv_heads, head_dim]` of the step's tokens and let `query` `[T, heads, head_dim]`
        attend, each token to its own sequence up to itself. Returns `[T, heads, head_dim]`.

        `heads` is a multiple of `kv_heads`; consecutive heads share one (grouped-query attention). The tensors may be
        strided views.
        """


class AttentionBackend(Protocol):
    """Attention over one pool."""

    name: ClassVar[str]

    def prepare(self, batch: RaggedBatch, pool: KvPool) -> AttentionStep: ...
