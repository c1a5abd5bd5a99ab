"""A random LoRA adapter of the tiny Llama in a folder, as peft writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, VALUES = 4, 256, 128  # of `tiny_llama`
SCALE = 0.2
TARGETS = {"q_proj": HIDDEN, "v_proj": VALUES}  # outputs


def write_adapter(folder: Path, seed: int, rank: int = 8, *, hidden: int = HIDDEN, **config: Any) -> Path:
    """The same weights for the same seed, large enough that greedy answers differ. `config`: other than usual. With
    another `hidden` size it is one of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    usual = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank,
        "lora_alpha": 2 * rank, "target_modules": sorted(TARGETS), "bias": "none", "lora_dropout": 0.0,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(usual | config))
    draws = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        for module, outputs in TARGETS.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = SCALE * torch.randn(rank, hidden, generator=draws)
            weights[f"{name}.lora_B.weight"] = SCALE * torch.randn(outputs, rank, generator=draws)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
