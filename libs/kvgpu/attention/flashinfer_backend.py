"""The `flashinfer` attention backend: FlashInfer's paged kernels over our pool, where that package is installed.

FlashInfer takes a plan of a step's sequences before it runs, and a plan holds for one form of attention. So the first
layer of a form plans, and all its layers run by that plan. A decode is a sequence with one query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import AttentionForm, Batch, Ints, KvShape, Pool

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # that its kernels for Ampere and for Hopper both have
WORKSPACE_BYTES = 394 * 2**20  # partial results of a long sequence in parts: what vLLM gives it
ALL_TOKENS = -1  # in place of a window


def refusal(shape: KvShape, *, sinks: bool) -> str:
    """Why FlashInfer cannot attend over such a pool, or ""."""
    if sinks:
        return "its paged kernels take no attention sinks"
    if shape.latent:
        return "its paged kernels take no latents"
    if shape.quantized:
        return "it has no int8 KV cache"
    if shape.dtype not in DTYPES:
        return f"it has no {str(shape.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no heads of {shape.head_dim} numbers"
    return ""


class FlashInferBackend:
    """Raises ImportError where FlashInfer is not installed."""

    name: ClassVar[str] = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.device = device
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: dict[AttentionForm, _Plan] = {}

    def prepare(self, batch: Batch, pool: Pool) -> FlashInferStep:
        places = np.stack((batch.slots // pool.block_size, batch.slots % pool.block_size))
        blocks, offsets = self._moved(torch.from_numpy(places))
        return FlashInferStep(self, batch, pool, blocks, offsets)

    def plan(self, batch: Batch, pool: Pool, heads: int, form: AttentionForm) -> Any:
        """A wrapper that runs the step's layers of this form, until the next plan of the form."""
        if form not in self._plans:  # kernels of one stream share the workspace
            self._plans[form] = _Plan(self._wrapper(self._workspace, "HND"))
        plan, shape, pages = self._plans[form], pool.shape, PageTables.of(batch, pool.block_size, form.window)
        plan.begin()
        plan.wrapper.plan(
            *pages.on_host(pinned=self.device.type == "cuda"),
            heads,
            shape.kv_heads,
            shape.head_dim,
            pool.block_size,
            causal=True,
            sm_scale=form.scaling,
            window_left=ALL_TOKENS if form.window is None else form.window - 1,  # the token itself is not counted
            logits_soft_cap=form.softcap,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        if self.device.type == "cuda":
            plan.end(self.device)
        return plan.wrapper

    def _moved(self, host: Tensor) -> Tensor:
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


@dataclass(eq=False, slots=True)
class _Plan:
    """A wrapper copies each plan to the device from host memory of its own, which the next plan overwrites."""

    wrapper: Any
    _copied: Any = None

    def begin(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def end(self, device: torch.device) -> None:
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(device))


@dataclass(eq=False, slots=True)
class FlashInferStep:
    """See `AttentionStep`."""

    backend: FlashInferBackend
    batch: Batch
    pool: Pool
    _blocks: Tensor  # [T], where K and V of the tokens go
    _offsets: Tensor
    _planned: dict[AttentionForm, Any] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        dtype, cache = self.pool.shape.dtype, self.pool.data[:, layer]  # a view: FlashInfer asks for its strides
        cache[self._blocks, :, :, self._offsets] = torch.stack((key, value), dim=1).to(dtype)
        if form not in self._planned:
            self._planned[form] = self.backend.plan(self.batch, self.pool, query.shape[1], form)
        out: Tensor = self._planned[form].run(query.to(dtype).contiguous(), cache)
        return out.to(query.dtype)


@dataclass(frozen=True, slots=True)
class PageTables:
    """A step as FlashInfer reads it. Pages that no query of a sequence sees are left out, as they may be gone (-1): the
    kernels count positions from a sequence's end."""

    queries: Ints  # [S + 1], bounds of each sequence's queries
    bounds: Ints  # [S + 1], of each sequence's pages
    pages: Ints
    last: Ints  # [S], tokens in the last page

    @classmethod
    def of(cls, batch: Batch, block_size: int, window: int | None) -> PageTables:
        ends = batch.starts + batch.counts
        lows = np.zeros_like(ends) if window is None else np.maximum(0, batch.starts + 1 - window) // block_size
        highs = -(-ends // block_size)
        bounds = np.concatenate(([0], np.cumsum(highs - lows)))
        places = np.arange(bounds[-1]) + np.repeat(batch.offsets + lows - bounds[:-1], highs - lows)
        queries = np.append(batch.first, len(batch.ids))
        return cls(queries, bounds, batch.tables[places], ends - (highs - 1) * block_size)

    def on_host(self, *, pinned: bool) -> tuple[Tensor, ...]:
        """In the order of `plan`'s arguments."""
        parts = self.queries, self.bounds, self.pages, self.last
        held = torch.from_numpy(np.concatenate(parts).astype(np.int32))
        return (held.pin_memory() if pinned else held).split_with_sizes([len(part) for part in parts])
