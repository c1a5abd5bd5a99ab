"""What int8 costs the blocks of models, by the codec that writes them for vaults: one line of JSON.

Of each model the blocks of a prompt of random tokens, and as many of normal random numbers in the same shape.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvfleet.worker.blocks.block_codec import BlockShape, encode, encoded_bytes
from kvfleet.worker.model.assembly import build_runner
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import LoadFormat, load_model
from kvfleet.worker.model.model_folder import resolve_model, served_name
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.dataplane.block import BlockCodec
from kvproto.errors import KvfleetError
from kvservice.settings import die

BLOCK, BLOCKS = 16, 16
DTYPE: Literal["float32"] = "float32"
NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class CodecLoss:
    """`numbers`: the model whose K and V they are, or `normal`."""

    head_dim: int
    numbers: str
    raw_bytes: int
    int8_bytes: int
    least_snr_db: float
    median_snr_db: float


def report(model: str) -> list[CodecLoss]:
    """Raises KvfleetError."""
    folder = resolve_model(model)
    blocks, head_dim = _computed(folder)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(blocks.shape, generator=generator)
    return [_loss(served_name(model), blocks, head_dim), _loss(NORMAL, normal, head_dim)]


def _computed(folder: Path) -> tuple[Tensor, int]:
    """K and V of a prompt as the engine computes them, `[blocks, numbers]`; without weights these are random."""
    load_format: LoadFormat = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    loaded = load_model(folder, load_format=load_format, dtype=DTYPE, device="cpu")
    runner = build_runner(loaded, BLOCKS, BLOCK, attention="reference")
    random = Random(0)
    ids = [random.randrange(loaded.vocab_size) for _ in range(BLOCKS * BLOCK)]
    with torch.inference_mode():
        runner.logits(RaggedBatch.of([Slice(ids, 0, range(BLOCKS), None)], BLOCK), np.zeros(1, dtype=np.int64))
        return runner.pool.data[:BLOCKS].reshape(BLOCKS, -1).clone(), runner.pool.shape.head_dim


def _loss(numbers: str, blocks: Tensor, head_dim: int) -> CodecLoss:
    shape = BlockShape(blocks.shape[1] // head_dim, head_dim, DTYPE)
    length = encoded_bytes(BlockCodec.INT8, shape)
    target = memoryview(bytearray(length))
    ratios = [encode(BlockCodec.INT8, shape, _bytes(block), target).snr_db for block in blocks]
    return CodecLoss(head_dim, numbers, shape.raw_bytes, length, min(ratios), median(ratios))


def _bytes(block: Tensor) -> memoryview:
    return memoryview(block.view(torch.uint8).numpy())  # type: ignore[arg-type]


def main(models: Iterable[str] | None = None) -> None:
    try:
        found = [asdict(loss) for model in models or sys.argv[1:] for loss in report(model)]
    except KvfleetError as error:
        die(f"kvfleet bench paper: {error}")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
