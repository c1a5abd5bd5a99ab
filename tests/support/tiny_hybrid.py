"""A tiny hybrid model (Granite 4: Mamba-2 beside attention) of random weights, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.support.tiny_llama import CONTEXT, STOPS, VOCAB


def write_tiny_hybrid(folder: Path, seed: int = 3) -> Path:
    """float32, the same weights for the same seed. They are wide, so that greedy draws are hardly ever near ties."""
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.3, num_local_experts=0,
        shared_intermediate_size=96, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=32,
        layer_types=["linear_attention", "full_attention"] * 2, position_embedding_type="rope",
        attention_multiplier=0.25, tie_word_embeddings=False, bos_token_id=0, pad_token_id=STOPS[0],
        eos_token_id=list(STOPS), dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder
