"""Norms, MLPs and rotary embeddings as one call: equal to the modules they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GPT2Config, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from kvcpu.layers.modules import SERIAL_NUMBERS, FusedMlp, FusedNorm, Multiplier, Rotary
from kvfleet.worker.model.fused.fuse import fuse

DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rms": lambda size: LlamaRMSNorm(size, eps=1e-5),
    "gemma": lambda size: GemmaRMSNorm(size, eps=1e-6),
    "layer": lambda size: nn.LayerNorm(size, eps=1e-3),
    "layer-without-bias": lambda size: nn.LayerNorm(size, bias=False),
}


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    return Multiplier(1)


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def fused(module: nn.Module, multiplier: Multiplier) -> nn.Module:
    """What `fuse` puts in the place of a module; perhaps itself."""
    model = nn.ModuleDict({"it": module})
    fuse(model, multiplier, lambda: None)
    return model["it"]


def norm_of(kind: str, size: int, dtype: torch.dtype) -> nn.Module:
    norm = NORMS[kind](size)
    for parameter in norm.parameters():
        parameter.copy_(torch.randn(size))
    return norm.to(dtype)


def normed(kind: str, norm: nn.Module, x: Tensor) -> Tensor:
    """By the formula, in fp64."""
    x, weight, bias = x.double(), norm.weight.double(), getattr(norm, "bias", None)
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    if kind.startswith("layer"):
        x = x - x.mean(dim=-1, keepdim=True)
    x = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return x * (weight + 1 if kind == "gemma" else weight) + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [16, 48, 640])
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind: str, size: int, dtype: torch.dtype, multiplier: Multiplier) -> None:
    norm = norm_of(kind, size, dtype)
    ours = fused(norm, multiplier)
    assert isinstance(ours, FusedNorm)
    wide = torch.randn(4, 9, size + 3).to(dtype)
    views = (wide[..., :size], wide.transpose(0, 1)[..., 1 : size + 1], wide[0, 0, :size], wide[:0, :, :size])
    for x in (*views, *(scale * (wide[..., :size] + 0.5) for scale in (1e-4, 300.0))):
        found, wanted = ours(x), normed(kind, norm, x)
        assert found.dtype is dtype
        assert found.shape == x.shape
        assert ((found.double() - wanted).abs() <= ROUNDING[dtype] * wanted.abs() + 1e-5 * (1 + wanted.abs())).all()


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_by_several_threads(kind: str) -> None:
    norm = norm_of(kind, 64, torch.float32)
    x = torch.randn(SERIAL_NUMBERS // 64 + 77, 64)
    one, three = (fused(norm, Multiplier(threads))(x) for threads in (1, 3))
    assert torch.equal(one, three)
    assert (one - normed(kind, norm, x)).abs().max() < 2e-5


def test_nan_spoils_one_row(multiplier: Multiplier) -> None:
    ours = fused(norm_of("layer", 64, torch.float32), multiplier)
    x = torch.randn(5, 64)
    clean = ours(x)
    x[2, 7] = float("nan")
    spoilt = ours(x)
    assert spoilt[2].isnan().all()
    assert torch.equal(spoilt[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_the_argument_is_left_as_it_was(multiplier: Multiplier) -> None:
    ours, x = fused(norm_of("rms", 64, torch.float32), multiplier), torch.randn(5, 64)
    before = x.clone()
    ours(x)
    assert torch.equal(x, before)


# ---------------------------------------------------------------------------------------------- MLPs

MLPS: dict[str, Callable[[], nn.Module]] = {
    "silu-gated": lambda: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=106)),
    "tanh-gated": lambda: GemmaMLP(GemmaConfig(hidden_size=64, intermediate_size=106, hidden_act="gelu_pytorch_tanh")),
    "tanh": lambda: GPT2MLP(106, GPT2Config(n_embd=64, activation_function="gelu_new")),
    "silu": lambda: GPT2MLP(106, GPT2Config(n_embd=64, activation_function="silu")),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", MLPS)
def test_mlps(kind: str, dtype: torch.dtype, multiplier: Multiplier) -> None:
    """In bfloat16 nearer to fp64 than the module, which rounds more often."""
    module = MLPS[kind]().eval()
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 4)
    module = module.to(dtype)
    x = torch.randn(3, 25, 64).to(dtype)
    theirs = module(x)
    wanted = module.double()(x.double())
    ours = fused(module.to(dtype), multiplier)
    assert isinstance(ours, FusedMlp)
    found = ours(x)
    assert found.dtype is dtype
    error = (found.double() - wanted).abs().mean()
    if dtype is torch.float32:
        assert (found.double() - wanted).abs().max() < 1e-5 * wanted.abs().max()
    else:
        assert error <= 1.1 * (theirs.double() - wanted).abs().mean()


# ---------------------------------------------------------------------------------------------- rotary embeddings


def rotation(tokens: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Halves that differ, so that a mix-up shows."""
    angles = torch.randn(1, tokens, size)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [32, 64, 128, 160])
def test_rotary_embeddings(size: int, dtype: torch.dtype) -> None:
    rotary = Rotary(1)
    for tokens, heads, kv_heads in ((1, 1, 1), (7, 6, 2), (40, 4, 1)):
        query, key = (torch.randn(1, tokens, count, size).to(dtype).transpose(1, 2) for count in (heads, kv_heads))
        cosines, sines = rotation(tokens, size, dtype)
        wanted = apply_rotary_pos_emb(query.double(), key.double(), cosines.double(), sines.double())
        found = rotary(query, key, cosines, sines)
        for ours, one in zip(found, wanted, strict=True):
            assert ((ours.double() - one).abs() <= ROUNDING[dtype] * (one.abs() + 1e-1)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_rotation_is_in_place_and_of_nothing_else(dtype: torch.dtype) -> None:
    """Query, key and value as parts of one product, heads side by side; cosines as a strided view."""
    size, heads, kv_heads, tokens = 32, 3, 2, 9
    product = torch.randn(1, tokens, (heads + 2 * kv_heads) * size + 5).to(dtype)
    before = product.clone()
    query, key = (
        product[..., first * size : (first + count) * size].view(1, tokens, count, size).transpose(1, 2)
        for first, count in ((0, heads), (heads, kv_heads))
    )
    cosines, sines = (part.transpose(1, 2) for part in rotation(size, tokens, dtype))
    wanted = apply_rotary_pos_emb(query, key, cosines, sines)
    found = Rotary(1)(query, key, cosines, sines)
    assert found[0] is query
    assert found[1] is key
    for ours, one in zip(found, wanted, strict=True):
        assert (ours - one).abs().max() <= 2 * ROUNDING[dtype] * one.abs().max()
    turned = (heads + kv_heads) * size
    assert torch.equal(product[..., turned:], before[..., turned:])
    assert not torch.equal(product[..., :turned], before[..., :turned])


def test_a_rotation_by_several_threads() -> None:
    tokens = SERIAL_NUMBERS // (6 * 64) + 33
    query, key = torch.randn(1, 4, tokens, 64), torch.randn(1, 2, tokens, 64)
    cosines, sines = rotation(tokens, 64, torch.float32)
    one, three = (Rotary(threads)(query.clone(), key.clone(), cosines, sines) for threads in (1, 3))
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])
    assert (one[0] - apply_rotary_pos_emb(query, key, cosines, sines)[0]).abs().max() < 1e-5


def test_one_rotary_serves_heads_of_several_sizes() -> None:
    rotary = Rotary(1)
    for size in (32, 128, 64):
        query, key = torch.randn(1, 4, 5, size), torch.randn(1, 2, 5, size)
        cosines, sines = rotation(5, size, torch.float32)
        wanted = apply_rotary_pos_emb(query, key, cosines, sines)
        assert (rotary(query, key, cosines, sines)[0] - wanted[0]).abs().max() < 1e-5
