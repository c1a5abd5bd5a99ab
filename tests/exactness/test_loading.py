"""What loads, what is refused by name, and that a loaded folder computes what transformers computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_configs import CONFIGS, CONTEXT
from tiny_models import TOLERANCE, Rig, make_model
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvcpu.blocks import KvShape
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.kv_pool import KvPool, blocks_that_fit, free_bytes
from kvfleet.worker.model.load_progress import LoadProgress
from kvfleet.worker.model.loader import adopt_model, load_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.probe import probe
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.model.support import supported_context
from kvfleet.worker.settings import WorkerSettings
from kvproto.errors import InvalidRequest, OutOfMemory, UnsupportedModel
from kvproto.messages import Loading

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA_4: dict[str, Any] = TINY | {
    "attention_chunk_size": 32, "intermediate_size_mlp": 32, "head_dim": 16, "num_local_experts": 2,
    "attn_temperature_tuning": False,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "long_factor": [1.0] * 8, "short_factor": [1.0] * 8,
}  # fmt: skip

OWN_CODE = r"attention in code of the model's own \(%s\)"


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: hf.T5Config(), "encoder-decoder"),
        (lambda: hf.MambaConfig(), "a recurrent model without attention"),
        (lambda: hf.Lfm2Config(layer_types=["conv", "full_attention"], **TINY), "layers of type conv"),
        (lambda: hf.BloomConfig(), "ALiBi"),
        (lambda: hf.FalconConfig(alibi=True), "ALiBi"),
        (lambda: hf.GPT2Config(reorder_and_upcast_attn=True), "reorder_and_upcast_attn"),
        (lambda: hf.GPT2Config(add_cross_attention=True), "cross-attention"),
        (lambda: hf.LlamaConfig(rope_parameters=LONGROPE, **TINY), "longrope beyond its original context of 128"),
        (lambda: hf.DeepseekV32Config(), "layers of type indexed_attention"),
        (lambda: hf.Llama4TextConfig(**LLAMA_4), "chunked attention"),
        (lambda: hf.Llama4TextConfig(**LLAMA_4 | {"attn_temperature_tuning": True}), "attention temperature tuning"),
        (lambda: hf.Gemma3Config(), "multi-modal"),
        (lambda: hf.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}, **TINY), "quantized"),
        (lambda: hf.DeepseekV4Config(), "layers of type"),
    ],
)
def test_refused_by_configuration(config: Any, feature: str, tmp_path: Path) -> None:
    made: PreTrainedConfig = config()
    made.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=feature) as raised:
        load_model(tmp_path, load_format="dummy")
    assert made.model_type in str(raised.value)
    assert raised.value.field == "model"


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        (lambda: hf.FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=2), OWN_CODE % "FalconAttention"),
        (lambda: hf.GPTJConfig(n_embd=32, n_head=2, n_layer=2, rotary_dim=8), OWN_CODE % "GPTJAttention"),
        (lambda: hf.CodeGenConfig(n_embd=32, n_head=4, n_layer=2, rotary_dim=4), OWN_CODE % "CodeGenAttention"),
        (
            lambda: hf.GPTNeoConfig(
                hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
            ),
            OWN_CODE % "GPTNeoAttention, GPTNeoSelfAttention",
        ),
        (
            lambda: hf.XGLMConfig(vocab_size=64, d_model=32, num_layers=2, attention_heads=2, ffn_dim=32),
            OWN_CODE % "XGLMAttention",
        ),
        (lambda: hf.BertConfig(**TINY), "attention that is not causal"),
        (lambda: hf.Gemma3TextConfig(use_bidirectional_attention=True, **TINY), "attention that is not causal"),
        (lambda: hf.DogeConfig(**TINY), "attention under a mask of the model's own"),
        (
            lambda: hf.DiffLlamaConfig(**TINY),
            r"attention that a layer calls several times \(DiffLlamaAttention, in layers 0, 1\)",
        ),
        (
            lambda: hf.Lfm2Config(layer_types=["conv", "full_attention"], **TINY),
            r"attention outside AttentionInterface \(in layer 0 of 2\)",
        ),
        (  # its configuration does not say so
            lambda: hf.LlamaConfig(rope_parameters=LONGROPE | {"long_factor": [2.0] * 8}, **TINY),
            "mixing tokens outside attention",
        ),
        (lambda: hf.Llama4TextConfig(**LLAMA_4), "neither causal nor a sliding window"),
        (
            lambda: hf.Qwen2MoeConfig(use_sliding_window=True, sliding_window=32, **EXPERTS, **TINY),
            "a window of 32 tokens by its mask and of None by its layer",
        ),
        (
            lambda: hf.Gemma4TextConfig(head_dim=16, global_head_dim=32, vocab_size_per_layer_input=64, **TINY),
            "keys and values of several shapes",
        ),
        (
            lambda: hf.MiMoV2FlashConfig(
                head_dim=16, v_head_dim=8, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, **TINY
            ),
            "keys and values of several shapes",
        ),
    ],
)
def test_refused_by_what_it_computes(config: Any, feature: str) -> None:
    """Whatever its configuration says: found by running it once."""
    model = AutoModelForCausalLM.from_config(config()).eval()
    with pytest.raises(UnsupportedModel, match=feature) as raised:
        probe(model, CONTEXT)
    assert model.config.model_type in str(raised.value)
    assert "transformers serve" in str(raised.value)
    assert raised.value.field == "model"


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        (lambda: PreTrainedConfig(), "write it into config.json as max_position_embeddings"),
        (lambda: hf.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}), "the same model in bfloat16"),
        (lambda: hf.GPT2Config(reorder_and_upcast_attn=True), "without it in config.json"),
        (lambda: hf.Llama4TextConfig(**LLAMA_4), "with max_position_embeddings of 32 in config.json"),
        (lambda: hf.MambaConfig(), "transformers serve"),
    ],
)
def test_a_refusal_says_what_would_serve_the_model(config: Callable[[], PreTrainedConfig], instead: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"is not supported; .*{instead}"):
        supported_context(config())


def test_a_shorter_context_serves_chunked_attention() -> None:
    """As the refusal says."""
    model = AutoModelForCausalLM.from_config(hf.Llama4TextConfig(**LLAMA_4 | {"max_position_embeddings": 32})).eval()
    assert adopt_model(model).context_length == 32


def test_longrope_is_served_up_to_its_original_context() -> None:
    config = hf.LlamaConfig(rope_parameters=LONGROPE | {"long_factor": [2.0] * 8}, **TINY)
    assert adopt_model(AutoModelForCausalLM.from_config(config), context_length=128).context_length == 128


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_positions_begin_behind_the_padding_token_where_the_model_s_do(name: str) -> None:
    loaded = adopt_model(make_model(name))
    assert loaded.first_position == loaded.config.pad_token_id + 1
    assert loaded.context_length == CONTEXT == loaded.config.max_position_embeddings - loaded.first_position
    assert adopt_model(make_model(name), context_length=9).context_length == 9


def test_positions_of_a_model_s_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("gpt2")
    plain = model.transformer.forward

    def forward(*given: Any, position_ids: Any = None, **named: Any) -> Any:
        own = torch.arange(3, device=model.device)[None] + 5
        return plain(*given, position_ids=own if position_ids is None else position_ids, **named)

    monkeypatch.setattr(model.transformer, "forward", forward)
    with pytest.raises(UnsupportedModel, match="positions that count neither from 0"):
        adopt_model(model)


@pytest.mark.parametrize(
    ("keyword", "feature"),
    [("position_bias", "position bias"), ("indices", "sparse attention"), ("tilt", "attention with 'tilt'")],
)
def test_attention_asked_for_more_is_refused(keyword: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what nobody knows yet."""
    model = make_model("llama")
    attention = type(model.model.layers[0].self_attn)
    plain = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *given, **named: plain(*given, **named, **{keyword: 2}))
    with pytest.raises(UnsupportedModel, match=f"{feature} is not supported"):
        adopt_model(model)


def test_forward_pass_that_computes_other_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda logits_to_keep, **named: plain(**named))
    with pytest.raises(UnsupportedModel, match="ignores which logits are wanted"):
        adopt_model(model)


def test_experts_run_grouped_and_without_the_training_loss() -> None:
    """Of transformers' ways to run experts the one that is exact and fast with few tokens and many."""
    loaded = adopt_model(make_model("mixtral"))
    assert loaded.config._experts_implementation == "grouped_mm"
    assert loaded.config.output_router_logits is False


@pytest.mark.parametrize("name", CONFIGS)
def test_folder_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert loaded.kv_shape.dtype is torch.float32
    assert loaded.kv_shape.layers == model.config.num_hidden_layers
    assert loaded.context_length == CONTEXT
    assert loaded.window == adopt_model(make_model(name)).window
    held = loaded.model.state_dict()
    assert all(torch.equal(values, held[weight]) for weight, values in model.state_dict().items())
    rig = Rig(loaded.model)
    rig.model = model
    rig.add("r", range(20), 5)
    rig.run()
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
    keys, values = rig.engine.kv.read_kv(b"tenant root 16 b", turn.ids, 1)
    assert keys.shape == values.shape == (11, 2, 16)
    again = Rig(make_model("qwen2"), block_size=16, budget=3)
    again.add("r", range(10), 2)
    again.run()
    other_keys, _ = again.engine.kv.read_kv(b"tenant root 16 b", turn.ids, 1)
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


@pytest.mark.parametrize("tied", [True, False])
def test_the_bytes_of_weights_are_counted_as_they_come(tmp_path: Path, tied: bool) -> None:
    """In the numbers that they are loaded as, with those that two modules share once."""
    config = hf.LlamaConfig(**TINY, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    seen: list[Loading] = []

    class Watched(LoadProgress):
        @contextmanager
        def weights(self, total_bytes: int) -> Iterator[None]:
            with super().weights(total_bytes):
                seen.append(self.now())
                yield
                seen.append(self.now())

    loaded = load_model(tmp_path, dtype="bfloat16", progress=(progress := Watched()))
    size = sum(one.nbytes for one in loaded.model.parameters())
    assert [(one.doing, one.weight_bytes, one.total_bytes) for one in seen] == [
        ("loading weights", 0, size), ("loading weights", size, size),
    ]  # fmt: skip
    assert progress.now() == replace(seen[0], doing="trying the model", total_bytes=0)


def test_an_engine_tells_what_it_does_while_it_is_built() -> None:
    done: list[str] = []

    class Noted(LoadProgress):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "doing":
                done.append(value)

    settings = WorkerSettings(model="demo", device="cpu", host_bytes=0)
    bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
    build_engine(settings, DEMO_FOLDER, bundle, progress=Noted())
    assert done == [
        "starting", "importing torch", "loading weights", "trying the model", "measuring the memory of a step",
        "making the kernels ready", "reserving memory for blocks",
    ]  # fmt: skip
