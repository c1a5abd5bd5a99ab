"""Packed linear layers equal F.linear in fp64, whatever the shapes and threads, and replace what they can replace."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest
import torch
from tiny_models import make_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from kvcpu.layers import layer_call as c
from kvcpu.layers import layer_kernels as kernels
from kvcpu.layers.modules import Multiplier, PackedLinear, pack
from kvcpu.vector import compiled, conversion
from kvcpu.vector.compiled import CompiledEntry
from kvfleet.worker.model.fused.fuse import optimise

ROWS = (0, 1, 2, 3, 4, 7, 8, 9, 16, 63, 64, 65, 300)
# [out, in]: whole panels and parts of one, depths of one pair, between vectors, of one, two and three pieces
SHAPES = ((64, 32), (1, 2), (31, 18), (33, 50), (97, 1024), (65, 1026), (40, 2050))
DTYPES = (torch.float32, torch.bfloat16)
ACTS: dict[int, Callable[[Tensor], Tensor]] = {
    c.SILU: nn.functional.silu,
    c.TANH: lambda x: nn.functional.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module")
def multiplier() -> Multiplier:
    return Multiplier(1)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(hash((shape, seed)) % 2**31)).to(dtype)


def assert_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within what fp32 sums may lose, and one rounding to the layer's own dtype."""
    x, weight, bias = x.double(), weight.double(), None if bias is None else bias.double()
    wanted = nn.functional.linear(x, weight, bias)
    sizes = nn.functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    rounding = 2**-8 if found.dtype is torch.bfloat16 else 0.0
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= 1e-6 * sizes + rounding * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_the_product(shape: tuple[int, int], dtype: torch.dtype, multiplier: Multiplier) -> None:
    weight, bias = random(*shape, dtype=dtype), random(shape[0], dtype=dtype)
    plain, biased = PackedLinear(multiplier, weight, None), PackedLinear(multiplier, weight, bias)
    for rows in ROWS:
        x = random(rows, shape[1], dtype=dtype, seed=1)
        assert_product(plain(x), x, weight, None)
        assert_product(biased(x), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=lambda shape: "x".join(map(str, shape)))
def test_the_plain_weight_can_be_had_back(shape: tuple[int, int], dtype: torch.dtype, multiplier: Multiplier) -> None:
    weight = random(*shape, dtype=dtype)
    assert torch.equal(PackedLinear(multiplier, weight, None).weight, weight)
    assert torch.equal(PackedLinear(multiplier, weight.t().contiguous().t(), None).weight, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("act", ACTS, ids=["silu", "tanh"])
def test_activations_and_gates(act: int, dtype: torch.dtype, multiplier: Multiplier) -> None:
    """They are applied to the sums, before anything is rounded."""
    up, gate, bias = random(49, 34, dtype=dtype), random(49, 34, dtype=dtype, seed=5), random(49, dtype=dtype)
    gates = {c.SILU: c.SILU_GATE, c.TANH: c.TANH_GATE}
    layers = PackedLinear(multiplier, up, bias, act=act), PackedLinear(multiplier, up, None, gate, gates[act])
    for rows in (1, 5, 65, 300):
        x = random(rows, 34, dtype=dtype)
        wide = x.double()
        wanted = (
            ACTS[act](nn.functional.linear(wide, up.double(), bias.double())),
            ACTS[act](wide @ gate.double().t()) * (wide @ up.double().t()),
        )
        for layer, one in zip(layers, wanted, strict=True):
            rounding = 2**-8 if dtype is torch.bfloat16 else 0.0
            assert ((layer(x).double() - one).abs() <= 2e-5 + (rounding + 1e-6) * one.abs()).all()


def test_a_gated_layer_gives_back_the_weight_that_is_not_the_gate(multiplier: Multiplier) -> None:
    """Whoever looks at `up_proj.weight` of a fused MLP must not see panels of two matrices."""
    up, gate = random(64, 34), random(64, 34, seed=5)
    assert torch.equal(PackedLinear(multiplier, up, None, gate, c.SILU_GATE).weight, up)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_views_and_any_number_of_dimensions(dtype: torch.dtype, multiplier: Multiplier) -> None:
    weight = random(33, 50, dtype=dtype)
    layer = PackedLinear(multiplier, weight, None)
    wide = random(6, 4, 101, dtype=dtype)
    for x in (
        wide[..., 1:51],
        wide[..., ::2][..., :50],
        wide.transpose(0, 1)[..., :50],
        wide[0, 0, :50],
        wide[:, :0, :50],
        wide[:1, :1, :50].expand(3, 5, 50),
        wide[:, :, :50].contiguous()[None, None],
    ):
        assert_product(layer(x), x, weight, None)


def test_what_does_not_fit_is_refused(multiplier: Multiplier) -> None:
    layer = PackedLinear(multiplier, random(33, 50), None)
    for x in (random(3, 49), random(3, 52), random(3, 50).double(), random(3, 50).bfloat16(), random(50, 3)):
        with pytest.raises(ValueError, match="50"):
            layer(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    weight, gate, bias = random(330, 1030, dtype=dtype), random(330, 1030, dtype=dtype, seed=5), random(330)
    results: list[list[Tensor]] = []
    for threads in (1, 2, 3):
        multiplier = Multiplier(threads)
        layers = PackedLinear(multiplier, weight, bias), PackedLinear(multiplier, weight, None, gate, c.SILU_GATE)
        results.append([layer(random(rows, 1030, dtype=dtype)) for layer in layers for rows in (1, 5, 64, 65, 600)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_a_row_does_not_depend_on_its_company(multiplier: Multiplier) -> None:
    """Else a token's logits would hang on what else is in the batch."""
    for dtype in DTYPES:
        layer = PackedLinear(multiplier, random(70, 130, dtype=dtype), None)
        x = random(300, 130, dtype=dtype)
        whole = layer(x)
        for rows in (slice(0, 1), slice(3, 8), slice(7, 71), slice(299, 300)):
            assert torch.equal(layer(x[rows]), whole[rows])


@pytest.mark.parametrize("act", [c.PLAIN, c.SILU, c.TANH])
def test_what_is_no_number_stays_in_its_row(act: int, multiplier: Multiplier) -> None:
    for dtype in DTYPES:
        layer = PackedLinear(multiplier, random(33, 50, dtype=dtype), None, act=act)
        x = random(20, 50, dtype=dtype)
        clean = layer(x)
        x[3, 7], x[12, 0] = float("nan"), float("inf")
        spoilt = layer(x)
        assert spoilt[3].isnan().all()
        others = [row for row in range(20) if row not in (3, 12)]
        assert torch.equal(spoilt[others], clean[others])


def test_infinity_stays_infinite(multiplier: Multiplier) -> None:
    for dtype in DTYPES:
        weight, x = random(33, 50, dtype=dtype), random(9, 50, dtype=dtype)
        x[4, 7] = float("inf")
        wanted = torch.where(weight[:, 7] > 0, float("inf"), float("-inf"))
        assert torch.equal(PackedLinear(multiplier, weight, None)(x)[4].float(), wanted)


# ---------------------------------------------------------------------------------------------- without the instruction


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch, multiplier: Multiplier) -> Multiplier:
    """The kernels as they are compiled for a processor that does not multiply bfloat16 by itself."""
    monkeypatch.setattr(conversion, "multiplies_pairs", lambda: False)
    spec = importlib.util.spec_from_file_location("portable_linear_kernels", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setitem(sys.modules, fresh.__name__, fresh)
    other = Multiplier(1)
    made = compiled._compile(fresh.__name__, "multiply_share")
    other.entry = CompiledEntry(made.address, made)
    assert "vdpbf16ps" not in made._library.get_asm_str()
    return other


def test_bfloat16_without_the_instruction_for_it(portable: Multiplier, multiplier: Multiplier) -> None:
    for shape in SHAPES[1:]:
        weight, bias = random(*shape, dtype=torch.bfloat16), random(shape[0])
        layer, native = PackedLinear(portable, weight, bias), PackedLinear(multiplier, weight, bias)
        for rows in ROWS:
            x = random(rows, shape[1], dtype=torch.bfloat16)
            assert_product(layer(x), x, weight, bias)
            assert (layer(x).float() - native(x).float()).abs().le(0.01 * native(x).float().abs() + 1e-3).all()


# ---------------------------------------------------------------------------------------------- whole models


class Mixed(nn.Module):
    """What can be packed, and what cannot."""

    def __init__(self) -> None:
        super().__init__()

        class Special(nn.Linear):
            """Computes who knows what."""

        self.linear = nn.Linear(32, 48)
        self.inner = nn.Sequential(nn.Linear(32, 7, bias=False), nn.ReLU())
        self.transposed = Conv1D(24, 32)
        self.bfloat16_ = nn.Linear(32, 48, dtype=torch.bfloat16)
        self.odd = nn.Linear(33, 48)
        self.float16 = nn.Linear(32, 48, dtype=torch.float16)
        self.double = nn.Linear(32, 48, dtype=torch.float64)
        self.elsewhere = nn.Linear(32, 48, device="meta")
        self.special = Special(32, 48)
        self.embedding = nn.Embedding(48, 32)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_only_what_the_kernels_multiply_is_packed(multiplier: Multiplier) -> None:
    model = Mixed()
    model.empty = nn.Linear(32, 0)
    before = dict(model.named_modules())
    weights = {name: module.weight.detach().clone() for name, module in before.items() if hasattr(module, "weight")}
    with torch.inference_mode():
        wanted = model.transposed(random(5, 32))
        assert pack(model, multiplier) == 4
        assert (model.transposed(random(5, 32)) - wanted).abs().max() < 1e-6
    after = dict(model.named_modules())
    packed = {name for name, module in after.items() if isinstance(module, PackedLinear)}
    assert packed == {"linear", "inner.0", "transposed", "bfloat16_"}
    assert all(after[name] is before[name] for name in after if name not in packed)
    assert torch.equal(after["linear"].weight, weights["linear"])
    assert torch.equal(after["transposed"].weight, weights["transposed"].t())
    assert pack(model, multiplier) == 0, "packing again changes nothing"


@pytest.mark.parametrize("name", ["gpt2", "llama-3-rope-tied", "qwen2"])
def test_a_tied_head_leaves_the_embedding_alone(name: str) -> None:
    model = make_model(name).requires_grad_(False)
    embedding = model.get_input_embeddings()
    before = embedding.weight.clone()
    assert model.get_output_embeddings().weight is embedding.weight
    optimise(model, 1, lambda: None)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.get_input_embeddings() is embedding
    assert torch.equal(embedding.weight, before)
    assert torch.equal(model.get_output_embeddings().weight, before)
