"""A stand-in for FlashInfer: its wrapper's signatures, and paged attention in torch from what `plan` was told.

It reads nothing but the arguments of the real one (FlashInfer 0.7.2's documentation of them), so tables that are wrong
for FlashInfer are wrong here.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype is torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {table.dtype for table in tables} == {torch.int32}
        self.queries, self.bounds, self.pages, self.last = (table.tolist() for table in tables)
        assert len(self.queries) == len(self.bounds) == len(self.last) + 1
        assert all(1 <= last <= page_size for last in self.last)
        assert self.bounds[-1] == len(self.pages)
        self.heads = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page_size, self.causal = page_size, causal
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.window_left, self.soft_cap = window_left, logits_soft_cap or 0.0
        self.dtypes = q_data_type, q_data_type if kv_data_type is None else kv_data_type

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor:
        heads, kv_heads, dim = self.heads
        assert q.shape == (self.queries[-1], heads, dim)
        assert (q.dtype, paged_kv_cache.dtype) == self.dtypes
        assert paged_kv_cache.shape[1:] == (2, kv_heads, self.page_size, dim)
        assert q.stride(-1) == paged_kv_cache.stride(-1) == 1
        given = torch.empty_like(q)
        for at, last in enumerate(self.last):
            tokens = slice(*self.queries[at : at + 2])
            pages = self.pages[slice(*self.bounds[at : at + 2])]
            given[tokens] = self._sequence(q[tokens].float(), paged_kv_cache, pages, last).to(q.dtype)
        return given

    def _sequence(self, query: Tensor, cache: Tensor, pages: list[int], last: int) -> Tensor:
        heads, kv_heads, dim = self.heads
        assert all(0 <= page < len(cache) for page in pages)
        keys = (len(pages) - 1) * self.page_size + last
        found = cache[pages].float().permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, :keys]
        key, value = found.repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("thd,hkd->htk", query, key) * self.scale
        if self.soft_cap > 0:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        place = torch.arange(keys)
        position = torch.arange(len(query))[:, None] + keys - len(query)
        seen = place <= position if self.causal else torch.ones(len(query), keys, dtype=torch.bool)
        if self.window_left >= 0:
            seen &= place + self.window_left >= position
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        return torch.einsum("htk,hkd->thd", weights, value)


def package() -> ModuleType:
    made = ModuleType("flashinfer")
    made.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return made
