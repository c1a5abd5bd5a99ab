"""A loaded model becomes the runner that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TOLERANCE, make_model

from kvcpu.attention.backend import CpuBackend
from kvcpu.blocks import AttentionForm, KvShape
from kvcpu.layers.modules import FusedMlp, FusedNorm, PackedLinear
from kvfleet.worker.model.assembly import build_runner, with_kv_dtype
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import LoadedModel, adopt_model
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention.backend import TritonBackend, TritonStep
from kvproto.errors import InvalidRequest, OutOfMemory, UnsupportedModel

OURS = (PackedLinear, FusedMlp, FusedNorm)


@pytest.fixture
def loaded() -> LoadedModel:
    return adopt_model(make_model("llama"))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def ours(model: Any) -> set[type]:
    return {type(module) for module in model.modules()} & set(OURS)


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("attention", ["auto", "cpu"])
def test_on_a_cpu_everything_is_made_fast(attention: Any, loaded: LoadedModel) -> None:
    runner = build_runner(loaded, 7, 8, attention)
    assert isinstance(runner._backend, CpuBackend)
    assert runner._backend.threads == 2
    assert ours(loaded.model) == set(OURS)
    assert (runner.num_blocks, runner.block_size, runner.num_layers) == (7, 8, 2)
    assert runner.bytes_per_block == runner.pool.data[0].nbytes


def test_reference_leaves_the_model_as_it_was(loaded: LoadedModel) -> None:
    before = dict(loaded.model.named_modules())
    runner = build_runner(loaded, 7, 8, "reference")
    assert isinstance(runner._backend, ReferenceBackend)
    assert dict(loaded.model.named_modules()) == before
    assert not ours(loaded.model)


def test_the_cpu_attention_is_refused_for_a_model_elsewhere(loaded: LoadedModel) -> None:
    with pytest.raises(InvalidRequest, match="cuda") as refused:
        build_runner(replace(loaded, device=torch.device("cuda")), 7, 8, "cpu")
    assert refused.value.field == "attention"
    assert not ours(loaded.model)


def test_the_triton_attention_is_tried_and_leaves_the_model_as_it_was(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(loaded.model.named_modules())
    runner = build_runner(loaded, 7, 8, "triton")
    assert isinstance(runner._backend, TritonBackend)
    assert dict(loaded.model.named_modules()) == before
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(InvalidRequest, match="triton attention cannot run on cpu") as refused:
        build_runner(loaded, 7, 8, "triton")
    assert refused.value.field == "attention"


def test_one_that_computes_something_else_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TritonStep.attend

    def wrong(step: TritonStep, layer: int, query: Any, key: Any, value: Any, form: AttentionForm) -> Any:
        window = form.window + 1 if form.window is not None else None
        return attend(step, layer, query, key, value, replace(form, window=window))

    monkeypatch.setattr(TritonStep, "attend", wrong)
    with pytest.raises(UnsupportedModel, match=r"attention over a window differs by .* on cpu"):
        build_runner(loaded, 7, 8, "triton")


@pytest.mark.parametrize("name", ["llama", "granite-swa"])
def test_sinks_are_tried_where_the_model_has_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TritonStep.attend

    def without(step: TritonStep, layer: int, query: Any, key: Any, value: Any, form: AttentionForm) -> Any:
        return attend(step, layer, query, key, value, replace(form, sinks=None))

    monkeypatch.setattr(TritonStep, "attend", without)
    loaded = adopt_model(make_model(name))
    assert loaded.sinks == (name == "granite-swa")
    if not loaded.sinks:
        build_runner(loaded, 7, 8, "triton")
        return
    with pytest.raises(UnsupportedModel, match=r"attention over all tokens and sinks differs by .* on cpu"):
        build_runner(loaded, 7, 8, "triton")


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_every_attention_serves_sinks_and_latents(name: str) -> None:
    batch = RaggedBatch.of([Slice(list(range(20)), 0, range(3), None), Slice([7] * 9, 0, range(3, 5), None)], 8)
    rows = np.arange(len(batch.ids))
    runners = [build_runner(adopt_model(make_model(name)), 7, 8, one) for one in ("reference", "cpu", "triton")]
    with torch.inference_mode():
        wanted, *found = (runner.logits(batch, rows) for runner in runners)
    assert [runner._backend.name for runner in runners] == ["reference", "cpu", "triton"]
    for logits in found:
        assert (logits - wanted).abs().max() < TOLERANCE


def test_a_pool_that_does_not_fit_is_said_so(loaded: LoadedModel) -> None:
    with pytest.raises(OutOfMemory, match="KV pool"):
        build_runner(loaded, 2**50, 8)


def test_kv_is_kept_as_asked(loaded: LoadedModel) -> None:
    assert with_kv_dtype(loaded, "auto", 16) is loaded
    small = with_kv_dtype(loaded, "int8", 16)
    assert small.kv_shape == replace(loaded.kv_shape, quantized=True)
    assert small.model is loaded.model
    runner = build_runner(small, 7, 16)
    assert runner.pool.data.dtype is torch.int8
    assert runner.bytes_per_block == small.kv_shape.bytes_per_block(16) < loaded.kv_shape.bytes_per_block(16)


@pytest.mark.parametrize(("head_dim", "block_size", "fits"), [(6, 1, False), (6, 2, True), (5, 3, False), (5, 8, True)])
def test_int8_is_refused_where_scales_would_not_be_aligned(
    head_dim: int, block_size: int, fits: bool, loaded: LoadedModel
) -> None:
    odd = replace(loaded, kv_shape=KvShape(2, 2, head_dim, torch.float32))
    assert with_kv_dtype(odd, "auto", block_size) is odd
    if fits:
        assert with_kv_dtype(odd, "int8", block_size).kv_shape.quantized
        return
    with pytest.raises(UnsupportedModel, match=f"head_dim of {head_dim} and blocks of {block_size}") as refused:
        with_kv_dtype(odd, "int8", block_size)
    assert refused.value.field == "kv_dtype"
