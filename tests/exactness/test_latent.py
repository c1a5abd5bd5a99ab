"""Latent attention keeps latents in the pool where that computes the same, and is refused where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_configs import CONFIGS, CONTEXT, VOCAB
from tiny_models import TOLERANCE, Rig, make_model
from torch import Tensor, nn

from kvfleet.worker.model.attention.latent import keep_latents, latent_heads
from kvfleet.worker.model.kv_size import formula
from kvfleet.worker.model.loader import adopt_model
from kvfleet.worker.model.probe import layout_of
from kvproto.errors import UnsupportedModel

LATENT = [name for name, config in CONFIGS.items() if config().to_dict().get("kv_lora_rank")]


def test_a_token_of_deepseek_v3_takes_a_seventieth_of_what_its_heads_would() -> None:
    config = hf.DeepseekV3Config()
    layout = layout_of(config, 4096)
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    assert layout.bytes_per_token("bfloat16") == 61 * (512 + 64) * 2
    assert heads * 61 * 2 / layout.bytes_per_token("bfloat16") > 70
    assert formula(layout, "bfloat16") == "61 layers x 1 latent x 576 x 2 bytes"


@pytest.mark.parametrize("name", LATENT)
def test_a_pool_holds_latents_alone(name: str) -> None:
    config = CONFIGS[name]()
    shape = adopt_model(make_model(name)).kv_shape
    stored = config.kv_lora_rank + config.qk_rope_head_dim
    assert (shape.kv_heads, shape.head_dim, shape.latent) == (1, stored, config.kv_lora_rank)
    assert shape.bytes_per_block(16) == config.num_hidden_layers * 16 * stored * 4


def test_blocks_of_latents_are_not_those_of_a_head_of_the_same_size(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(make_model("youtu"))
    shape = rig.runner.pool.shape
    formats = set()
    for latent in (0, shape.latent, shape.latent - 1):
        loaded = replace(adopt_model(make_model("youtu")), kv_shape=replace(shape, latent=latent))
        formats.add(type(rig.runner)(loaded, rig.runner._backend, 8, 16).memory.kv_format)
    assert len(formats) == 3


def test_a_model_may_be_adopted_again(make_rig: Callable[..., Rig]) -> None:
    once = adopt_model(make_model("deepseek-v2")).model
    rig = make_rig(once)
    rig.model = make_model("deepseek-v2")
    rig.add("r", [random.Random(1).randrange(VOCAB) for _ in range(50)], 5)
    rig.run()
    assert max(rig.differences().values()) < TOLERANCE


def scaled(module: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    expand = module.expand_kv

    def other(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(latent, rotated)
        return keys, values * 1.1

    return other


def turned(module: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    expand = module.expand_kv
    return lambda latent, rotated: expand(latent, -rotated)


@pytest.mark.parametrize("impostor", [scaled, turned])
def test_what_expands_latents_otherwise_is_left_alone_and_refused(impostor: Callable[[Any], Any]) -> None:
    model = make_model("deepseek-v3")
    for layer in model.model.layers:
        layer.self_attn.expand_kv = impostor(layer.self_attn)
    keep_latents(model)
    assert all(latent_heads(layer.self_attn) is None for layer in model.model.layers)
    with pytest.raises(UnsupportedModel, match="storing keys and values of several shapes"):
        adopt_model(model)


def test_a_product_with_a_bias_is_left_alone() -> None:
    model = make_model("deepseek-v3")
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = nn.Linear(old.in_features, old.out_features)
    with pytest.raises(UnsupportedModel, match="storing keys and values of several shapes"):
        adopt_model(model)


def of_one_size() -> Any:
    """Its keys and values would have as many numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = hf.YoutuConfig(**CONFIGS["youtu"]().to_diff_dict() | {"v_head_dim": 24})
        return hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_layers_of_both_kinds_are_refused() -> None:
    model = of_one_size()
    attention = model.model.layers[1].self_attn
    attention.expand_kv = scaled(attention)
    with pytest.raises(UnsupportedModel, match="storing keys and values of several shapes"):
        adopt_model(model)


def test_without_latents_heads_of_one_size_are_kept(make_rig: Callable[..., Rig]) -> None:
    model = of_one_size()
    for layer in model.model.layers:
        layer.self_attn.expand_kv = scaled(layer.self_attn)
    rig = make_rig(model)
    shape = rig.runner.pool.shape
    assert (shape.kv_heads, shape.head_dim, shape.latent) == (4, 24, 0)
    rig.add("r", [random.Random(1).randrange(VOCAB) for _ in range(50)], 5)
    rig.run()
    assert max(rig.differences().values()) < TOLERANCE


@pytest.mark.parametrize("name", LATENT)
def test_it_serves_its_whole_context(name: str) -> None:
    assert adopt_model(make_model(name)).context_length == CONTEXT
    assert adopt_model(make_model(name).to(torch.bfloat16)).kv_shape.latent
