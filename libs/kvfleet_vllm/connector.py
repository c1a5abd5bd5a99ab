"""Adapter: vLLM's hooks of a KV connector. It tells the worker beside vLLM what HTTP does not, and moves blocks
between vLLM's cache and that worker's shared memory.

--kv-transfer-config '{"kv_connector": "KvfleetConnector", "kv_connector_module_path": "kvfleet_vllm.connector",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

With "kv_connector_extra_config": {"tier": true} it moves no blocks itself: vLLM's tiers do, see `tier`.
"""

from __future__ import annotations

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.version import __version__

from kvfleet_vllm.block_copies import LayerBlocks
from kvfleet_vllm.block_moves import BlockMoves
from kvfleet_vllm.cache_format import cache_format
from kvfleet_vllm.cache_groups import movable_groups
from kvfleet_vllm.engine_facts import engine_facts
from kvfleet_vllm.scheduler_side import SchedulerSide
from kvfleet_vllm.tier_side import SIDES, TierSide
from kvfleet_vllm.wire import VERSION, EngineHello, WorkerHello
from kvfleet_vllm.worker_side import WorkerSide

log = logging.getLogger(__name__)


class _StepMoves(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, moves: BlockMoves) -> None:
        self.moves = moves


@dataclass(frozen=True, slots=True)
class _WorkerFormat(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one of vLLM's workers tells the scheduler where tiers move the blocks: what those of its rank mean."""

    meaning: bytes


class KvfleetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """All models are served; where blocks cannot be moved exactly none is, and a line says why."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        instance, facts = uuid.uuid4().hex, engine_facts(vllm_config, kv_cache_config, _kind)
        self._format: bytes | None = None  # of this worker, where tiers move its blocks

        def hello() -> EngineHello:
            return EngineHello(VERSION, instance, os.getpid(), __version__, facts)

        # Of the workers' connectors it is never asked, and has no connection.
        settings = vllm_config.kv_transfer_config
        facts["tier"] = self._is_tiered = bool(settings.get_from_extra_config("tier", False))
        self._groups = movable_groups(
            vllm_config, facts["kv_cache_groups"], not self._is_tiered and hasattr(super(), "get_transfer_results")
        )
        if not self._groups.tokens:
            log.warning("blocks are neither saved nor restored: %s", self._groups.why)
        if self._is_tiered and role == KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            side = TierSide(hello, groups=self._groups, ranks=ranks)
            self._scheduler: SchedulerSide = side
            SIDES[settings.engine_id] = side
        else:
            recomputes = facts["kv_load_failure_policy"] == "recompute"
            self._scheduler = SchedulerSide(hello, groups=self._groups, recomputes=recomputes)
        self._worker: WorkerSide | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nobody waits for blocks: what a preempted request has generated is delivered, as without us

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._scheduler.request_added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.restorable(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.allocated(request, tables, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return _StepMoves(self._scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        failed = getattr(connector_output, "failed_recving", ())
        self._scheduler.loaded(connector_output.finished_recving or (), connector_output.invalid_block_ids, failed)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.request_finished(request.request_id)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        if isinstance(self._scheduler, TierSide):
            self._scheduler.formats = {rank: told.meaning for rank, told in metadata.items()}

    # In the workers.

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._format is None else _WorkerFormat(self._format)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        blocks, meaning = self._blocks(kv_caches) if self._groups.tokens else (None, b"")
        if self._is_tiered:
            self._format = meaning
            return
        parallel, size = self._vllm_config.parallel_config, 0 if blocks is None else blocks.slot_bytes
        hello = WorkerHello(VERSION, parallel.rank, parallel.tensor_parallel_size, meaning, size)
        self._worker = WorkerSide(lambda: hello, blocks)

    def _blocks(self, kv_caches: dict[str, Any]) -> tuple[LayerBlocks | None, bytes]:
        cache, groups = self._kv_cache_config, self._groups
        parts = [[*groups.attention], [*groups.states], [one.layer_names for one in cache.kv_cache_groups]]
        backends = _backends(self._vllm_config)
        try:
            blocks = LayerBlocks(kv_caches, cache.num_blocks, len(groups.attention))
            several = parts if groups.are_several else ()
            return blocks, cache_format(__version__, self._vllm_config, kv_caches, backends, several)
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("blocks are neither saved nor restored: %s", error)
            return None, b""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start(self._get_connector_metadata().moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata().moves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.finished(self._get_connector_metadata().moves.idle) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        failed = set() if self._worker is None else self._worker.take_failed()
        if self._groups.are_several:
            results.failed_recving |= failed
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad = set() if self._worker is None else self._worker.take_bad_blocks()
        return set() if self._groups.are_several else bad  # told of one group, vLLM knows whose they are

    # In both.

    def shutdown(self) -> None:
        self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind  # not in every version

    kind: str = get_kv_cache_spec_kind(spec).value
    return kind


def _backends(config: Any) -> dict[str, str]:
    """How each attention layer lays out its cache: the backend, and on CPUs the instruction set it packs for."""
    found = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else ""
        found[name] = f"{backend} {getattr(layer, 'isa', '')}"
    return found
