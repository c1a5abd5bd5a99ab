"""What benchmarks that have a form for a GPU share: how it is asked for, and the shapes that are measured."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.report import skip

QWEN_7B = {  # Qwen2.5-7B
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
TINY = QWEN_7B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def add_device(made: ArgumentParser) -> None:
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    made.add_argument("--dry", action="store_true", help="of `cuda`: tiny, on a CPU, no figure")


def check_device(asked: Namespace, name: str, unit: str, *, floor: float, peer: str) -> None:
    """Exits as skipped where there is no GPU, unless it is a dry run."""
    if asked.device == "cuda" and not asked.dry and not torch.cuda.is_available():
        skip(name, unit, floor=floor, peer=peer, why="torch sees no GPU")


def shape_folder(folder: str, *, dry: bool) -> Path:
    """Of a model without weights."""
    Path(folder, "config.json").write_text(json.dumps(TINY if dry else QWEN_7B))
    return Path(folder)


def told_device(asked: Namespace) -> dict[str, Any]:
    """For the result's line."""
    return {"gpu": torch.cuda.get_device_name()} if asked.device == "cuda" else {}
