"""KV kept as int8: the same bytes from every backend, small errors, about the fourth or half of the memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import Rig, make_model, plain_logits
from tokenizers import Tokenizer
from torch import Tensor

from kvcpu.attention.backend import CpuBackend
from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.model.kv_size import KvLayout
from kvfleet.worker.model.loader import adopt_model, load_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import OutOfMemory

CPU = torch.device("cpu")
BLOCK = 8
DTYPES = (torch.float32, torch.bfloat16)


def pool_of(dtype: torch.dtype = torch.float32, head_dim: int = 24, layers: int = 2, blocks: int = 9) -> KvPool:
    return KvPool(KvShape(layers, 2, head_dim, dtype, quantized=True), blocks, BLOCK, CPU)


def store(backend: AttentionBackend, pool: KvPool, key: Tensor, value: Tensor, table: list[int], layer: int) -> None:
    """Let the backend attend with K and V `[T, kv_heads, head_dim]`: what is stored is what counts here."""
    batch = RaggedBatch.of([Slice([0] * len(key), 0, table, None)], pool.block_size)
    backend.prepare(batch, pool).attend(layer, key, key, value, AttentionForm(0.1))


def rows(dtype: torch.dtype, tokens: int = 30, head_dim: int = 24) -> Tensor:
    """K and V of very different sizes; among them zeros, ties between two levels, and one number that is largest."""
    chance = torch.Generator().manual_seed(head_dim)
    kv = torch.randn(2, tokens, 2, head_dim, generator=chance)
    kv *= 10.0 ** torch.randint(-6, 6, (2, tokens, 2, 1), generator=chance)
    kv[:, 3] = 0
    kv[:, 4, :, 1:] = 0
    kv[:, 5] = torch.arange(head_dim) + 0.5
    kv[:, 5, :, 0] = 127
    kv[:, 6] = -kv[:, 5]
    kv[:, 7] = 1
    return kv.to(dtype)


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 81 * 4])
def test_all_backends_write_the_same_bytes(head_dim: int, dtype: torch.dtype) -> None:
    kv = rows(dtype, head_dim=head_dim)
    pools = [pool_of(dtype, head_dim) for _ in range(3)]
    for backend, pool in zip((ReferenceBackend(), CpuBackend(1), CpuBackend(3)), pools, strict=True):
        for layer in range(2):
            store(backend, pool, *(kv + layer), [5, 2, 7, 1], layer)
    assert pools[0].data.any()
    assert torch.equal(pools[0].data, pools[1].data)
    assert torch.equal(pools[0].data, pools[2].data)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_reading_gives_numbers_within_half_a_level(dtype: torch.dtype, backend: AttentionBackend) -> None:
    kv, pool = rows(dtype), pool_of(dtype)
    store(backend, pool, kv[0], kv[1], [5, 2, 7, 1], 1)
    for found, wanted in zip(pool.read([5, 2, 7, 1], 30, 1), kv, strict=True):
        assert found.dtype is dtype
        assert found.shape == wanted.shape
        largest = wanted.float().abs().amax(dim=-1, keepdim=True)
        rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
        assert ((found.float() - wanted.float()).abs() <= largest * (0.5 / 127 + rounding)).all()
        assert (found[3] == 0).all()
        assert torch.equal(found[7].float(), torch.ones(2, 24))
    assert not pool.read([5, 2, 7, 1], 30, 0)[0].any(), "another layer"
    assert not pool.data[[0, 3, 4, 6, 8]].any(), "other blocks"


def test_levels_are_rounded_to_nearest_and_ties_to_even(backend: AttentionBackend) -> None:
    kv, pool = rows(torch.float32), pool_of()
    store(backend, pool, kv[0], kv[1], [5, 2, 7, 1], 0)
    found = pool.read([5], 7, 0)[0]
    wanted = (torch.arange(24) + 0.5).round()
    wanted[0] = 127
    assert torch.equal(found[5, 0], wanted)
    assert torch.equal(found[6, 0], -wanted)


def test_one_token_at_a_time_is_stored_as_many_are(backend: AttentionBackend) -> None:
    kv = rows(torch.float32)
    whole, single = pool_of(), pool_of()
    store(backend, whole, kv[0], kv[1], [5, 2, 7, 1], 0)
    for at in range(30):
        batch = RaggedBatch.of([Slice([0], at, [5, 2, 7, 1], None)], BLOCK)
        backend.prepare(batch, single).attend(0, *(part[at : at + 1] for part in (kv[0], *kv)), AttentionForm(0.1))
    assert torch.equal(whole.data, single.data)


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (ReferenceBackend, "nan"),
        (ReferenceBackend, "inf"),
        (CpuBackend, "nan"),
        (CpuBackend, "inf"),
    ],
)
def test_what_is_no_number_is_read_as_none(make: Callable[[], AttentionBackend], bad: str) -> None:
    """Of that token and head alone; int8 has none, but the scale does."""
    kv, pool, backend = rows(torch.float32), pool_of(), make()
    kv[0, 9, 1, 3] = float(bad)
    kv[1, 10, 0, 4] = float(bad)
    store(backend, pool, kv[0], kv[1], [5, 2, 7, 1], 0)
    keys, values = pool.read([5, 2, 7, 1], 30, 0)
    assert not keys[9, 1].isfinite().any()
    assert not values[10, 0].isfinite().any()
    assert keys.isfinite().sum() == values.isfinite().sum() == keys.numel() - 24


def test_copies_of_blocks_are_whole() -> None:
    pool = pool_of()
    store(ReferenceBackend(), pool, *rows(torch.float32), [5, 2, 7, 1], 1)
    before = pool.data.clone()
    pool.copy([(5, 0), (2, 3), (3, 5), (7, 7)])
    for target, source in ((0, 5), (3, 2), (5, 2), (7, 7), (2, 2), (1, 1)):
        assert torch.equal(pool.data[target], before[source])
    assert not pool.data[[4, 6, 8]].any()


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_takes_about_the_fourth_of_fp32_and_half_of_bf16(head_dim: int) -> None:
    for dtype, least in ((torch.float32, 3.7), (torch.bfloat16, 1.85)):
        shape = KvShape(2, 2, head_dim, dtype)
        small = replace(shape, quantized=True)
        assert shape.bytes_per_block(16) >= least * small.bytes_per_block(16)
        pool = KvPool(small, 3, 16, CPU)
        assert pool.data.nbytes == 3 * small.bytes_per_block(16)
        assert pool.data[0].is_contiguous()
        layout = KvLayout(2, 2, head_dim, 100)
        assert layout.bytes_per_block(16, "int8") == small.bytes_per_block(16)


def test_a_pool_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OutOfMemory, match="KV pool"):
        pool_of(blocks=2**50)


# ---------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mistral-window", "granite-swa", "youtu"])
def test_errors_are_small_and_the_same_in_all_backends(name: str, make_rig: Callable[..., Rig]) -> None:
    """With chunks, reuse and decodes. The pools hold what each backend computed, which differs in the last bits."""
    chance = random.Random(1)
    model = make_model(name)
    ids = [chance.randrange(VOCAB) for _ in range(90)]
    rig = make_rig(model, quantized=True, budget=37)
    turn = rig.add("r", ids, 6, ignore_eos=True)
    rig.run()
    rig.add("again", turn.ids, 2)
    rig.run()
    assert rig.turns["again"].cached > 80
    spread = plain_logits(model, ids).std().item()
    worst = rig.differences()
    assert 1e-5 * spread < min(worst.values())
    assert max(worst.values()) < 0.5 * spread


def test_backends_agree_on_quantised_logits() -> None:
    ids = list(range(60))
    found = []
    for backend in (ReferenceBackend(), CpuBackend(1)):
        rig = Rig(make_model("llama"), backend=backend, quantized=True)
        rig.add("r", ids, 1)
        rig.run()
        found.append(torch.stack([rig.logits["r"][at] for at in range(60)]))
    assert (found[0] - found[1]).abs().max() < 0.05 * found[0].std(), "a number beside a tie may fall to either side"
    assert (found[0] - found[1]).abs().median() < 1e-3 * found[0].std()


PROMPTS = ("Good morrow, my lord.", "What news from the war?", "Speak of love.", "Who goes there?", "Is the king dead?")


@pytest.fixture(scope="module")
def said() -> tuple[Any, list[list[int]], list[Tensor]]:
    """The demo model, what it says to some prompts, and its logits after each token of that."""
    model = load_model(DEMO_FOLDER, dtype="float32", device="cpu").model
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    rig = Rig(model, backend=CpuBackend(1), blocks=256)
    for prompt in PROMPTS:
        rig.add(prompt, tokenizer.encode(f"<|user|>{prompt}<|end|><|assistant|>").ids, 80, ignore_eos=True)
    rig.run()
    turns = list(rig.turns.values())
    return model, [turn.ids for turn in turns], [plain_logits(model, turn.ids) for turn in turns]


def test_the_demo_model_chooses_the_same_tokens(
    said: tuple[Any, list[list[int]], list[Tensor]], backend: AttentionBackend
) -> None:
    """Teacher-forced: a single difference does not make the rest of a text different."""
    model, texts, exact = said
    model.set_attn_implementation("sdpa")
    loaded = adopt_model(model)
    runner = TorchRunner(replace(loaded, kv_shape=replace(loaded.kv_shape, quantized=True)), backend, 64, 16)
    same = count = 0
    errors = []
    for ids, wanted in zip(texts, exact, strict=True):
        batch = RaggedBatch.of([Slice(ids, 0, range(-(-len(ids) // 16)), None)], 16)
        with torch.inference_mode():
            logits = runner.logits(batch, np.arange(len(ids)))
        same += int((logits.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
        errors.append((logits - wanted).abs().max().item())
        count += len(ids)
    assert count > 400
    assert same >= 0.95 * count
    assert min(errors) > 1e-3, "was it quantised?"
