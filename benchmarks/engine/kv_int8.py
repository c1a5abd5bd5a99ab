"""What keeping K and V as int8 changes: perplexity of the bundled model on text that it was not trained on.

    python -m benchmarks.kv_int8 [--quick] [--threads N]

The same windows of held-out text run through the engine's runner twice, with the pool in fp32 and in int8; every token
attends to what the pool holds. The value is the change of the perplexity in percent, which must not exceed the floor.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from benchmarks.engine._engine import BLOCK, CORES, Ours
from benchmarks.harness.report import finish, parser, progress, skip
from kvfleet.worker.model.assembly import KvDtype
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.schedule.step_plan import Slice

NAME, UNIT, FLOOR = "kv_int8", "percent of perplexity, at most", 0.5
PEER = "the same model with its KV in fp32"
TEXT = Path(__file__).resolve().parents[3] / "shared" / "data" / "shakespeare.txt"
HELD_OUT = 0.1  # of the text, its end: see kvfleet.worker.model.train_demo_model
WINDOW, CHUNK, BOS = 2_048, 512, 0


def windows_of(text: str) -> list[list[int]]:
    """The held-out part, cut between two speeches as it was for training, in pieces that each begin with BOS."""
    cut = text.index("\n\n", int(len(text) * (1 - HELD_OUT))) + 2
    ids = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).encode(text[cut:], add_special_tokens=False).ids
    return [[BOS, *ids[at : at + WINDOW - 1]] for at in range(0, len(ids) - WINDOW + 2, WINDOW - 1)]


def nats(ours: Ours, window: list[int]) -> float:
    """Loss of all tokens behind the first, in chunks as a prompt is prefilled."""
    blocks = list(range(-(-len(window) // BLOCK)))
    total = 0.0
    for start in range(0, len(window), CHUNK):
        ids = window[start : start + CHUNK]
        batch = RaggedBatch.of([Slice(ids, start, blocks, None)], BLOCK)
        logits = ours.runner.logits(batch, np.arange(len(ids)))
        targets = torch.tensor(window[start + 1 : start + 1 + len(ids)])
        total += float(cross_entropy(logits[: len(targets)].float(), targets, reduction="sum"))
    return total


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    if not TEXT.exists():
        skip(NAME, UNIT, floor=FLOOR, peer=PEER, why=f"{TEXT} is not beside the repository")
    windows = windows_of(TEXT.read_text())[: 4 if options.quick else None]
    tokens = sum(len(window) - 1 for window in windows)
    perplexities: dict[KvDtype, float] = {}
    sizes: dict[KvDtype, int] = {}
    kinds: tuple[KvDtype, KvDtype] = ("auto", "int8")
    with torch.inference_mode():
        for kind in kinds:
            ours = Ours(DEMO_FOLDER, "float32", threads=options.threads, sequences=1, context=WINDOW, kv_dtype=kind)
            perplexities[kind] = math.exp(sum(nats(ours, window) for window in windows) / tokens)
            sizes[kind] = ours.runner.bytes_per_block
            progress(f"{kind}: perplexity {perplexities[kind]:.5f}, {sizes[kind]} bytes per block")
    change = 100 * (perplexities["int8"] / perplexities["auto"] - 1)
    finish(
        NAME,
        round(change, 4),
        UNIT,
        floor=FLOOR,
        ok=abs(change) <= FLOOR,
        peer=PEER,
        perplexity=round(perplexities["int8"], 5),
        peer_perplexity=round(perplexities["auto"], 5),
        tokens=tokens,
        bytes_per_block=sizes["int8"],
        peer_bytes_per_block=sizes["auto"],
        smaller=round(sizes["auto"] / sizes["int8"], 3),
        smaller_than_bf16=round(sizes["auto"] / 2 / sizes["int8"], 3),
    )


if __name__ == "__main__":
    main()
