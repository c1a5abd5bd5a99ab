"""What is fused in a model, and what is left alone: only the same is replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from kvcpu.layers.modules import FusedMlp, FusedNorm, Multiplier, PackedLinear
from kvfleet.worker.model.fused.fuse import fuse, optimise

DTYPES = (torch.float32, torch.bfloat16)


def nothing() -> None:
    """No call of the model: whole layers are `test_fused_layers`' matter."""


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    return Multiplier(1)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


# ---------------------------------------------------------------------------------------------- impostors


class Norm(nn.Module):
    """RMS norm, or something under its name."""

    def __init__(self, change: Callable[[Tensor], Tensor], size: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        wide = self.change(x.float())
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(x.dtype)


class Mlp(nn.Module):
    """A gated MLP, or something under its name."""

    def __init__(self, act: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias=bias), nn.Linear(64, 96, bias=bias)
        self.down_proj = nn.Linear(96, 64)
        self.act_fn = act
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Plain(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 96), nn.Linear(96, 64)
        self.act, self.change = act, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.fc2(self.act(self.fc1(x))))


def same(x: Tensor) -> Tensor:
    return x


def tanh_gelu(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


silu = nn.functional.silu

GENUINE: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: Norm(same),
    "mlp": lambda: Mlp(silu, same),
    "tanh": lambda: Mlp(tanh_gelu, same),
    "plain": lambda: Plain(tanh_gelu, same),
}


class Renamed(LlamaRMSNorm):
    """Adds half of the epsilon that it has."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        return self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-2)


class TwoArguments(Mlp):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class Tuple(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x), None  # type: ignore[return-value]


class Clamped(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=16)
        out: Tensor = self.down_proj(gate * self.up_proj(x).clamp(-16, 16))
        return out


class Doubling(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


IMPOSTORS: dict[str, Callable[[], nn.Module]] = {
    "norm-half-centred": lambda: Norm(lambda x: x - x.mean(-1, keepdim=True) / 2),
    "norm-clipped": lambda: Norm(lambda x: x.clamp(-1, 1)),
    "norm-over-tokens": lambda: Norm(lambda x: x.cumsum(1)),
    "norm-of-another-epsilon": lambda: Renamed(64),
    "norm-of-24": lambda: Norm(same, 24),
    "mlp-plus-a-hundredth": lambda: Mlp(silu, lambda x: x + 1e-2),
    "mlp-mixing-tokens": lambda: Mlp(silu, lambda x: x.flip(1)),
    "mlp-clamped": lambda: Clamped(LlamaConfig(hidden_size=64, intermediate_size=96)),
    "mlp-doubled": lambda: Doubling(LlamaConfig(hidden_size=64, intermediate_size=96)),
    "mlp-of-erf-gelu": lambda: Mlp(nn.functional.gelu, same),
    "mlp-of-relu": lambda: Mlp(nn.functional.relu, same),
    "mlp-with-gate-biases": lambda: Mlp(silu, same, bias=True),
    "mlp-of-two-arguments": lambda: TwoArguments(silu, same),
    "mlp-returning-a-tuple": lambda: Tuple(silu, same),
    "plain-of-erf-gelu": lambda: Plain(nn.functional.gelu, same),
    "plain-with-a-residual": lambda: Plain(tanh_gelu, lambda x: 1.001 * x),
}


@pytest.mark.parametrize("kind", GENUINE)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_control_what_is_the_same_is_replaced(kind: str, dtype: torch.dtype, multiplier: Multiplier) -> None:
    model = nn.Sequential(GENUINE[kind]().to(dtype))
    assert sum(fuse(model, multiplier, nothing).values()) == 1
    assert isinstance(model[0], FusedNorm | FusedMlp)


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_impostors_keep_their_code(kind: str, multiplier: Multiplier) -> None:
    module = IMPOSTORS[kind]()
    model = nn.Sequential(module)
    assert sum(fuse(model, multiplier, nothing).values()) == 0
    assert model[0] is module


@pytest.mark.parametrize("kind", ["mlp-plus-a-hundredth", "plain-with-a-residual"])
def test_impostors_in_bfloat16_keep_their_code(kind: str, multiplier: Multiplier) -> None:
    model = nn.Sequential(IMPOSTORS[kind]().bfloat16())
    assert sum(fuse(model, multiplier, nothing).values()) == 0


def test_a_norm_that_ignores_its_epsilon_keeps_its_code(multiplier: Multiplier) -> None:
    class Own(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.weight * hidden_states / hidden_states.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-3)

    model = nn.Sequential(Own(64, eps=1e-6))
    assert sum(fuse(model, multiplier, nothing).values()) == 0


def test_half_precision_is_left_alone(multiplier: Multiplier) -> None:
    model = nn.Sequential(*(make().half() for make in GENUINE.values()), nn.LayerNorm(64, elementwise_affine=False))
    assert sum(fuse(model, multiplier, nothing).values()) == 0


def test_a_trial_leaves_the_random_numbers_as_they_were(multiplier: Multiplier) -> None:
    model = nn.Sequential(GENUINE["mlp"]())
    torch.manual_seed(9)
    wanted = torch.randn(3)
    torch.manual_seed(9)
    assert fuse(model, multiplier, nothing)["mlps"] == 1
    assert torch.equal(torch.randn(3), wanted)


# ---------------------------------------------------------------------------------------------- rotary embeddings


def attention() -> Any:
    return LlamaAttention(LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1), layer_idx=0)


def test_another_attention_of_the_same_class_keeps_its_function(
    multiplier: Multiplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the module that both take it from."""
    theirs = modeling_llama.apply_rotary_pos_emb
    ours, other = attention(), attention()
    assert fuse(nn.Sequential(ours), multiplier, nothing)["rotary"] == 1
    assert modeling_llama.apply_rotary_pos_emb is theirs
    assert "forward" in vars(ours)
    assert "forward" not in vars(other)
    calls: list[int] = []

    def spy(*arguments: Any) -> Any:
        calls.append(1)
        return theirs(*arguments)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", spy)
    x, angles = torch.randn(1, 5, 128), torch.randn(1, 5, 64)
    angles = torch.cat([angles[..., :32]] * 2, dim=-1)
    for one, wanted in ((ours, []), (other, [1])):
        one.config._attn_implementation = "sdpa"
        one(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        assert calls == wanted


@pytest.mark.parametrize("change", ["interleaved", "scaled", "swapped", "more-arguments"])
def test_another_rotation_under_the_name_is_left_alone(
    change: str, multiplier: Multiplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = modeling_llama.apply_rotary_pos_emb

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            paired = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
            return x * cos[:, None] + paired * sin[:, None]

        return turn(q), turn(k)

    others: dict[str, Any] = {
        "interleaved": interleaved,
        "scaled": lambda q, k, cos, sin: tuple(1.01 * x for x in theirs(q, k, cos, sin)),
        "swapped": lambda q, k, cos, sin: theirs(q, k, sin, cos),
        "more-arguments": lambda q, k, v, cos, sin: (*theirs(q, k, cos, sin), v),
    }
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", others[change])
    assert fuse(nn.Sequential(attention()), multiplier, nothing)["rotary"] == 0


# ---------------------------------------------------------------------------------------------- whole models

VOCAB, TOKENS = 97, 12
_WIDE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 64, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
_SHARED = _WIDE | {"num_key_value_heads": 1}
# Heads of 64, as large as most models': only those are long enough for rotations to be fused.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, int]]] = {
    "llama": (lambda: hf.LlamaConfig(**_SHARED), {"norms": 5, "mlps": 2, "rotary": 2}),
    "qwen3": (lambda: hf.Qwen3Config(head_dim=64, **_SHARED), {"norms": 9, "mlps": 2, "rotary": 2}),
    "gemma2": (
        lambda: hf.Gemma2Config(head_dim=64, sliding_window=8, **_SHARED),
        {"norms": 9, "mlps": 2, "rotary": 2},
    ),
    "gemma3": (
        lambda: hf.Gemma3TextConfig(head_dim=64, sliding_window=8, **_SHARED),
        {"norms": 13, "mlps": 2, "rotary": 2},
    ),
    "granite": (lambda: hf.GraniteConfig(**_SHARED), {"norms": 5, "mlps": 2, "rotary": 2}),
    "gpt2": (
        lambda: hf.GPT2Config(vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2),
        {"norms": 5, "mlps": 2, "rotary": 0},
    ),
    # rotation in fp32 whatever the model computes in
    "olmo": (lambda: hf.OlmoConfig(**_SHARED), {"mlps": 2}),
    "olmo2": (lambda: hf.Olmo2Config(**_SHARED), {"norms": 9, "mlps": 2}),
    "olmo3": (lambda: hf.Olmo3Config(sliding_window=8, **_SHARED), {"norms": 9, "mlps": 2}),
    # rotation of a part of each head, within the function or outside of it
    "phi": (lambda: hf.PhiConfig(partial_rotary_factor=0.5, **_SHARED), {"norms": 3, "mlps": 2}),
    "phi3": (lambda: hf.Phi3Config(partial_rotary_factor=0.5, **_SHARED), {"norms": 5}),
    "stablelm": (lambda: hf.StableLmConfig(partial_rotary_factor=0.25, **_SHARED), {"norms": 5, "mlps": 2}),
    "nemotron": (lambda: hf.NemotronConfig(partial_rotary_factor=0.5, **_SHARED), {}),
    "gpt-neox": (lambda: hf.GPTNeoXConfig(rotary_pct=0.25, **_WIDE), {"norms": 5}),
    # interleaved rotation
    "glm": (lambda: hf.GlmConfig(head_dim=64, **_SHARED), {"norms": 5, "rotary": 0}),
    "glm4": (lambda: hf.Glm4Config(head_dim=64, **_SHARED), {"norms": 9, "rotary": 0}),
    "cohere": (lambda: hf.CohereConfig(**_SHARED), {"norms": 3, "mlps": 2, "rotary": 0}),
    "ernie-4.5": (lambda: hf.Ernie4_5Config(head_dim=64, **_SHARED), {"norms": 5, "mlps": 2, "rotary": 0}),
    "gptj": (
        lambda: hf.GPTJConfig(
            vocab_size=VOCAB, n_embd=128, n_layer=2, n_head=2, n_positions=64, rotary_dim=32, initializer_range=0.2
        ),
        {"norms": 3, "mlps": 2, "rotary": 0},
    ),
}  # fmt: skip
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}") for name in FAMILIES for dtype in DTYPES
]


def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids, use_cache=False).logits
    return found.double()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_model_computes_the_same_as_before(name: str, dtype: torch.dtype, multiplier: Multiplier) -> None:
    """In bfloat16: it errs no more than it did."""
    config, wanted = FAMILIES[name][0](), FAMILIES[name][1]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    ids = torch.randint(VOCAB, (1, TOKENS))
    before, oracle = logits(model, ids), logits(copy.deepcopy(model).double(), ids)
    done = fuse(model, multiplier, nothing)
    assert done | wanted == done
    optimise(model, 1, nothing)
    assert not any(type(module) is nn.Linear for module in model.modules())
    after = logits(model, ids)
    if dtype is torch.float32:
        assert (after - before).abs().max() < 1e-4 * before.abs().max()
    else:
        assert (after - oracle).abs().mean() <= 1.2 * (before - oracle).abs().mean()


def test_a_second_optimisation_changes_nothing(multiplier: Multiplier) -> None:
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"][0]()).eval().requires_grad_(False)
    optimise(model, 1, nothing)
    modules = dict(model.named_modules())
    assert any(isinstance(module, PackedLinear) for module in modules.values())
    optimise(model, 1, nothing)
    assert dict(model.named_modules()) == modules
