"""Adapter: vLLM's hooks of a KV connector. It moves no blocks; it tells the worker beside vLLM what HTTP does not.

--kv-transfer-config '{"kv_connector": "KvfleetConnector", "kv_connector_module_path": "kvfleet_vllm.connector",
                       "kv_role": "kv_both"}'
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.version import __version__

from kvfleet_vllm.engine_facts import engine_facts
from kvfleet_vllm.scheduler_side import SchedulerSide
from kvfleet_vllm.wire import VERSION, EngineHello


class KvfleetConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hybrid models are served: it does not touch blocks, so it does not matter how they are grouped."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        instance, facts = uuid.uuid4().hex, engine_facts(vllm_config, kv_cache_config, _kind)
        # Of the workers' connectors it is never asked, and has no connection.
        self._scheduler = SchedulerSide(lambda: EngineHello(VERSION, instance, os.getpid(), __version__, facts))

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nobody waits for blocks: what a preempted request has generated is delivered, as without us

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        self._scheduler.request_added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._scheduler.step(scheduler_output)
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.request_finished(request.request_id)
        return False, None

    # In the workers.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    # In both.

    def shutdown(self) -> None:
        self._scheduler.close()


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind  # not in every version

    kind: str = get_kv_cache_spec_kind(spec).value
    return kind
