"""A vLLM of another version is described as far as it goes, in plain values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvfleet_vllm.engine_facts import engine_facts
from kvfleet_vllm.wire import VERSION, Decoder, EngineHello, encode


class Processor: ...


def kind_of(spec: Any) -> str:
    return str(spec.kind)


def test_facts_are_plain_and_of_the_config() -> None:
    tensor = SimpleNamespace(size=6400, layer_stride=64, host_resident=False)
    cache = SimpleNamespace(
        num_blocks=100,
        kv_cache_tensors=[tensor, tensor],
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=SimpleNamespace(kind="full_attention", block_size=32), layer_names=["a", "b"])
        ],
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m", dtype=torch.bfloat16, served_model_name=["one", "two"], logits_processors=[Processor, "a:B"],
            get_vocab_size=lambda: 2048,
        ),
        lora_config=None,
        speculative_config=None,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True, topic="t"),
    )  # fmt: skip
    facts = engine_facts(config, cache, kind_of)
    expected = {
        "model": "m", "dtype": "bfloat16", "served_model_name": ["one", "two"], "vocab_size": 2048,
        "logits_processors": [f"{__name__}:Processor", "a:B"], "enable_lora": False, "speculative_method": None,
        "num_gpu_blocks": 100, "bytes_per_block": 64, "block_size": None,
        "kv_cache_groups": [
            {"kind": "full_attention", "block_size": 32, "layers": 2, "state_mode": None, "is_moved": None}
        ],
        "kv_events": {"enabled": True, "publisher": None, "topic": "t", "endpoint": None, "replay_endpoint": None},
    }  # fmt: skip
    assert {name: facts[name] for name in expected} == expected
    hello = EngineHello(VERSION, "i", 1, "0", facts)
    assert Decoder().feed(encode([hello])) == [hello]


def test_of_a_vllm_that_has_none_of_it_all_is_none() -> None:
    facts = engine_facts(SimpleNamespace(), SimpleNamespace(), kind_of)
    assert set(facts.pop("kv_events").values()) == set(facts.values()) == {None}
