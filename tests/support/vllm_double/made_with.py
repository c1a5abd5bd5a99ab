"""How a double is made, and everything that may be wrong with it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvfleet_vllm.wire import VERSION


@dataclass(frozen=True, slots=True)
class Spoiled:
    """What becomes of one request after so many tokens: `logit` is what the model computes for all of its tokens;
    `told` is what its client is told instead of the next token, `{"error": ...}` or `{"finish": ...}`."""

    after: int = 0
    logit: float | None = None
    told: Mapping[str, Any] | None = None


@dataclass(eq=False)
class MadeWith:
    """What `vllm serve` was started with. `other_facts` are told instead of what is; `answers` by path: a status and a
    body instead of the real answer. `events_go_to` is another endpoint than the one that is told. `adapters`: paths by
    name, of --lora-modules; None: without --enable-lora. `loads`: more may come at run time."""

    events: str
    replay: str
    model: str
    name: str = "demo"
    slots: int = 8
    blocks: int = 160
    block_size: int = 32
    context: int = 1024
    vocab_size: int = 1024
    step_tokens: int = 2048
    step_s: float = 0.001
    version: str = "0.32.0"
    wire_version: int = VERSION
    has_routes: bool = True
    has_connector: bool = True
    has_sampler: bool = True
    events_go_to: str = ""
    adapters: Mapping[str, str] | None = None
    loads: bool = True
    topic: str = field(default_factory=lambda: f"kv-{uuid.uuid4().hex}")  # another's may come to a port used again
    other_facts: Mapping[str, Any] = field(default_factory=dict)
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        events = {"enabled": True, "publisher": "zmq", "topic": self.topic, "endpoint": self.events}
        return {
            "model": self.model,
            "served_model_name": [self.name],
            "revision": None,
            "max_model_len": self.context,
            "dtype": "float32",
            "quantization": None,
            "max_logprobs": 129,
            "logits_processors": ["kvfleet_vllm.sampler:Sampler"] if self.has_sampler else None,
            "load_format": "auto",
            "block_size": self.block_size,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
            "max_num_seqs": self.slots,
            "max_num_batched_tokens": self.step_tokens,
            "scheduling_policy": "priority",
            "async_scheduling": False,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "data_parallel_rank": 0,
            "speculative_method": None,
            "vocab_size": self.vocab_size,
            "enable_lora": self.adapters is not None,
            "num_gpu_blocks": self.blocks,
            "bytes_per_block": 1024,
            "kv_cache_groups": [{"kind": "full_attention", "block_size": self.block_size, "layers": 1}],
            "kv_events": events | {"replay_endpoint": self.replay},
            **self.other_facts,
        }
