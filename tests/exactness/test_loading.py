"""What loads, what is refused by name, and that a loaded folder computes what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, CONTEXT, TOLERANCE, Rig, make_model, plain_logits
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
)

from kvproto.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from services.worker.model.attention.reference import ReferenceBackend
from services.worker.model.kv_pool import KvPool, KvShape, blocks_that_fit, free_bytes
from services.worker.model.loader import adopt_model, load_model
from services.worker.model.runner import TorchRunner
from services.worker.model.support import supported_context

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: Gemma2Config(**TINY), "attention soft-capping"),
        (lambda: MistralConfig(sliding_window=32, **TINY), "sliding window attention"),
        (
            lambda: Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=1, **TINY),
            "sliding window",
        ),
        (lambda: T5Config(), "encoder-decoder"),
        (lambda: MambaConfig(), "recurrent"),
        (lambda: JambaConfig(), "recurrent"),
        (lambda: BloomConfig(), "ALiBi"),
        (lambda: FalconConfig(alibi=True), "ALiBi"),
        (lambda: GPT2Config(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
        (lambda: GPT2Config(add_cross_attention=True), "cross-attention"),
        (lambda: LlamaConfig(rope_parameters=LONGROPE, **TINY), "longrope beyond its original context of 128"),
    ],
)
def test_refused_by_feature_and_model(config: Any, feature: str, tmp_path: Path) -> None:
    made: PreTrainedConfig = config()
    made.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=feature) as raised:
        load_model(tmp_path, load_format="dummy")
    assert made.model_type in str(raised.value)
    assert raised.value.field == "model"


def test_window_as_long_as_the_served_context_is_no_window() -> None:
    config = MistralConfig(sliding_window=64, **TINY)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match=r"sliding_window 64, context 256"):
        adopt_model(model)
    assert adopt_model(model, context_length=64).context_length == 64
    assert supported_context(Qwen2Config(use_sliding_window=False, sliding_window=32, **TINY)) == CONTEXT


def test_attention_that_asks_for_more_is_found_by_the_probe() -> None:
    """A model whose configuration says nothing of it."""
    model = AutoModelForCausalLM.from_config(Gemma2Config(**TINY)).eval()
    model.config.attn_logit_softcapping = None
    model.config.layer_types = ["full_attention"] * 2
    with pytest.raises(UnsupportedModel, match="attention soft-capping is not supported"):
        adopt_model(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_folder_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.kv_shape.dtype is torch.float32
    assert loaded.kv_shape.layers == model.config.num_hidden_layers
    assert loaded.context_length == CONTEXT
    rig = Rig(loaded.model)
    turn = rig.add("r", range(20), 5)
    rig.run()
    assert (plain_logits(model, turn.ids)[-1] - plain_logits(loaded.model, turn.ids)[-1]).abs().max() == 0
    assert rig.differences()["r"] < TOLERANCE


def test_unknown_context_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not tell the context length"):
        supported_context(PreTrainedConfig())


def test_stop_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert load_model(tmp_path).eos_ids == (3, 5)
    assert load_model(tmp_path, load_format="dummy").eos_ids == (3, 5)


def test_dummy_weights_are_the_same_everywhere_and_leave_randomness_alone(tmp_path: Path) -> None:
    CONFIGS["qwen2"]().save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    first, second = (load_model(tmp_path, load_format="dummy", device="cpu") for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype(dtype: str, tmp_path: Path) -> None:
    make_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    assert loaded.kv_shape.dtype is getattr(torch, dtype)
    runner = TorchRunner(loaded, ReferenceBackend(), 8, 16)
    assert runner.pool.data.dtype is getattr(torch, dtype)
    assert load_model(tmp_path, device="cpu").kv_shape.dtype is torch.bfloat16


def test_missing_folder_device_and_weights(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no model can be loaded") as raised:
        load_model(tmp_path / "nothing")
    assert raised.value.field == "model"
    CONFIGS["llama"]().save_pretrained(tmp_path)
    torch.save(make_model("llama").state_dict(), tmp_path / "pytorch_model.bin")  # unsafe format: as if not there
    with pytest.raises(InvalidRequest, match="no weights"):
        load_model(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="CUDA"):
            load_model(tmp_path, load_format="dummy", device="cuda")


def test_pool_layout_and_reading_it_back() -> None:
    shape = KvShape(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32)
    pool = KvPool(shape, 6, 5, torch.device("cpu"))
    assert pool.data.shape == (6, 3, 2, 2, 5, 4)
    assert pool.data[0].is_contiguous()
    assert pool.data[0].nbytes == shape.bytes_per_block(5)
    rig = Rig(make_model("qwen2"), block_size=4)
    turn = rig.add("r", range(10), 2)
    rig.run()
    keys, values = rig.engine.read_kv(b"tenant root 16 b", turn.ids, 1)
    assert keys.shape == values.shape == (11, 2, 16)
    again = Rig(make_model("qwen2"), block_size=16, budget=3)
    again.add("r", range(10), 2)
    again.run()
    other_keys, _ = again.engine.read_kv(b"tenant root 16 b", turn.ids, 1)
    assert torch.allclose(keys, other_keys, atol=1e-5)


def test_memory() -> None:
    cpu = torch.device("cpu")
    shape = KvShape(layers=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert free_bytes(cpu) > 0
    assert 0 < blocks_that_fit(shape, 16, cpu, 0.01) * shape.bytes_per_block(16) <= 0.011 * free_bytes(cpu)
    with pytest.raises(OutOfMemory, match="holds no KV block"):
        blocks_that_fit(KvShape(1_000, 1_000, 1_000, torch.float32), 1_000, cpu, 0.01)
    with pytest.raises(OutOfMemory, match="a KV pool of"):
        KvPool(KvShape(1_000, 1_000, 1_000, torch.float32), 100, 1_000, cpu)
