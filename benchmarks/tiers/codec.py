"""How fast blocks become int8 and come back, in GB/s of unquantised bytes, and what that costs.

    python -m benchmarks.codec [--quick] [--threads N]

Ordinary threads take whole blocks in turn, as transfer threads do; the blocks are several times as large as the
cache. The peer does the same arithmetic with eager torch on as many threads. The value is the slowest of all rates,
the floor a share of the rate at which as many threads copy. The ratio to fp32 must be at least 3.7, and blocks of
Gaussian numbers and of the demo model on real text must pass the SNR gate.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine._engine import BLOCK, Ours
from benchmarks.engine._versus import SHORT
from benchmarks.engine.kv_int8 import CHUNK, TEXT, windows_of
from benchmarks.harness.report import finish, parser, progress, spread
from benchmarks.harness.yardstick_machine import measure_machine
from kvfleet.worker.blocks.block_codec import SNR_GATE_DB, BlockShape, choose, decode, encode, encoded_bytes, warm_up
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.dataplane.block import BlockCodec

NAME, UNIT = "codec", "GB/s of unquantised bytes"
OF_COPY = 0.25
RATIO_FLOOR = 3.7  # of fp32
WORKING_SET = 384 * 1024 * 1024
INT8 = BlockCodec.INT8
SHAPES = {"gpt2": (12 * 2 * 12 * BLOCK, 64), "qwen2-0.5b": (24 * 2 * 2 * BLOCK, 64)}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tensors `[runs, head_dim]` each, what they are encoded to, and where they come back."""

    shape: BlockShape
    before: list[Tensor]
    small: list[bytearray]
    after: list[Tensor]


def blocks_of(model: str, dtype: torch.dtype) -> Blocks:
    runs, head_dim = SHAPES[model]
    shape = BlockShape(runs, head_dim, str(dtype).removeprefix("torch."))
    count = -(-WORKING_SET // shape.raw_bytes)
    before = [torch.randn(runs, head_dim).to(dtype) for _ in range(count)]
    small = [bytearray(encoded_bytes(INT8, shape)) for _ in range(count)]
    return Blocks(shape, before, small, [torch.zeros_like(block) for block in before])


def view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def in_threads(count: int, threads: int, work: Callable[[int], None]) -> float:
    """Seconds until `work` was called with each number below `count`, each thread taking every so many-th."""

    def part(first: int) -> None:
        for number in range(first, count, threads):
            work(number)

    began = time.perf_counter()
    team = [threading.Thread(target=part, args=(first,)) for first in range(threads)]
    for thread in team:
        thread.start()
    for thread in team:
        thread.join()
    return time.perf_counter() - began


def measure(blocks: Blocks, threads: int, rounds: int) -> dict[str, Any]:
    """GB/s of ours and of the peer, medians; they run in turn. All blocks must have come back."""
    shape, count = blocks.shape, len(blocks.before)
    before, after = [view(block) for block in blocks.before], [view(block) for block in blocks.after]
    small = [memoryview(each) for each in blocks.small]
    ratios = [0.0] * count

    def ours_encode(at: int) -> None:
        ratios[at] = encode(INT8, shape, before[at], small[at]).snr_db

    def ours_decode(at: int) -> None:
        decode(INT8, shape, small[at], after[at])

    def torch_encode() -> float:
        began = time.perf_counter()
        for block, target in zip(blocks.before, small, strict=True):
            numbers, scales = quantised(block)
            whole = torch.frombuffer(target, dtype=torch.int8)
            whole[: shape.numbers] = numbers.view(-1)
            whole[shape.numbers :].view(torch.float32).copy_(scales)
        return time.perf_counter() - began

    def torch_decode() -> float:
        began = time.perf_counter()
        for source, target in zip(small, blocks.after, strict=True):
            whole = torch.frombuffer(source, dtype=torch.int8)
            numbers, scales = whole[: shape.numbers].view(target.shape), whole[shape.numbers :].view(torch.float32)
            target.copy_(numbers * scales[:, None])
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {"encode": [], "decode": [], "torch_encode": [], "torch_decode": []}
    for _ in range(rounds + 1):
        seconds["encode"].append(in_threads(count, threads, ours_encode))
        seconds["decode"].append(in_threads(count, threads, ours_decode))
        seconds["torch_encode"].append(torch_encode())
        seconds["torch_decode"].append(torch_decode())
    size = count * shape.raw_bytes
    for first, back in zip(blocks.before, blocks.after, strict=True):
        assert (first.float() - back.float()).abs().max() < 0.05
    rates = {name: spread(size / each / 1e9 for each in timed[1:]) for name, timed in seconds.items()}
    ratio = shape.raw_bytes / encoded_bytes(INT8, shape)
    return {"gb_per_s": rates, "ratio": round(ratio, 3), "snr_db": spread(ratios), "megabytes": round(size / 1e6)}


def quantised(block: Tensor) -> tuple[Tensor, Tensor]:
    floats = block.float()
    scales = floats.abs().amax(dim=-1) / 127
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (floats * inverse[:, None]).round().to(torch.int8), scales


def of_the_demo_model(windows: int) -> dict[str, Any]:
    """SNR of its blocks on text that it was not trained on, and how many the gate lets pass."""
    ours = Ours(DEMO_FOLDER, "float32", sequences=1, context=2_048)
    pool = ours.runner.pool
    shape = BlockShape(pool.shape.layers * 2 * pool.shape.kv_heads * BLOCK, pool.shape.head_dim, "float32")
    target = memoryview(bytearray(encoded_bytes(INT8, shape)))
    ratios, passed = [], 0
    with torch.inference_mode():
        for window in windows_of(TEXT.read_text())[:windows]:
            full = range(len(window) // BLOCK)
            for start in range(0, len(window), CHUNK):
                ids = window[start : start + CHUNK]
                ours.runner.logits(RaggedBatch.of([Slice(ids, start, full, None)], BLOCK), np.zeros(1, dtype=np.int64))
            for block in pool.data[: len(full)]:
                ratios.append(encode(INT8, shape, view(block), target).snr_db)
                passed += choose(INT8, shape, view(block), target).codec is INT8
    return {"snr_db": spread(ratios), "blocks": len(ratios), "passed": passed}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=2)
    options = arguments.parse_args()
    machines = []
    torch.manual_seed(7)
    warm_up()
    parts = {}
    for model in SHAPES:
        for dtype in DTYPES:
            machines.append(measure_machine(options.threads))  # each time: what others do changes what it can
            name = f"{model} {SHORT[str(dtype).removeprefix('torch.')]}"
            parts[name] = measure(blocks_of(model, dtype), options.threads, 3 if options.quick else 9)
            rates = {what: each["median"] for what, each in parts[name]["gb_per_s"].items()}
            progress(f"{name}: {rates} GB/s, {parts[name]['ratio']} times smaller, {parts[name]['snr_db']} dB")
    real = of_the_demo_model(1 if options.quick else 8) if TEXT.exists() else None
    progress(f"the demo model's blocks: {real}" if real else f"{TEXT} is not beside the repository")
    slowest = min(part["gb_per_s"][what]["median"] for part in parts.values() for what in ("encode", "decode"))
    machine = sorted(machines, key=lambda one: one.copy)[len(machines) // 2]
    floor = round(OF_COPY * machine.copy / 1e9, 2)
    ratio = min(part["ratio"] for name, part in parts.items() if name.endswith("fp32"))
    keeps = all(part["snr_db"]["min"] >= SNR_GATE_DB for part in parts.values())
    finish(
        NAME,
        round(slowest, 2),
        UNIT,
        floor=floor,
        ok=slowest >= floor and ratio >= RATIO_FLOOR and keeps and (real is None or real["passed"] == real["blocks"]),
        peer="eager torch",
        of_copy=round(slowest * 1e9 / machine.copy, 3),
        of_copy_floor=OF_COPY,
        machine=machine.report(),
        threads=options.threads,
        ratio_of_fp32=ratio,
        ratio_floor=RATIO_FLOOR,
        gate_db=SNR_GATE_DB,
        demo_model=real,
        parts=parts,
    )


if __name__ == "__main__":
    main()
