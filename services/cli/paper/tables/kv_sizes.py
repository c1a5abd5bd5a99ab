"""Table 5.5 and the article's sizes: what K and V of a session look like, and what those of known models take.

A model's configuration says its sizes, by `kvfleet kv-size`; K and V are read from a fleet that computed them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfleet.cli.clients.answers import AnswerFailed
from kvfleet.cli.paper.paper_fleet import RunningFleet, run_kvfleet
from kvfleet.cli.paper.paper_models import GPT2_FLEET, words_of, write_config
from kvfleet.cli.paper.paper_run import PaperBench
from kvfleet.cli.paper.paper_table import Criterion, PaperModel, PaperTable, all_of

GIB = 2**30
LLAMA = PaperModel("Llama 2 7B", {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32_000, "max_position_embeddings": 2048,
})  # fmt: skip
MISTRAL = PaperModel("Mistral 7B", {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000, "max_position_embeddings": 32_768,
    "sliding_window": 4096,
})  # fmt: skip
HYBRID = PaperModel("Qwen3.6-35B-A3B", {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 262_144,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 10,
})  # fmt: skip
MISTRAL_BLOCKS, MISTRAL_TOKEN, BLOCK = 4096 // 16 + 1, 32 * 2 * 8 * 128 * 2, 16  # a window and one block
GPT2_LAYERS = 12
# Of 30 layers: 32 heads of 128 x 128 numbers in float32, and the last 4 inputs of 8,192 channels in bfloat16.
STATE_BYTES = 30 * (32 * 128 * 128 * 4 + 4 * 8192 * 2)


@dataclass(frozen=True, slots=True)
class SizeRow:
    model: str
    what: str
    found: str
    wanted: str
    paper: str


def measure(bench: PaperBench) -> list[SizeRow]:
    with ThreadPoolExecutor(3) as asked:
        reports = list(asked.map(lambda model: _size(model, bench.folder), (LLAMA, MISTRAL, HYBRID)))
    llama, mistral = (report["sizes"][0]["sequences"][-1] for report in reports[:2])
    rows = [
        SizeRow(LLAMA.name, "2,048 tokens in 16 bits", _bytes(llama["bytes"]), _bytes(GIB), "1,073,741,824 bytes"),
        SizeRow(LLAMA.name, "of them in 16 GiB", f"{llama['fit']}", "16", "16 users: 17 GB"),
        SizeRow(
            MISTRAL.name, "32,768 tokens in 16 bits", _bytes(mistral["bytes"]),
            _bytes(MISTRAL_BLOCKS * BLOCK * MISTRAL_TOKEN), "a window of 4,096",
        ),
        SizeRow(
            HYBRID.name, "state of a sequence or a snapshot", _bytes(reports[2]["state_bytes"]), _bytes(STATE_BYTES),
            "two kinds of vaults",
        ),
    ]  # fmt: skip
    return [*_shapes(bench.fleet), *rows]


def _size(model: PaperModel, inside: Path) -> dict[str, Any]:
    """What `kvfleet kv-size` says of it."""
    folder = str(write_config(model, inside))
    done = run_kvfleet("kv-size", folder, "--kv-dtype=bfloat16", "--memory=16GiB", "--device=cpu", "--json")
    if done.returncode != 0:
        raise AnswerFailed(f"{model.name}: {done.stderr.strip()[-200:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _shapes(fleet: RunningFleet) -> Iterator[SizeRow]:
    """Of a session of five tokens, and of the same after three more: the last token of a turn has no K and V yet."""
    for what, words, wanted in (("5 tokens", range(5), [5, 12, 64]), ("3 more", range(5, 7), [8, 12, 64])):
        fleet.generate(words_of(words), 1, seq_id="shapes")
        found = {json.dumps(shape) for layer in range(GPT2_LAYERS) for shape in _layer(fleet, layer)}
        yield SizeRow(
            "GPT-2", f"K, V of {what}, in {GPT2_LAYERS} layers", ", ".join(sorted(found)), json.dumps(wanted),
            json.dumps(wanted),
        )  # fmt: skip


def _layer(fleet: RunningFleet, layer: int) -> tuple[list[int], list[int]]:
    """The shapes in a safetensors file: eight bytes of length, then JSON."""
    read = fleet.read(f"/sessions/shapes/kv?layer={layer}")
    (length,) = struct.unpack_from("<Q", read)
    head = json.loads(read[8 : 8 + length])
    return head["k"]["shape"], head["v"]["shape"]


def _bytes(size: int) -> str:
    return f"{size:,} bytes"


def judge(rows: Sequence[SizeRow]) -> list[Criterion]:
    return [
        all_of(
            "sizes and shapes as they must be, to the byte",
            sum(row.found == row.wanted for row in rows),
            len(rows),
        )
    ]


TABLE = PaperTable("sizes", "K and V by model", "the paper, table 5.5; the articles", measure, judge, GPT2_FLEET)
