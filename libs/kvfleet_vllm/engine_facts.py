"""What a vLLM engine is, as plain values for the worker beside it. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

_OF_CONFIG = {
    "model": "model_config.model",
    "served_model_name": "model_config.served_model_name",
    "revision": "model_config.revision",
    "max_model_len": "model_config.max_model_len",
    "dtype": "model_config.dtype",
    "quantization": "model_config.quantization",
    "max_logprobs": "model_config.max_logprobs",
    "logits_processors": "model_config.logits_processors",
    "load_format": "load_config.load_format",
    "block_size": "cache_config.block_size",
    "cache_dtype": "cache_config.cache_dtype",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "prefix_caching_hash_algo": "cache_config.prefix_caching_hash_algo",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "scheduling_policy": "scheduler_config.policy",
    "async_scheduling": "scheduler_config.async_scheduling",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "pipeline_parallel_size": "parallel_config.pipeline_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "data_parallel_rank": "parallel_config.data_parallel_index",
    "kv_load_failure_policy": "kv_transfer_config.kv_load_failure_policy",
    "speculative_method": "speculative_config.method",
}
_OF_EVENTS = {
    "enabled": "kv_events_config.enable_kv_cache_events",
    "publisher": "kv_events_config.publisher",
    "topic": "kv_events_config.topic",
    "endpoint": "kv_events_config.endpoint",
    "replay_endpoint": "kv_events_config.replay_endpoint",
}
_UNTOLD = (AttributeError, TypeError, ValueError, ImportError)


def engine_facts(config: Any, cache: Any, kind_of: Callable[[Any], str]) -> dict[str, Any]:
    """Of a VllmConfig and a KVCacheConfig; `kind_of` names a cache group's spec as vLLM's KV events do. A fact that
    this vLLM does not have is None."""
    facts = {name: _setting(config, path) for name, path in _OF_CONFIG.items()}
    facts["vocab_size"] = _told(lambda: int(config.model_config.get_vocab_size()))
    facts["enable_lora"] = _told(lambda: config.lora_config is not None)
    facts["num_gpu_blocks"] = _told(lambda: int(cache.num_blocks))
    facts["bytes_per_block"] = _told(lambda: _bytes_per_block(cache))
    facts["kv_cache_groups"] = _told(lambda: [_group(group, kind_of) for group in cache.kv_cache_groups])
    facts["kv_events"] = {name: _setting(config, path) for name, path in _OF_EVENTS.items()}
    return facts


def _setting(config: Any, path: str) -> Any:
    return _plain(_told(lambda: attrgetter(path)(config)))


def _bytes_per_block(cache: Any) -> int:
    """Of all layers, on one rank. Every tensor tells the size of the one allocation that all of them lie in; in vLLM
    before 0.32, which had one each, there were no strides."""
    sizes = {tensor.size for tensor in cache.kv_cache_tensors if tensor.layer_stride and not tensor.host_resident}
    return int(max(sizes)) // int(cache.num_blocks)


def _group(group: Any, kind_of: Callable[[Any], str]) -> dict[str, Any]:
    spec = group.kv_cache_spec
    return {
        "kind": _told(lambda: kind_of(spec)),
        "block_size": _told(lambda: int(spec.block_size)),
        "layers": _told(lambda: len(group.layer_names)),
        "state_mode": _told(lambda: str(spec.mamba_cache_mode)),
        "is_moved": _told(lambda: bool(group.enable_kv_transfer and not group.host_resident and spec.prefix_cacheable)),
    }


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _UNTOLD:
        return None


def _plain(value: Any) -> Any:
    """What msgpack takes, of the values of a vLLM config: plain ones, torch's dtypes, classes, and lists of these."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return str(value).removeprefix("torch.")
