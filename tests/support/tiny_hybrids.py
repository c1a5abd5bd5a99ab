"""Tiny models of random weights whose layers have caches of several kinds, with the demo model's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvfleet.worker.model.model_folder import DEMO_FOLDER
from tests.support.tiny_llama import CONTEXT, STOPS, VOCAB

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "initializer_range": 0.08,
    "bos_token_id": 0, "pad_token_id": STOPS[0], "eos_token_id": list(STOPS), "dtype": "float32",
}  # fmt: skip


def short_conv() -> PreTrainedModel:
    """Attention and short convolutions: more of these than fit into one group."""
    kinds = ["conv", "conv", "full_attention", "conv", "full_attention"]
    config = Lfm2Config(
        **SIZES,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        block_dim=256,
        conv_dim=256,
        block_ff_dim=512,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    )
    return Lfm2ForCausalLM(config)


def sliding_window() -> PreTrainedModel:
    """Two layers in three attend to the last 96 tokens only."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=96,
        query_pre_attn_scalar=32,
        tie_word_embeddings=True,
    )
    return Gemma3ForCausalLM(config)


def linear_attention() -> PreTrainedModel:
    """Attention and gated delta nets, which remember for long."""
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    config = Qwen3NextConfig(
        **SIZES, num_hidden_layers=len(kinds), layer_types=kinds, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # drawn, most heads forget within a token
            weight.data.fill_(-5.0)
    return model


def write_tiny_hybrid(folder: Path, make: Callable[[], PreTrainedModel], seed: int = 7) -> Path:
    """float32, the same weights for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make().float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_FOLDER / name, folder)
    return folder
