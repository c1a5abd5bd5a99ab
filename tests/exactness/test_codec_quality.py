"""What keeping blocks as int8 in a vault changes: perplexity and choices of the demo model on text it never saw.

A text is computed in chunks; behind each, all blocks so far go through the codec and back to where they were, so every
later token attends to nothing before its chunk that was not quantised, its own computation's inputs included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvfleet.worker.blocks.block_codec import SNR_GATE_DB, BlockShape, decode, encode, encoded_bytes, warm_up
from kvfleet.worker.model.assembly import build_runner
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import load_model
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.dataplane.block import BlockCodec

DATA = Path(__file__).parents[3] / "shared" / "data" / "shakespeare.txt"
HELD_OUT = 0.1  # of the text, its end: see kvfleet.worker.model.train_demo_model
BLOCK, CHUNK, TEXT, TEXTS, BOS = 16, 256, 1_536, 4, 0

# What is promised is 0.5 % and 98 %. Even 4 bits keep that with this model, so what is asked here is what 8 bits give.
PERPLEXITY_PERCENT, AGREEMENT = 0.01, 0.997

Change = Callable[[bytearray, BlockShape], None]  # of encoded bytes, on their way


@dataclass(frozen=True, slots=True)
class Heard:
    """Of all tokens behind the first chunk of each text: nats per token, and what would have been chosen."""

    nats: float
    choices: Tensor

    def perplexity_against(self, exact: Heard) -> float:
        """Change in percent."""
        return 100 * (math.exp(self.nats - exact.nats) - 1)

    def agreement_with(self, exact: Heard) -> float:
        return float((self.choices == exact.choices).double().mean())


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    if not DATA.exists():
        pytest.skip(f"{DATA} is not beside the repository")
    text = DATA.read_text()
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    ids = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).encode(text[cut:], add_special_tokens=False).ids
    return [[BOS, *ids[at * TEXT : (at + 1) * TEXT - 1]] for at in range(TEXTS)]


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    warm_up()
    return build_runner(load_model(DEMO_FOLDER, dtype="float32", device="cpu"), TEXT // BLOCK, BLOCK)


@pytest.fixture(scope="module")
def exact(runner: TorchRunner, texts: list[list[int]]) -> Heard:
    return hear(runner, texts, lambda blocks: None)


def hear(runner: TorchRunner, texts: list[list[int]], between: Callable[[int], None]) -> Heard:
    """`between` is told how many blocks are full, after each chunk."""
    loss, choices = 0.0, []
    with torch.inference_mode():
        for text in texts:
            for start in range(0, TEXT, CHUNK):
                ids = text[start : start + CHUNK]
                batch = RaggedBatch.of([Slice(ids, start, range(TEXT // BLOCK), None)], BLOCK)
                logits = runner.logits(batch, np.arange(CHUNK)).float()
                between((start + CHUNK) // BLOCK)
                if start:
                    targets = torch.tensor(text[start + 1 : start + 1 + CHUNK])
                    loss += float(cross_entropy(logits[: len(targets)], targets, reduction="sum"))
                    choices.append(logits.argmax(dim=-1))
    count = len(texts) * (TEXT - CHUNK - 1)
    return Heard(loss / count, torch.cat(choices))


def through_int8(runner: TorchRunner, change: Change | None = None) -> tuple[Callable[[int], None], list[float]]:
    """Sends blocks through the codec, in place; and the SNR of each."""
    shape = runner.pool.shape
    runs = shape.layers * 2 * shape.kv_heads * BLOCK
    block_shape = BlockShape(runs, shape.head_dim, str(shape.dtype).removeprefix("torch."))
    encoded = bytearray(encoded_bytes(BlockCodec.INT8, block_shape))
    ratios: list[float] = []

    def between(blocks: int) -> None:
        for block in runner.pool.data[:blocks]:
            place = memoryview(block.numpy())
            result = encode(BlockCodec.INT8, block_shape, place, memoryview(encoded))
            ratios.append(result.snr_db)
            if change is not None:
                change(encoded, block_shape)
            decode(BlockCodec.INT8, block_shape, memoryview(encoded), place)

    return between, ratios


def test_int8_blocks_change_almost_nothing(runner: TorchRunner, texts: list[list[int]], exact: Heard) -> None:
    between, ratios = through_int8(runner)
    heard = hear(runner, texts, between)
    assert heard.nats != exact.nats, "was it quantised?"
    assert abs(heard.perplexity_against(exact)) <= PERPLEXITY_PERCENT
    assert heard.agreement_with(exact) >= AGREEMENT
    assert min(ratios) > SNR_GATE_DB


def test_without_the_codec_nothing_changes(runner: TorchRunner, texts: list[list[int]], exact: Heard) -> None:
    again = hear(runner, texts[:1], lambda blocks: None)
    assert torch.equal(again.choices, exact.choices[: len(again.choices)])


def four_bits(encoded: bytearray, shape: BlockShape) -> None:
    numbers = np.frombuffer(encoded, np.int8, shape.numbers)
    numbers[:] = np.rint(numbers / 18.0).clip(-7, 7) * 18


def swapped_scales(encoded: bytearray, shape: BlockShape) -> None:
    """Each group's numbers with another's scale."""
    scales = np.frombuffer(encoded, np.float32, shape.runs, shape.numbers)
    scales[:] = np.roll(scales, 1)


@pytest.mark.parametrize("change", [four_bits, swapped_scales])
def test_what_is_worse_is_noticed(runner: TorchRunner, texts: list[list[int]], exact: Heard, change: Change) -> None:
    """The bounds above can fail."""
    between, _ = through_int8(runner, change)
    heard = hear(runner, texts, between)
    assert abs(heard.perplexity_against(exact)) > PERPLEXITY_PERCENT
    assert heard.agreement_with(exact) < AGREEMENT
