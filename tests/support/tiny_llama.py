"""A tiny Llama of random weights in a folder, with the demo model's tokenizer: what any engine can serve at once."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfleet.worker.model.model_folder import DEMO_FOLDER

VOCAB = 1024  # the demo's
CONTEXT = 2048
STOPS = (1, 2)


def write_tiny_llama(folder: Path, seed: int = 7) -> Path:
    """float32, the same weights for the same seed. They are wide, so that few draws are certain."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=0,
        pad_token_id=STOPS[0],
        eos_token_id=list(STOPS),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder
