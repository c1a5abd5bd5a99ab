"""The cpu attention where its own ways could go wrong: chunks, tiles, splits, threads, layouts, extreme numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvcpu.attention import plan
from kvcpu.attention.attention_call import DECODE_CHUNK
from kvcpu.attention.backend import SERIAL_TOKENS, CpuBackend
from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice

FORM = AttentionForm(0.2)
SINKS = 4 * torch.randn(128, generator=torch.Generator().manual_seed(0))  # for as many heads as a scene has
FORMS = {
    "all": FORM,
    "capped": AttentionForm(0.3, softcap=1.5),
    "window": AttentionForm(0.3, window=37),
    "capped-window": AttentionForm(0.3, window=21, softcap=1.5),
    "sinks": AttentionForm(0.3, sinks=SINKS),
    "sinks-window": AttentionForm(0.3, window=37, sinks=SINKS),
}
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXED = [(0, 13), (21, 9), (0, 1), (15, 1), (16, 1), (90, 1), (300, 1), (90, 20), (0, 70)]  # (start, tokens)
NOWHERE = 2**40  # a block of which no byte can be read

Part = tuple[int, int]


class Scene:
    """Sequences that have `start` cached tokens each and attend with some more; all numbers are random.

    The pool is NaN where nobody stored anything. What is expected follows from what the pool holds in the end, in fp64.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        block: int = 16,
        stored: str = "fp32",
        sharpness: float = 1.0,
        latent: int = 0,
    ) -> None:
        dtype = STORED[stored]
        chance = torch.Generator().manual_seed(hash((tuple(parts), heads, kv_heads, dim, block)) % 2**31)
        self.parts = list(parts)
        lengths = [-(-(start + count) // block) for start, count in parts]
        total = sum(lengths)
        order = (torch.randperm(total, generator=chance) + 1).tolist()  # block 0 belongs to nobody
        self.tables = [[order.pop() for _ in range(length)] for length in lengths]
        shape = KvShape(1, kv_heads, dim, dtype, stored == "int8", latent)
        self.pool = KvPool(shape, total + 1, block, torch.device("cpu"))
        if stored != "int8":
            self.pool.data.fill_(float("nan"))
        self.query, self.key, self.value = (
            torch.randn(sum(count for _, count in parts), count_of, dim, generator=chance).to(dtype)
            for count_of in (heads, kv_heads, kv_heads)
        )
        self.query = self.query * sharpness
        for (start, _), table in zip(parts, self.tables, strict=True):
            self.cache(table, torch.randn(2, start, kv_heads, dim, generator=chance).to(dtype))

    def cache(self, table: list[int], kv: Tensor) -> None:
        """Store K and V `[2, tokens, kv_heads, dim]` of a sequence's first tokens; of latents the first of both."""
        parts = self.pool.shape.parts
        kv = kv[:parts]
        size, (_, tokens, kv_heads, dim) = self.pool.block_size, kv.shape
        positions = torch.arange(tokens)
        blocks = torch.tensor(table)[positions // size]
        runs = (blocks * parts + torch.arange(parts)[:, None]) * kv_heads
        rows = (runs[..., None] + torch.arange(kv_heads)) * size + (positions % size)[None, :, None]
        self.pool.store(rows.reshape(-1), kv.reshape(-1, dim))

    def batch(self, tables: Sequence[Sequence[int]] | None = None) -> RaggedBatch:
        slices = [
            Slice([0] * count, start, table, None)
            for (start, count), table in zip(self.parts, tables or self.tables, strict=True)
        ]
        return RaggedBatch.of(slices, self.pool.block_size)

    def attend(self, form: AttentionForm = FORM, threads: int = 1) -> Tensor:
        step = CpuBackend(threads).prepare(self.batch(), self.pool)
        return step.attend(0, self.query, self.key, self.value, form)

    def expected(self, form: AttentionForm = FORM) -> Tensor:
        rows, first = [], 0
        for (start, count), table in zip(self.parts, self.tables, strict=True):
            end = start + count
            keys, values = (part.double().transpose(0, 1) for part in self.pool.read(table, end, 0))
            query = self.query[first : first + count].double().transpose(0, 1)
            group = len(query) // len(keys)
            scores = form.scaling * query @ keys.repeat_interleave(group, dim=0).transpose(1, 2)
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            own, seen = torch.arange(start, end)[:, None], torch.arange(end)
            hidden = (seen > own) | (seen <= own - (form.window or end + 1))
            scores = scores.masked_fill(hidden, -torch.inf)
            if form.sinks is not None:
                sinks = form.sinks[: len(query), None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sinks.double()], dim=-1)
            weights = scores.softmax(dim=-1)[..., :end]
            rows.append((weights @ values.repeat_interleave(group, dim=0)).transpose(0, 1))
            first += count
        return torch.cat(rows)

    def check(self, form: AttentionForm = FORM, threads: int = 1) -> Tensor:
        found = self.attend(form, threads)
        assert (found.double() - self.expected(form)).abs().max() < TOLERANCE[found.dtype]
        return found


# ---------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 128, 256])
def test_head_and_block_sizes(dim: int, stored: str) -> None:
    for block, form in zip((1, 5, 16, 32, 48, 16), FORMS.values(), strict=True):
        Scene(MIXED, dim=dim, block=block, stored=stored).check(replace(form, scaling=dim**-0.5))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("stored", STORED)
def test_forms_on_all_that_is_stored(stored: str, form: AttentionForm) -> None:
    """Blocks that rows of a tile cross, and those that they do not."""
    for block in (12, 16):
        Scene(MIXED, block=block, stored=stored).check(form)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (14, 2), (71, 1), (8, 8), (9, 3)])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_heads_that_share(stored: str, heads: int, kv_heads: int) -> None:
    for form in FORMS.values():
        Scene(MIXED, heads, kv_heads, stored=stored).check(form)


def test_the_control_would_notice_a_head_too_far() -> None:
    scene = Scene(MIXED, 4, 2)
    found = scene.attend()
    scene.query = scene.query.roll(1, dims=1)
    assert (found - scene.expected()).abs().max() > 0.1


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_strided_views(stored: str) -> None:
    """Parts of one product, heads first, and every second number."""
    scene = Scene(MIXED, stored=stored)
    wanted = scene.check()
    query, key, value = scene.query, scene.key, scene.value
    product = torch.cat([part.flatten(1) for part in (query, key, value)], dim=1)
    scene.query, scene.key, scene.value = (part.view(len(part), -1, 32) for part in product.split([128, 64, 64], dim=1))
    assert torch.equal(scene.attend(), wanted)
    scene.query, scene.key, scene.value = (
        part.transpose(0, 1).contiguous().transpose(0, 1) for part in (query, key, value)
    )
    assert torch.equal(scene.attend(), wanted)
    scene.value = torch.stack([value, value], dim=-1).flatten(-2)[..., ::2]
    assert scene.value.stride(-1) == 2
    assert torch.equal(scene.attend(), wanted)


# ---------------------------------------------------------------------------------------------- borders

BORDERS = [15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023]


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_borders_of_tiles_and_chunks(stored: str) -> None:
    decodes = [(length - 1, 1) for length in BORDERS]
    chunks = [(length - count, count) for length in BORDERS[:-1] for count in (2, 9, length)]
    for parts in (decodes, chunks, [(1023 - 66, 66)]):
        for heads, dim in ((2, 16), (3, 32)):
            Scene(parts, heads, 1, dim, stored=stored).check()


@pytest.mark.parametrize("stored", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 127, 128, 129, 255, 256, 257])
def test_borders_of_windows(window: int, stored: str) -> None:
    parts = [(length - 1, 1) for length in BORDERS] + [(200, 70), (0, 65)]
    for threads in (1, 8):
        Scene(parts, 3, 1, stored=stored).check(AttentionForm(0.3, window=window), threads)


def test_tokens_are_stored_where_the_table_says() -> None:
    """And nowhere else; by one thread, and by several."""
    for parts in ([(5, 1), (30, 9)], [(7, SERIAL_TOKENS + 40), (3, 1)]):
        for threads in (1, 3):
            scene = Scene(parts, block=8)
            before = scene.pool.data.clone()
            scene.attend(threads=threads)
            stored = [
                (scene.pool.read(table, start + count, 0), start)
                for (start, count), table in zip(parts, scene.tables, strict=True)
            ]
            keys, values = (torch.cat([kv[which][start:] for kv, start in stored]) for which in (0, 1))
            assert torch.equal(keys, scene.key)
            assert torch.equal(values, scene.value)
            changed = (scene.pool.data != before) & ~(scene.pool.data.isnan() & before.isnan())
            assert changed.sum() == keys.numel() + values.numel()


# ---------------------------------------------------------------------------------------------- threads and splits


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_any_number_of_threads(form: AttentionForm) -> None:
    one = Scene(MIXED, block=8).check(form)
    for threads in (2, 3, 8):
        other = Scene(MIXED, block=8).attend(form, threads)
        assert (one - other).abs().max() < 1e-5


def test_a_backend_serves_one_step_after_another() -> None:
    """Its scratch memory grows as it must, and keeps nothing."""
    backend = CpuBackend(2)
    scenes = [
        Scene([(0, 3)], 2, 1, 16),
        Scene(MIXED, 71, 1, 80),
        Scene([(2000, 1)], 2, 2, 64),
        Scene([(9, 1)], 2, 1, 16),
    ]
    for scene in [*scenes, *reversed(scenes)]:
        step = backend.prepare(scene.batch(), scene.pool)
        found = step.attend(0, scene.query, scene.key, scene.value, FORM)
        assert (found.double() - scene.expected()).abs().max() < 1e-5


SPLITS: dict[str, list[Part]] = {
    "one": [(700, 1)],
    "several": [(700, 1), (350, 1), (699, 1)],
    "beside-short-ones": [(3, 1), (700, 1), (14, 1), (500, 1), (20, 1)],
    "beside-a-prompt": [(700, 1), (0, 20), (600, 1)],
}


@pytest.mark.parametrize("parts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1)])
def test_splits(parts: list[Part], heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of any length, one token included, on all that is stored."""
    monkeypatch.setattr(plan, "SHORTEST_PART", 10**6)
    whole = Scene(parts, heads, kv_heads).check()
    for shortest, stored, threads in ((1, "fp32", 64), (23, "fp32", 8), (16, "bf16", 8), (100, "int8", 3)):
        monkeypatch.setattr(plan, "SHORTEST_PART", shortest)
        scene = Scene(parts, heads, kv_heads, stored=stored)
        items = plan.cut(scene.batch(), kv_heads, heads // kv_heads, threads, kv_heads)
        assert items.partials > len(items.splits) > 0
        found = attend_cut_for(scene, threads, monkeypatch)
        assert (found.double() - scene.expected()).abs().max() < TOLERANCE[found.dtype]
        if stored == "fp32":
            assert (found - whole).abs().max() < 1e-5


@pytest.mark.parametrize("widest", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stored", STORED)
def test_items_of_several_heads(stored: str, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are, or fewer; the last item may have fewer than the others; whole sequences and parts."""
    read = DECODE_CHUNK * (32 + 4 if stored == "int8" else 32 * STORED[stored].itemsize)
    monkeypatch.setattr("kvcpu.attention.backend.DECODE_BYTES", widest * read)
    for shortest, parts in ((64, [(700, 1), (0, 20), (90, 1)]), (10**6, [(700, 1)] * 5)):
        monkeypatch.setattr(plan, "SHORTEST_PART", shortest)
        for group in (1, 2, 9):
            scene = Scene(parts, 7 * group, 7, stored=stored)
            for form in FORMS.values():
                scene.check(form, 2 if shortest < 100 else 1)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("dim", "latent"), [(32, 16), (44, 24), (64, 40), (576, 512)])
def test_latents(dim: int, latent: int, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences and parts of them, with heads that divide among items or do not."""
    monkeypatch.setattr(plan, "SHORTEST_PART", 64)
    for heads, block, form in zip((1, 6, 16, 20, 128, 3), (1, 5, 16, 32, 16, 48), FORMS.values(), strict=True):
        scene = Scene(MIXED, heads, 1, dim, block, stored, latent=latent)
        assert scene.check(replace(form, scaling=form.scaling * (32 / dim) ** 0.5), 2).shape[2] == latent


def attend_cut_for(scene: Scene, threads: int, monkeypatch: pytest.MonkeyPatch, form: AttentionForm = FORM) -> Tensor:
    """On two threads, in as many pieces as `threads` would get."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvcpu.attention.backend.cut",
            lambda batch, kv_heads, group, _, widest: plan.cut(batch, kv_heads, group, threads, widest),
        )
        return scene.attend(form, threads=2)


@pytest.mark.parametrize("window", [1, 5, 16, 40, 250, 699])
def test_a_window_leaves_parts_empty(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that it does not reach, and those of which it begins in the middle."""
    monkeypatch.setattr(plan, "SHORTEST_PART", 50)
    for softcap, sinks in ((None, None), (2.0, None), (None, SINKS)):
        form = AttentionForm(0.3, window, softcap, sinks)
        for block in (5, 16, 32):
            scene = Scene([(700, 1), (3, 1), (477, 1)], 4, 2, block=block)
            found = attend_cut_for(scene, 16, monkeypatch, form)
            assert (found.double() - scene.expected(form)).abs().max() < 1e-5


@pytest.mark.parametrize("shortest", [50, 10**6], ids=["split", "whole"])
@pytest.mark.parametrize(("block", "stored"), [(5, "fp32"), (16, "fp32"), (32, "fp32"), (16, "bf16"), (32, "int8")])
def test_blocks_out_of_the_window_are_not_read(
    block: int, stored: str, shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their entries lead nowhere: reading one would end the process."""
    monkeypatch.setattr(plan, "SHORTEST_PART", shortest)
    for window in (1, 30, 64):
        form = AttentionForm(0.3, window=window)
        scene = Scene([(700, 1), (150, 20), (33, 1), (400, 70)], 6, 2, block=block, stored=stored)
        scene.attend(form)
        wanted = scene.expected(form)
        gone = [max(0, start + 1 - window) // block for start, _ in scene.parts]
        scene.tables = [[NOWHERE] * count + table[count:] for count, table in zip(gone, scene.tables, strict=True)]
        assert sum(gone) > 0
        found = attend_cut_for(scene, 16, monkeypatch, form)
        assert (found.double() - wanted).abs().max() < TOLERANCE[found.dtype]


@pytest.mark.parametrize("stored", ["fp32", "bf16", "fp16", "int8"])
def test_tokens_out_of_the_window_count_for_nothing(stored: str) -> None:
    """Even if they are no numbers, in a block that others in reach share."""
    for window in (1, 30, 64):
        form = AttentionForm(0.3, window=window)
        scene = Scene([(700, 1), (150, 20), (33, 1), (400, 70)], 6, 2, stored=stored)
        scene.attend(form)
        wanted = scene.expected(form)
        for (start, _), table in zip(scene.parts, scene.tables, strict=True):
            low = max(0, start + 1 - window)
            scene.cache(table, torch.full((2, low, 2, 32), float("nan"), dtype=scene.key.dtype))
        found = scene.attend(form)
        assert (found.double() - wanted).abs().max() < TOLERANCE[found.dtype]


def test_bfloat16_without_the_instruction_for_pairs() -> None:
    """Errs no more; where the processor has none, both are the same."""
    for form in FORMS.values():
        scene = Scene(MIXED, 6, 2, stored="bf16")
        backend = CpuBackend(1)
        backend.pairs = False
        step = backend.prepare(scene.batch(), scene.pool)
        found = step.attend(0, scene.query, scene.key, scene.value, form)
        wanted = scene.expected(form)
        error = (found.double() - wanted).abs()
        assert error.max() < TOLERANCE[torch.bfloat16]
        assert error.mean() <= 1.05 * (scene.attend(form).double() - wanted).abs().mean()


# ---------------------------------------------------------------------------------------------- extreme numbers


@pytest.mark.parametrize("stored", ["fp32", "bf16", "int8"])
def test_scores_of_ten_thousand_do_not_overflow(stored: str) -> None:
    scene = Scene([(600, 1), (40, 70), (0, 1)], stored=stored, sharpness=3000.0)
    found = scene.attend()
    assert found.isfinite().all()
    assert (found.double() - scene.expected()).abs().max() < 2e-2


def test_one_huge_score_takes_all() -> None:
    """Wherever it stands: what was summed before it must vanish, and what follows must not count."""
    for position in (0, 15, 300, 599):
        scene = Scene([(600, 1)], 1, 1)
        table = scene.tables[0]
        keys, values = scene.pool.read(table, 600, 0)
        keys[position] = 1e4 * scene.query[0, 0]
        scene.cache(table, torch.stack([keys, values]))
        assert torch.equal(scene.attend()[0], values[position])


def test_equal_scores_give_the_mean() -> None:
    scene = Scene([(600, 1), (0, 80)])
    scene.query.zero_()
    found = scene.check()
    keys_and_values = scene.pool.read(scene.tables[0], 601, 0)
    mean = keys_and_values[1].double().mean(dim=0).repeat_interleave(2, dim=0)
    assert (found[0].double() - mean).abs().max() < 1e-6
    assert torch.equal(found[1], scene.value[1].repeat_interleave(2, dim=0)), "one token alone gives itself"


def test_very_negative_scores_are_scores() -> None:
    """Softmax knows differences alone."""
    scene = Scene([(300, 1), (0, 80)], 1, 1)
    scene.query = scene.query.abs() * 1000
    scene.key = -scene.key.abs() * 10
    scene.cache(scene.tables[0], -torch.rand(2, 300, 1, 32) * 10)
    found = scene.attend()
    assert found.isfinite().all()
    assert (found.double() - scene.expected()).abs().max() < 2e-2


@pytest.mark.parametrize("parts", [[(600, 1)], [(600, 9)]], ids=["decode", "prefill"])
def test_one_nan_makes_its_sequence_nan(parts: list[Part]) -> None:
    for position in (0, 300, 599):
        scene = Scene([*parts, (50, 1)], 2, 1)
        keys, values = scene.pool.read(scene.tables[0], 600, 0)
        keys[position] = float("nan")
        scene.cache(scene.tables[0], torch.stack([keys, values]))
        found = scene.attend()
        assert found[:-1].isnan().all()
        assert found[-1].isfinite().all()


@pytest.mark.parametrize("parts", [[(600, 1)], [(600, 9)]], ids=["decode", "prefill"])
def test_many_nan_do_too(parts: list[Part], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHORTEST_PART", 10**6)
    scene = Scene(parts, 2, 1)
    keys, values = scene.pool.read(scene.tables[0], 600, 0)
    keys[:256] = float("nan")
    scene.cache(scene.tables[0], torch.stack([keys, values]))
    assert scene.attend().isnan().all()
