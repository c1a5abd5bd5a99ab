"""What FlashInfer is told of a step gives what the reference gives, by a stand-in that computes from it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcpu.blocks import AttentionForm
from kvfleet.worker.model.assembly import build_runner, with_kv_dtype
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import LoadedModel, adopt_model
from kvfleet.worker.schedule.step_plan import Slice
from kvgpu.attention import flashinfer_backend
from kvgpu.attention.flashinfer_backend import FlashInferBackend, PageTables
from kvproto.errors import InvalidRequest, UnsupportedModel
from tests.gpu.test_triton_attention import CLOSE, Scene
from tests.support import flashinfer_double

CPU = torch.device("cpu")
FORM = AttentionForm(0.2)
FORMS = [FORM, AttentionForm(0.2, window=33), AttentionForm(0.2, softcap=2.0), AttentionForm(0.1, 1, 3.0)]
RAGGED = [(0, 40), (48, 16), (130, 9), (31, 1), (32, 1), (0, 1), (0, 16)]
DECODES = [(0, 1), (15, 1), (16, 1), (200, 1)]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_double.package())
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr("tests.gpu.test_triton_attention.DEVICE", CPU)


@pytest.fixture
def loaded() -> Iterator[LoadedModel]:
    config = LlamaConfig(
        vocab_size=160, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=64,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        yield adopt_model(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16))


def compare(scene: Scene, form: AttentionForm, backend: FlashInferBackend) -> None:
    ours, our_bytes = scene.attend(backend, form)
    theirs, their_bytes = scene.attend(ReferenceBackend(), form)
    assert torch.equal(our_bytes.view(torch.int8), their_bytes.view(torch.int8))
    assert (ours - theirs).abs().max() <= CLOSE[scene.query.dtype] * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("parts", [RAGGED, DECODES, [(70, 5)]], ids=["ragged", "decodes", "alone"])
@pytest.mark.parametrize("form", FORMS, ids=["all", "window", "capped", "itself"])
def test_any_step_and_form(parts: list[tuple[int, int]], form: AttentionForm) -> None:
    compare(Scene(parts), form, FlashInferBackend(CPU))


@pytest.mark.parametrize("dtype", CLOSE, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(7, 1, 1), (3, 3, 8), (40, 2, 24)])
def test_numbers_and_sizes(dtype: torch.dtype, heads: int, kv_heads: int, block_size: int) -> None:
    scene = Scene(RAGGED, dtype, heads=heads, kv_heads=kv_heads, head_dim=64, block_size=block_size)
    compare(scene, FORMS[1], FlashInferBackend(CPU))


def test_a_plan_of_one_step_and_form_is_not_anothers() -> None:
    backend = FlashInferBackend(CPU)
    for parts in (RAGGED, DECODES, RAGGED):
        for form in FORMS:
            compare(Scene(parts), form, backend)


def test_layers_of_two_forms_take_turns_and_each_form_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = flashinfer_double.BatchPrefillWithPagedKVCacheWrapper.plan

    def counted(wrapper: Any, *asked: Any, **named: Any) -> None:
        planned.append(named["window_left"])
        plan(wrapper, *asked, **named)

    monkeypatch.setattr(flashinfer_double.BatchPrefillWithPagedKVCacheWrapper, "plan", counted)
    scene = Scene(RAGGED)
    step, reference = (one.prepare(scene.batch, scene.pool) for one in (FlashInferBackend(CPU), ReferenceBackend()))
    for layer, form in ((0, FORMS[0]), (1, FORMS[1]), (0, FORMS[0]), (1, FORMS[1])):
        ours = step.attend(layer, scene.query, scene.key, scene.value, form)
        assert torch.allclose(ours, reference.attend(layer, scene.query, scene.key, scene.value, form), atol=1e-5)
    assert planned == [-1, 32]


@pytest.mark.parametrize("window", [1, 16, 17, 33, 500])
def test_pages_before_a_window_may_be_gone(window: int) -> None:
    scene, form = Scene(RAGGED), AttentionForm(0.2, window)
    theirs, _ = scene.attend(ReferenceBackend(), form)
    tables = scene.batch.tables.copy()
    for offset, start in zip(scene.batch.offsets, scene.batch.starts, strict=True):
        tables[offset : offset + max(0, start + 1 - window) // 16] = -1
    assert (tables < 0).any() == (window < 100)
    scene.batch = replace(scene.batch, tables=tables)
    ours, _ = scene.attend(FlashInferBackend(CPU), form)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_tables_of_a_step() -> None:
    slices = [Slice([0] * 5, 14, [7, 3], None), Slice([0], 32, [9, 8, 2], None)]
    tables = PageTables.of(RaggedBatch.of(slices, 16), 16, None)
    assert [part.tolist() for part in tables.on_host(pinned=False)] == [[0, 5, 6], [0, 2, 5], [7, 3, 9, 8, 2], [3, 1]]
    assert PageTables.of(RaggedBatch.of(slices, 16), 16, 17).pages.tolist() == [7, 3, 8, 2]


def test_a_model_is_served_by_it_once_it_is_tried(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner(loaded, 40, 16, "flashinfer")
    assert isinstance(runner._backend, FlashInferBackend)
    other = build_runner(loaded, 40, 16, "reference")
    first, then = [Slice(list(range(20)), 0, [3, 1], None)], [Slice([5], 20, [3, 1], None), Slice([6, 7], 0, [9], None)]
    for slices in (first, then):
        batch = RaggedBatch.of(slices, 16)
        rows = np.arange(len(batch.ids))
        with torch.inference_mode():
            ours, theirs = (one.logits(batch, rows).float() for one in (runner, other))
        assert (ours - theirs).abs().max() <= 0.1 * theirs.std()
    plan = flashinfer_double.BatchPrefillWithPagedKVCacheWrapper.plan

    def wider(wrapper: Any, *asked: Any, window_left: int, **named: Any) -> None:
        plan(wrapper, *asked, window_left=window_left + (window_left > 0), **named)

    monkeypatch.setattr(flashinfer_double.BatchPrefillWithPagedKVCacheWrapper, "plan", wider)
    with pytest.raises(UnsupportedModel, match="attention over a window differs by"):
        build_runner(loaded, 40, 16, "flashinfer")


def test_what_it_has_no_kernels_for_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "int8 KV": with_kv_dtype(loaded, "int8", 16),
        "float32": replace(loaded, kv_shape=replace(loaded.kv_shape, dtype=torch.float32)),
        "no latents": replace(loaded, kv_shape=replace(loaded.kv_shape, latent=8)),
        "no attention sinks": replace(loaded, sinks=True),
        "heads of 80 numbers": replace(loaded, kv_shape=replace(loaded.kv_shape, head_dim=80)),
    }
    for why, model in cases.items():
        with pytest.raises(InvalidRequest, match=why) as refused:
            build_runner(model, 40, 16, "flashinfer")
        assert refused.value.field == "attention"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InvalidRequest, match="flashinfer attention cannot run on cpu"):
        build_runner(loaded, 40, 16, "flashinfer")


def test_where_it_is_not_installed_the_refusal_says_how_to(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(InvalidRequest, match="pip install flashinfer-python"):
        build_runner(loaded, 40, 16, "flashinfer")


def test_the_stand_in_has_the_real_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed package, or of one unpacked at FLASHINFER_SOURCE."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    spec = importlib.util.find_spec("flashinfer")
    source = os.environ.get("FLASHINFER_SOURCE") or (spec and spec.origin and str(Path(spec.origin).parent))
    if not source:
        pytest.skip("FlashInfer is not installed")
    name = flashinfer_double.BatchPrefillWithPagedKVCacheWrapper.__name__
    body = ast.parse(Path(source, "prefill.py").read_text()).body
    real = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    for method in ("__init__", "plan", "run"):
        function = [node for node in real.body if isinstance(node, ast.FunctionDef) and node.name == method][-1]
        ours = inspect.signature(getattr(flashinfer_double.BatchPrefillWithPagedKVCacheWrapper, method)).parameters
        named = [one for one, made in ours.items() if made.kind is not made.VAR_POSITIONAL]
        theirs = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)]
        # What FlashInfer added since is behind these, or by name.
        assert [one for one in theirs if one in named] == named, method
        positional = [one for one, made in ours.items() if made.kind is made.POSITIONAL_OR_KEYWORD]
        assert [one.arg for one in function.args.args][: len(positional)] == positional, method
