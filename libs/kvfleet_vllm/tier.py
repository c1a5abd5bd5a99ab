"""Adapter: the worker's shared memory as a tier below vLLM's host memory, for vLLM's TieringOffloadingSpec.

{"kv_connector": "MultiConnector", ..., "kv_connector_extra_config": {"connectors": [
    {"kv_connector": "KvfleetConnector", ..., "kv_connector_extra_config": {"tier": true}},
    {"kv_connector": "OffloadingConnector", ..., "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": BYTES, "offload_prompt_only": false,
        "secondary_tiers": [{"type": "KvfleetTier", "module_path": "kvfleet_vllm.tier"}]}}]}}

The connector comes first: it tells the worker of requests; what the worker says of their blocks is the tier's to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvfleet_vllm.block_copies import LayerBlocks
from kvfleet_vllm.tier_side import SIDES


class KvfleetTier(SecondaryTierManager):  # type: ignore[misc]
    """Raises ValueError where it was not configured with the connector, or chunks are not vLLM's blocks."""

    medium = Medium.CPU

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **others: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **others)
        config = offloading_spec.config
        side = SIDES.get(config.engine_id)
        if side is None:
            raise ValueError('KvfleetTier needs a KvfleetConnector with "tier": true before the OffloadingConnector')
        if side.tokens and (offloading_spec.blocks_per_chunk, *offloading_spec.tokens_per_block) != (1, side.tokens):
            raise ValueError("KvfleetTier needs chunks of one block: no block_size, no blocks_per_chunk")
        self._side, self._tokens = side, side.tokens
        chunks, size = primary_kv_view.shape or (0, 0)
        memory = torch.frombuffer(primary_kv_view.cast("B"), dtype=torch.uint8).view(chunks, size)
        layout = [size, config.worker_kv_bytes_per_block, config.canonical_layout, offloading_spec.replicated_layout]
        side.attach(LayerBlocks({"chunks": memory}, chunks), repr(layout).encode())
        side.forget_host = self._forget_host

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        wants = self._side.wants(req_context.req_id)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL if wants else OffloadPolicy.CHUNK_LEVEL)

    def lookup(self, key: Any, req_context: ReqContext) -> LookupResult:
        block = self._block(key, req_context)
        return LookupResult.HIT if self._side.offers(req_context.req_id, block) else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._side.load(job_metadata.job_id, job_metadata.req_context.req_id, self._chunks(job_metadata))

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._side.save(job_metadata.job_id, job_metadata.req_context.req_id, self._chunks(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        size = self.block_size_bytes
        return [
            JobResult(one.job, one.is_done, transfer_time=one.seconds, transfer_bytes=one.blocks * size)
            for one in self._side.moved()
        ]

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._side.no_more(req_context.req_id)

    def drain_jobs(self) -> None:
        self._side.drain()

    def shutdown(self) -> None:
        self._side.detach()

    def _chunks(self, job: TransferJob) -> dict[int, int]:
        """The request's blocks, by number."""
        numbers = (self._block(key, job.req_context) for key in job.keys)
        return {number: int(chunk) for number, chunk in zip(numbers, job.chunk_ids, strict=True)}

    def _block(self, key: Any, request: ReqContext) -> int:
        """The block's number in the request; -1 if it is not known."""
        end = request.get_offload_key_position(key)
        return end // self._tokens - 1 if end and self._tokens else -1

    def _forget_host(self) -> None:
        """vLLM's host memory has no order to forget: all of it that is not in use is pushed out by what fails."""
        primary = self._offloading_spec.get_manager().primary_tier
        # It allocates all or nothing, so what can be had is read from it.
        spare = primary._get_num_free_chunks() + primary._num_evictable_cache_chunks
        nobody = ReqContext("kvfleet")
        keys = [make_offload_key(b"kvfleet %d" % number, 0) for number in range(spare)]
        if primary.prepare_write(keys, nobody) is not None:
            primary.complete_write(keys, nobody, False)
