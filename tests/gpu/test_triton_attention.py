"""The Triton kernels give what the reference gives. Interpreted: small shapes. `tests/exactness` has the formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention.backend import TritonBackend
from kvgpu.attention.plan import SHORTEST_PART, HeadTiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
ALONE = [(3 * SHORTEST_PART + 7, 1)]
LONG = [*ALONE, (40, 1), (0, 1), (2 * SHORTEST_PART - 1, 1)]
MIXED = [(0, 40), (2 * SHORTEST_PART, 9), (300, 1), (17, 1)]


class Scene:
    """Sequences of `parts` (start, tokens), their blocks in no order, and all that they have cached."""

    def __init__(
        self,
        parts: list[tuple[int, int]],
        dtype: torch.dtype = torch.float32,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        quantized: bool = False,
        latent: int = 0,
    ) -> None:
        self.chance = torch.Generator().manual_seed(head_dim)
        lengths = [-(-(start + count) // block_size) for start, count in parts]
        taken = np.random.default_rng(1).permutation(sum(lengths)).tolist()
        slices = []
        for (start, count), length in zip(parts, lengths, strict=True):
            slices.append(Slice([0] * count, start, [taken.pop() for _ in range(length)], None))
        self.batch = RaggedBatch.of(slices, block_size)
        shape = KvShape(2, kv_heads, head_dim, dtype, quantized, latent)
        self.pool = KvPool(shape, sum(lengths), block_size, DEVICE)
        rows = self.draw(sum(lengths) * 2 * shape.parts * kv_heads * block_size, head_dim, dtype=dtype)
        self.pool.store(torch.arange(len(rows), device=DEVICE), rows)
        tokens = sum(count for _, count in parts)
        self.query = self.draw(tokens, heads, head_dim, dtype=dtype)
        self.key, self.value = (self.draw(tokens, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        if latent:
            self.value = self.key[..., :latent]

    def draw(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.chance).to(DEVICE, dtype)

    def attend(self, backend: AttentionBackend, form: AttentionForm) -> tuple[Tensor, Tensor]:
        """In the second layer, and the pool's bytes then. The pool is as before."""
        kept = self.pool.data.clone()
        out = backend.prepare(self.batch, self.pool).attend(1, self.query, self.key, self.value, form)
        written = self.pool.data.clone()
        self.pool.data.copy_(kept)
        return out.float(), written


def compare(scene: Scene, form: AttentionForm) -> None:
    ours, our_bytes = scene.attend(TritonBackend(DEVICE), form)
    theirs, their_bytes = scene.attend(ReferenceBackend(), form)
    assert torch.equal(our_bytes.view(torch.int8), their_bytes.view(torch.int8))
    assert (ours - theirs).abs().max() <= CLOSE[scene.query.dtype] * max(1.0, float(theirs.abs().max()))


FORM = AttentionForm(0.2)


@pytest.mark.parametrize("parts", [ALONE, LONG, MIXED], ids=["alone", "long", "mixed"])
@pytest.mark.parametrize(
    "form",
    [
        FORM,
        AttentionForm(0.2, window=SHORTEST_PART + 3),
        AttentionForm(0.2, softcap=2.0),
        AttentionForm(0.2, 20, 2.0),
        AttentionForm(0.2, sinks=torch.tensor([-80.0, 0.0, 5.0, 40.0], device=DEVICE)),
        AttentionForm(0.2, 20, sinks=torch.tensor([-80.0, 0.0, 5.0, 40.0], device=DEVICE)),
    ],
    ids=["all", "window", "capped", "short-window", "sinks", "sinks-short-window"],
)
def test_long_sequences_in_parts(parts: list[tuple[int, int]], form: AttentionForm) -> None:
    compare(Scene(parts), form)


@pytest.mark.parametrize("dtype", CLOSE, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("quantized", [False, True], ids=["own", "int8"])
@pytest.mark.parametrize("parts", [LONG, MIXED], ids=["long", "mixed"])
def test_numbers(parts: list[tuple[int, int]], quantized: bool, dtype: torch.dtype) -> None:
    compare(Scene(parts, dtype, quantized=quantized), FORM)


@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (3, 3), (40, 2)], ids=["group-7", "each", "group-20"])
def test_sizes(heads: int, kv_heads: int, head_dim: int) -> None:
    compare(Scene([(30, 1), (9, 3)], heads=heads, kv_heads=kv_heads, head_dim=head_dim), FORM)


@pytest.mark.parametrize("parts", [LONG, MIXED], ids=["long", "mixed"])
@pytest.mark.parametrize(
    "form",
    [FORM, AttentionForm(0.2, 20, 2.0, torch.linspace(-4, 4, 12, device=DEVICE))],
    ids=["all", "all-at-once"],
)
@pytest.mark.parametrize("quantized", [False, True], ids=["own", "int8"])
def test_latents(parts: list[tuple[int, int]], form: AttentionForm, quantized: bool) -> None:
    compare(Scene(parts, heads=12, kv_heads=1, head_dim=44, latent=24, quantized=quantized), form)


@pytest.mark.parametrize("dtype", CLOSE, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("heads", "head_dim", "latent"), [(128, 192, 128), (6, 576, 512), (40, 576, 512)])
def test_many_heads_share_latents_in_several_tiles(heads: int, head_dim: int, latent: int, dtype: torch.dtype) -> None:
    by = HeadTiles.of(KvShape(1, 1, head_dim, dtype, latent=latent), heads)
    assert by.count * by.group == heads
    assert by.count == {128: 1, 6: 1, 40: 2}[heads]
    scene = Scene([(9, 3), (SHORTEST_PART + 40, 1)], dtype, heads=heads, kv_heads=1, head_dim=head_dim, latent=latent)
    compare(scene, AttentionForm(0.05, sinks=torch.linspace(-4, 4, heads, device=DEVICE)))


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
def test_blocks(block_size: int) -> None:
    compare(Scene([(70, 1), (0, 65)], block_size=block_size), FORM)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_what_is_no_number_is_read_as_none(bad: str) -> None:
    """Of that token and head alone; int8 has none, but the scale does."""
    scene = Scene([(0, 5)], quantized=True)
    scene.key[4, 1, 3] = float(bad)
    out, _ = scene.attend(TritonBackend(DEVICE), FORM)
    assert not out[4, 2:].isfinite().all()
    assert out[4, :2].isfinite().all()
    assert out[:4].isfinite().all()
