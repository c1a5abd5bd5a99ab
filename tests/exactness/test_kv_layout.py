"""What `kvfleet kv-size` reads from a configuration is what a loaded model's attention stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import CONFIGS, CONTEXT
from tiny_models import make_model
from transformers import AutoConfig, FalconConfig, GPTBigCodeConfig, GPTNeoXConfig, OPTConfig, PreTrainedConfig

from kvfleet.worker.model import kv_size_report
from kvfleet.worker.model.kv_size import KvLayout
from kvfleet.worker.model.loader import adopt_model, load_model
from kvfleet.worker.model.probe import from_fields, layout_of
from kvproto.errors import UnsupportedModel

SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip

EXOTIC: dict[str, PreTrainedConfig] = {
    "multi-query": GPTBigCodeConfig(vocab_size=50, n_embd=64, n_layer=2, n_head=4, multi_query=True),
    "opt": OPTConfig(vocab_size=50, hidden_size=64, ffn_dim=32, num_hidden_layers=3, num_attention_heads=4),
    "gpt_neox": GPTNeoXConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_is_what_a_loaded_model_stores(name: str) -> None:
    shape = adopt_model(make_model(name)).kv_shape
    layout = layout_of(CONFIGS[name](), CONTEXT)
    assert layout.bytes_per_block(16, "float32") == shape.bytes_per_block(16)
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (shape.layers, shape.kv_heads, shape.head_dim)
    assert layout.parts == shape.parts == (1 if CONFIGS[name]().to_dict().get("kv_lora_rank") else 2)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "mistral", "mixtral", "olmo2", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("context", [128, 16])
def test_the_usual_fields_are_a_fair_substitute_for_a_forward_pass(model_type: str, context: int) -> None:
    config = AutoConfig.for_model(model_type, **SMALL | ({} if model_type == "olmo2" else {"sliding_window": 32}))
    assert from_fields(config, context) == layout_of(config, context)


def test_where_no_forward_pass_is_possible_the_fields_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", raising)
    assert layout_of(AutoConfig.for_model("llama", **SMALL), 128) == KvLayout(3, 2, 16, 128)


def test_a_field_that_its_family_ignores_counts_for_nothing() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_head=4, n_layer=3, num_key_value_heads=2, sliding_window=32)
    assert layout_of(config, 128) == KvLayout(3, 4, 16, 128)


def test_a_window_of_every_layer_counts_and_one_of_some_layers_does_not() -> None:
    assert layout_of(AutoConfig.for_model("mistral", sliding_window=32, **SMALL), 128).window == 32
    assert layout_of(AutoConfig.for_model("mistral", sliding_window=32, **SMALL), 32).window is None
    assert layout_of(AutoConfig.for_model("gemma2", sliding_window=32, **SMALL), 128).window is None
    assert layout_of(AutoConfig.for_model("qwen2", sliding_window=32, **SMALL), 128).window is None


@pytest.mark.parametrize("name", EXOTIC)
def test_so_are_other_models(name: str) -> None:
    config = EXOTIC[name]
    heads = 1 if name == "multi-query" else 4
    assert layout_of(config, 64) == KvLayout(config.num_hidden_layers, heads, 16, 64)


def test_a_model_whose_attention_is_its_own_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="falcon"):
        layout_of(FalconConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=4), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_report_on_a_folder_agrees_with_a_worker_that_loads_it(
    dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIGS["qwen2"]()
    config.dtype = dtype
    config.save_pretrained(tmp_path)
    kv_size_report.main([str(tmp_path), "--device=cpu", "--memory=1MiB", "--block-size=8", "--kv-dtype=auto"])
    found = json.loads(capsys.readouterr().out)
    loaded = load_model(tmp_path, load_format="dummy", device="cpu")
    assert found["sizes"][0]["bytes_per_block"] == loaded.kv_shape.bytes_per_block(8)
    assert found["sizes"][0]["blocks"] == 2**20 // loaded.kv_shape.bytes_per_block(8)
    assert found["context_length"] == loaded.context_length


def test_without_a_memory_it_is_the_share_of_what_is_free_that_a_worker_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kv_size_report.main(["demo", "--device=cpu", "--kv-memory-fraction=0.5", "--workers-on-host=2"])
    found = json.loads(capsys.readouterr().out)
    assert found["memory"] == found["free"] // 4
    assert [size["kv_dtype"] for size in found["sizes"]] == ["float32", "bfloat16", "int8"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["/no/such/folder"], "does not exist"),
        (["demo", "--memory=much"], "not a size"),
        (["demo", "--kv-dtype=int3"], "int3"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        kv_size_report.main(arguments)
    assert ended.value.code != 0
    said = capsys.readouterr()
    assert line in said.err
    assert not said.out
