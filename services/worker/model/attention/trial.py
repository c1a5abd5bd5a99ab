"""Tries a backend against the reference, on the device and in the numbers of a model, before it serves that model."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvcpu.blocks import AttentionForm, KvShape
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice

# (start, tokens): chunks, and decodes of which one is long enough to be cut. The second batch has decodes alone.
BATCHES = ([(0, 70), (33, 20), (700, 1), (17, 1)], [(700, 1), (17, 1), (0, 1)])
WINDOW = 50
EXACT, ROUNDED = 1e-4, 3e-2  # differences, as shares of the largest number: of fp32, of numbers with fewer bits


def forms_of(softcap: float | None, sinks: int, device: torch.device) -> dict[str, AttentionForm]:
    """What to try, by what an error calls it. `sinks`: how many heads have one."""
    forms = {"all tokens": AttentionForm(0.1), "a window": AttentionForm(0.1, WINDOW)}
    if softcap:
        forms["soft-capped scores"] = AttentionForm(0.1, softcap=softcap)
    if sinks:
        each = torch.linspace(-2, 4, sinks, device=device)
        forms["all tokens and sinks"] = AttentionForm(0.1, sinks=each)
        forms["a window and sinks"] = AttentionForm(0.1, WINDOW, sinks=each)
    return forms


def differs(
    backend: AttentionBackend,
    shape: KvShape,
    heads: int,
    block_size: int,
    device: torch.device,
    forms: dict[str, AttentionForm],
) -> str:
    """What the backend computes otherwise, or ""."""
    most = ROUNDED if shape.quantized or shape.dtype is not torch.float32 else EXACT
    one_layer = replace(shape, layers=1)
    for parts in BATCHES:
        for told, form in forms.items():
            theirs, ours = (_attended(one, one_layer, heads, block_size, device, parts, form)
                            for one in (ReferenceBackend(), backend))  # fmt: skip
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
            if not difference <= most:  # NaN is no less
                return f"attention over {told} differs by {difference:.2g}"
    return ""


def _attended(
    backend: AttentionBackend,
    shape: KvShape,
    heads: int,
    block_size: int,
    device: torch.device,
    parts: list[tuple[int, int]],
    form: AttentionForm,
) -> Tensor:
    """The same random numbers for every backend."""
    chance = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=chance).to(device, shape.dtype)

    lengths = [-(-(start + count) // block_size) for start, count in parts]
    pool = KvPool(shape, sum(lengths), block_size, device)
    rows = draw(shape.parts * shape.kv_heads * sum(lengths) * block_size, shape.head_dim)
    pool.store(torch.arange(len(rows), device=device), rows)
    free = iter(reversed(range(sum(lengths))))
    slices = [
        Slice([0] * count, start, [next(free) for _ in range(length)], None)
        for (start, count), length in zip(parts, lengths, strict=True)
    ]
    batch = RaggedBatch.of(slices, block_size)
    tokens = len(batch.ids)
    key, value = (draw(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
    step = backend.prepare(batch, pool)
    value = key[..., : shape.latent] if shape.latent else value
    return step.attend(0, draw(tokens, heads, shape.head_dim), key, value, form).float()
