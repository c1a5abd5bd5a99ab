"""Configurations of small models: one or more for each architecture that is promised to be exact.

Random weights are large enough for logits of about 1 that depend on the whole context. Windows are shorter than most
of the tests' sequences, caps are low enough to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf
from transformers import PreTrainedConfig

VOCAB = 211
CONTEXT = 256
WINDOW = 24

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": CONTEXT, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_GROUPED = _BASE | {"num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": None,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, Any] = _GROUPED | {
    "num_hidden_layers": 3, "head_dim": 16, "layer_types": _MIXED, "sliding_window": WINDOW,
    "query_pre_attn_scalar": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LLAMA_3_ROPE: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_MINISTRAL_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
_GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LATENT: dict[str, Any] = _BASE | {
    "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip
_DEEPSEEK_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}  # fmt: skip
_BEHIND_PADDING: dict[str, Any] = _BASE | {
    "vocab_size": VOCAB + 1, "pad_token_id": VOCAB, "max_position_embeddings": VOCAB + 1 + CONTEXT,
}  # fmt: skip

_HYBRID: dict[str, Any] = _GROUPED | {"num_hidden_layers": 4}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
}  # fmt: skip

HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {  # recurrent layers beside attention
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_HYBRID, **_EXPERTS, **_DELTA, head_dim=16, shared_expert_intermediate_size=32, decoder_sparse_step=1
    ),
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(
        **_HYBRID, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, mamba_n_heads=8,
        mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=32, layer_types=["linear_attention", "full_attention"] * 2,
        position_embedding_type="rope", logits_scaling=1.0, attention_multiplier=0.25,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(
        **_HYBRID, head_dim=16, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_chunk_size=32,
    ),
}  # fmt: skip

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    # full attention: grouped-query, multi-query, biases, norms, tied and untied heads
    "llama": lambda: hf.LlamaConfig(**_BASE),
    "llama-3-rope-tied": lambda: hf.LlamaConfig(
        tie_word_embeddings=True, head_dim=32, rope_parameters=_LLAMA_3_ROPE, **_GROUPED
    ),
    "llama-dynamic-rope": lambda: hf.LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, **_GROUPED
    ),
    "llama-biases": lambda: hf.LlamaConfig(attention_bias=True, mlp_bias=True, **_GROUPED),
    "mistral": lambda: hf.MistralConfig(num_key_value_heads=1, sliding_window=None, **_BASE),
    # queries scaled by their position
    "ministral3": lambda: hf.Ministral3Config(
        head_dim=32, sliding_window=None, rope_parameters=_MINISTRAL_ROPE, **_GROUPED | {"initializer_range": 0.2}
    ),
    "qwen2": lambda: hf.Qwen2Config(tie_word_embeddings=True, **_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(head_dim=24, **_GROUPED),
    "gemma": lambda: hf.GemmaConfig(num_key_value_heads=1, head_dim=16, hidden_act="gelu_pytorch_tanh", **_BASE),
    "olmo": lambda: hf.OlmoConfig(clip_qkv=2.0, **_GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "glm4": lambda: hf.Glm4Config(head_dim=16, **_GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(no_rope_layers=[1, 0], **_GROUPED),
    "ernie-4.5": lambda: hf.Ernie4_5Config(head_dim=16, **_GROUPED),
    "apertus": lambda: hf.ApertusConfig(**_GROUPED),
    "seed-oss": lambda: hf.SeedOssConfig(head_dim=16, **_GROUPED),
    "hunyuan": lambda: hf.HunYuanDenseV1Config(head_dim=16, **_GROUPED),
    "nemotron": lambda: hf.NemotronConfig(**_GROUPED | {"initializer_range": 0.15}),
    # scaled embeddings, residuals, attention and logits
    "granite": lambda: hf.GraniteConfig(
        embedding_multiplier=2.0, residual_multiplier=0.7, attention_multiplier=0.2, logits_scaling=2.0, **_GROUPED
    ),
    # partial rotary and parallel blocks
    "gpt-neox": lambda: hf.GPTNeoXConfig(rotary_pct=0.25, **_BASE),
    "phi": lambda: hf.PhiConfig(partial_rotary_factor=0.5, qk_layernorm=True, **_GROUPED),
    "stablelm": lambda: hf.StableLmConfig(partial_rotary_factor=0.25, use_qkv_bias=True, **_GROUPED),
    "cohere": lambda: hf.CohereConfig(logit_scale=2.0, use_qk_norm=True, **_GROUPED),
    # learned positions
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "gpt2-scaled-by-layer": lambda: hf.GPT2Config(
        scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False, **_GPT2
    ),
    "gpt-bigcode": lambda: hf.GPTBigCodeConfig(multi_query=True, **_GPT2),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, init_std=0.3,
        max_position_embeddings=CONTEXT, word_embed_proj_dim=32, bos_token_id=0, eos_token_id=None, pad_token_id=None,
    ),
    "biogpt": lambda: hf.BioGptConfig(**_BASE),
    # learned positions that begin behind the index of the padding token, which no prompt of a test has
    "roberta": lambda: hf.RobertaConfig(is_decoder=True, type_vocab_size=1, **_BEHIND_PADDING),
    "xlm-roberta": lambda: hf.XLMRobertaConfig(is_decoder=True, type_vocab_size=1, **_BEHIND_PADDING),
    # a window in all layers
    "mistral-window": lambda: hf.MistralConfig(sliding_window=WINDOW, **_GROUPED),
    "starcoder2": lambda: hf.Starcoder2Config(sliding_window=WINDOW, **_GROUPED),
    "phi3": lambda: hf.Phi3Config(sliding_window=WINDOW, **_GROUPED),
    # layers with and without a window; soft-capped scores and logits
    "qwen2-window": lambda: hf.Qwen2Config(
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, **_GROUPED
    ),
    "gemma2": lambda: hf.Gemma2Config(attn_logit_softcapping=4.0, final_logit_softcapping=5.0, **_GEMMA),
    "gemma3": lambda: hf.Gemma3TextConfig(
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
        **_GEMMA,
    ),
    "cohere2": lambda: hf.Cohere2Config(logit_scale=2.0, sliding_window=WINDOW, layer_types=_MIXED[:2], **_GROUPED),
    "olmo3": lambda: hf.Olmo3Config(sliding_window=WINDOW, layer_types=_MIXED[:2], **_GROUPED),
    "exaone4": lambda: hf.Exaone4Config(sliding_window=WINDOW, layer_types=_MIXED[:2], **_GROUPED),
    # sinks; layers with and without a window, or without rotation
    "gpt-oss": lambda: hf.GptOssConfig(
        num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=WINDOW, layer_types=_MIXED,
        rope_parameters=_GPT_OSS_ROPE, **_GROUPED | {"num_hidden_layers": 3, "initializer_range": 0.2},
    ),
    "granite-swa": lambda: hf.GraniteSWAConfig(
        sliding_window=WINDOW, layer_types=_MIXED, attention_multiplier=0.1, **_GROUPED | {"num_hidden_layers": 3}
    ),
    "flint": lambda: hf.FlintConfig(
        head_dim=16, sliding_window=WINDOW, layer_types=_MIXED, mlp_only_layers=[0, 1],
        shared_expert_intermediate_size=48, **_EXPERTS, **_GROUPED | {"num_hidden_layers": 3},
    ),
    # latents; keys and values of the same and of different sizes, dense and with experts chosen by group
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48,
        first_k_dense_replace=1, q_lora_rank=None, **_LATENT,
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=24, rope_parameters=_DEEPSEEK_ROPE, **_LATENT,
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(q_lora_rank=24, **_LATENT | {"v_head_dim": 16}),
    "longcat-flash": lambda: hf.LongcatFlashConfig(  # attends twice in a layer
        n_routed_experts=4, zero_expert_num=2, moe_topk=2, expert_ffn_hidden_size=48, ffn_hidden_size=96, head_dim=8,
        num_layers=2, q_lora_rank=24,
        **{key: value for key, value in _LATENT.items() if key not in ("num_hidden_layers", "intermediate_size")},
    ),
    "youtu": lambda: hf.YoutuConfig(q_lora_rank=24, **_LATENT),
    "glm4-moe-lite": lambda: hf.Glm4MoeLiteConfig(
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=48, q_lora_rank=24,
        mlp_layer_types=["dense", "sparse"], **_LATENT,
    ),
    # mixtures of experts
    "mixtral": lambda: hf.MixtralConfig(
        sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **_GROUPED
    ),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(shared_expert_intermediate_size=48, **_EXPERTS, **_GROUPED),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(head_dim=16, mlp_only_layers=[0], **_EXPERTS, **_GROUPED),
    "olmoe": lambda: hf.OlmoeConfig(num_experts=4, num_experts_per_tok=2, **_GROUPED),
    "granite-moe": lambda: hf.GraniteMoeConfig(
        num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.25, **_GROUPED
    ),
    "dbrx": lambda: hf.DbrxConfig(
        d_model=64, n_heads=4, n_layers=2, max_seq_len=CONTEXT, vocab_size=VOCAB, initializer_range=0.3,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    ),
}  # fmt: skip

# One for each way in which the engine or a backend differs; these run the long tests.
REPRESENTATIVE = (
    "gpt2", "llama-3-rope-tied", "llama-dynamic-rope", "ministral3", "qwen3", "gemma", "mistral-window", "gemma2",
    "qwen3-moe", "gpt-oss", "deepseek-v3",
)  # fmt: skip
