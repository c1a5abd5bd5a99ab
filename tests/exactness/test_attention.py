"""Every attention backend computes its forms as the formula says, and reads nothing that is out of reach."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import DEVICE
from torch import Tensor

from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice

BLOCK, HEAD_DIM = 8, 24
# (start, tokens): first and later chunks, decodes of very different and of nearly the same length, on block borders
PARTS = [(0, 13), (21, 9), (0, 1), (15, 1), (16, 1), (90, 1), (92, 1), (200, 1), (90, 20), (0, 70)]
# For up to six heads: one that counts for nothing, one for as much as a token, one for far more than all of them.
SINKS = torch.tensor([-80.0, 0.0, 3.5, 40.0, 1.0, 6.0], device=DEVICE)
FORMS = {
    "all": AttentionForm(0.3),
    "capped": AttentionForm(0.3, softcap=1.5),
    "window": AttentionForm(0.3, window=17),
    "window-of-a-block": AttentionForm(0.3, window=BLOCK),
    "window-of-one": AttentionForm(0.3, window=1),
    "window-longer-than-all": AttentionForm(0.3, window=5000),
    "capped-window": AttentionForm(0.3, window=11, softcap=1.5),
    "sinks": AttentionForm(0.3, sinks=SINKS),
    "sinks-window": AttentionForm(0.3, window=11, sinks=SINKS),
    "sinks-capped": AttentionForm(0.3, softcap=1.5, sinks=SINKS),
}


class Scene:
    """Sequences with random Q, K and V, and a pool that holds what they cached.

    All that a window of `reach` tokens cannot see is NaN in the pool, and out of the block tables where a whole block
    of it is. `latent`: values are so many numbers of the keys.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        layers: int = 1,
        reach: int | None = None,
        latent: int = 0,
    ) -> None:
        chance = torch.Generator().manual_seed(heads * kv_heads)
        self.layers = layers
        self.query = [torch.randn(count, heads, HEAD_DIM, generator=chance).to(dtype) for _, count in PARTS]
        shapes = [(layers, start + count, kv_heads, HEAD_DIM) for start, count in PARTS]
        self.keys, self.values = (
            [torch.randn(shape, generator=chance).to(dtype) for shape in shapes] for _ in range(2)
        )
        if latent:
            self.values = [keys[..., :latent] for keys in self.keys]
        tables: list[list[int]] = []
        taken = 1  # block 0 belongs to nobody, so that reading it by mistake shows
        for start, count in PARTS:
            low = 0 if reach is None else max(0, start + 1 - reach)
            blocks = -(-(start + count) // BLOCK)
            gone = low // BLOCK
            tables.append([-1] * gone + [taken + at for at in range(blocks - gone)])
            taken += blocks - gone
        shape = KvShape(layers, kv_heads, HEAD_DIM, dtype, latent=latent)
        self.pool = KvPool(shape, taken + 1, BLOCK, torch.device(DEVICE))
        self.pool.data.fill_(float("nan"))
        for (start, _), table, keys, values in zip(PARTS, tables, self.keys, self.values, strict=True):
            for position in range(0 if reach is None else max(0, start + 1 - reach), start):
                slot = self.pool.data[table[position // BLOCK], :, :, :, position % BLOCK]
                parts = [keys[:, position]] if latent else [keys[:, position], values[:, position]]
                slot.copy_(torch.stack(parts, dim=1))
        self.batch = RaggedBatch.of(
            [Slice([0] * count, start, table, None) for (start, count), table in zip(PARTS, tables, strict=True)], BLOCK
        )

    def attend(self, backend: AttentionBackend, forms: list[AttentionForm]) -> list[Tensor]:
        """What the backend computes in one step, by layer `[T, heads, head_dim]`."""
        step = backend.prepare(self.batch, self.pool)
        outputs = []
        for layer, form in enumerate(forms):
            new = [
                torch.cat([tensor[layer, start:] for (start, _), tensor in zip(PARTS, tensors, strict=True)])
                for tensors in (self.keys, self.values)
            ]
            query, key, value = (strided(tensor) for tensor in (torch.cat(self.query), *new))
            if form.sinks is not None:
                form = dataclasses.replace(form, sinks=form.sinks[: query.shape[1]])
            outputs.append(step.attend(layer, query, key, value, form).cpu())
        return outputs

    def expected(self, layer: int, form: AttentionForm) -> Tensor:
        """By the formula, token by token in fp64."""
        rows = []
        for (start, count), query, keys, values in zip(PARTS, self.query, self.keys, self.values, strict=True):
            group = query.shape[1] // keys.shape[2]
            for at in range(count):
                end = start + at + 1
                low = 0 if form.window is None else max(0, end - form.window)
                seen, weighed = (
                    tensor[layer, low:end].double().repeat_interleave(group, dim=1) for tensor in (keys, values)
                )
                scores = form.scaling * torch.einsum("hd,thd->ht", query[at].double(), seen)
                if form.softcap is not None:
                    scores = form.softcap * torch.tanh(scores / form.softcap)
                if form.sinks is not None:
                    scores = torch.cat([scores, form.sinks[: len(scores), None].cpu().double()], dim=1)
                rows.append(torch.einsum("ht,thd->hd", scores.softmax(dim=-1)[:, : len(weighed)], weighed))
        return torch.stack(rows)


def strided(tensor: Tensor) -> Tensor:
    """As attention receives it: a view of `[heads, T, head_dim]`."""
    return tensor.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.double() - theirs).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 3e-2}[ours.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)], ids=["multi-head", "grouped", "multi-query"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_formula(
    form: AttentionForm, heads: int, kv_heads: int, dtype: torch.dtype, formula_backend: AttentionBackend
) -> None:
    scene = Scene(heads, kv_heads, dtype, reach=form.window)
    (output,) = scene.attend(formula_backend, [form])
    assert_close(output, scene.expected(0, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("latent", [16, 20, 24])
@pytest.mark.parametrize("name", ["all", "window", "sinks-window", "sinks-capped"])
def test_values_may_be_a_part_of_the_keys(
    name: str, latent: int, dtype: torch.dtype, formula_backend: AttentionBackend
) -> None:
    form = FORMS[name]
    scene = Scene(6, 1, dtype, layers=2, reach=form.window, latent=latent)
    for layer, output in enumerate(scene.attend(formula_backend, [form, form])):
        assert output.shape[2] == latent
        assert_close(output, scene.expected(layer, form))


def test_layers_of_several_forms_share_a_step(formula_backend: AttentionBackend) -> None:
    names = ("window", "sinks", "all", "sinks-window", "capped-window", "capped", "sinks-capped", "window-of-one")
    forms = [FORMS[name] for name in names]
    scene = Scene(4, 2, torch.float32, layers=len(forms))
    for layer, output in enumerate(scene.attend(formula_backend, forms)):
        assert_close(output, scene.expected(layer, forms[layer]))


def test_windowed_layers_may_lose_what_the_longest_window_cannot_reach(formula_backend: AttentionBackend) -> None:
    forms = [FORMS["window"], FORMS["window-of-one"], FORMS["capped-window"]]
    scene = Scene(4, 2, torch.float32, layers=len(forms), reach=17)
    for layer, output in enumerate(scene.attend(formula_backend, forms)):
        assert_close(output, scene.expected(layer, forms[layer]))


@pytest.mark.parametrize("form", [FORMS["window"], FORMS["capped-window"]], ids=["window", "capped-window"])
def test_control_a_window_off_by_one_is_noticed(form: AttentionForm, formula_backend: AttentionBackend) -> None:
    assert form.window is not None
    scene = Scene(4, 2, torch.float32)
    for window in (form.window - 1, form.window + 1):
        (output,) = scene.attend(formula_backend, [dataclasses.replace(form, window=window)])
        assert (output.double() - scene.expected(0, form)).abs().max() > 1e-2
