"""How fast decode attention reads K and V, against a plain read of as many bytes.

    python -m benchmarks.attention_bandwidth [--quick] [--threads N]

The cpu backend by itself: 16 sequences of 1,000 tokens decode one each, through all layers in turn, so that
everything comes from memory. The peer is torch's sum over one contiguous fp32 buffer of the same bytes, on huge pages
like the pool. The value is the share of the read rate, of the case that has the least. Where heads share K and V the
arithmetic may take longer than the read on a processor without bfloat16 or AVX-512: a case is kept also by the same
share of the bound that both rates make.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from benchmarks.engine._engine import BLOCK, CORES
from benchmarks.engine._versus import SHORT, Part, Trials, compare, conclude
from benchmarks.harness.report import parser, progress
from benchmarks.harness.yardstick_machine import Machine, measure_machine
from kvcpu.attention.backend import CpuBackend
from kvcpu.blocks import AttentionForm, KvShape
from kvcpu.vector.memory import huge_pages
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.messages import Sampling
from kvsampling.draw import Draw

SEQUENCES, LENGTH, HEAD_DIM, FLOOR = 16, 1_000, 64, 0.4


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    layers: int
    dtype: torch.dtype


CASES = [
    Case("gpt2", 12, 12, 12, torch.float32),
    Case("gpt2", 12, 12, 12, torch.bfloat16),
    Case("14:2", 14, 2, 48, torch.float32),
    Case("14:2", 14, 2, 48, torch.bfloat16),
]


def batch_of(chance: Random) -> tuple[RaggedBatch, int]:
    """One token each of sequences in blocks at random, and how many blocks there are."""
    each = -(-LENGTH // BLOCK)
    blocks = list(range(SEQUENCES * each))
    chance.shuffle(blocks)
    draw = Draw(Sampling(1, temperature=0.0), 0, 0)
    slices = [Slice([0], LENGTH - 1, blocks[at * each : (at + 1) * each], draw) for at in range(SEQUENCES)]
    return RaggedBatch.of(slices, BLOCK), len(blocks)


def measure(case: Case, backend: CpuBackend, machine: Machine, rounds: int) -> Part:
    batch, blocks = batch_of(Random(9))
    shape = KvShape(case.layers, case.kv_heads, HEAD_DIM, case.dtype)
    pool = KvPool(shape, blocks, BLOCK, torch.device("cpu"))
    for block in pool.data:
        block.normal_()
    size = case.layers * 2 * case.kv_heads * HEAD_DIM * case.dtype.itemsize * SEQUENCES * LENGTH
    plain = huge_pages(size).view(torch.float32).fill_(1.0)
    query = torch.randn(SEQUENCES, case.heads, HEAD_DIM, dtype=case.dtype)
    new = torch.randn(SEQUENCES, case.kv_heads, HEAD_DIM, dtype=case.dtype)
    form = AttentionForm(HEAD_DIM**-0.5)

    def attend() -> None:
        step = backend.prepare(batch, pool)
        for layer in range(case.layers):
            step.attend(layer, query, new, new, form)

    def read() -> None:
        plain.sum()

    attending: list[float] = []
    reading: list[float] = []
    for _ in range(rounds + 1):
        for work, seen in ((attend, attending), (read, reading)):
            began = time.perf_counter()
            work()
            seen.append(time.perf_counter() - began)
    ours, theirs = np.median(attending[1:]), np.median(reading[1:])
    rates = {"gb_per_s": round(size / ours / 1e9, 2), "read_gb_per_s": round(size / theirs / 1e9, 2)}
    dtype = SHORT[str(case.dtype).removeprefix("torch.")]
    name = f"{case.name} {dtype}"
    operations = 4 * case.layers * case.heads * HEAD_DIM * SEQUENCES * LENGTH  # of scores, and of weighted values
    bound = machine.bound_s(size, operations, case.dtype)
    details = {"megabytes": round(size / 1e6), **rates}
    return compare(name, FLOOR, attending[1:], reading[1:], (), bound_s=bound, share_floor=FLOOR, **details)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=int, default=CORES)
    options = arguments.parse_args()
    machine, trials = measure_machine(options.threads), Trials()
    progress("compiling, or loading what was compiled")
    backend = CpuBackend(options.threads)
    with torch.inference_mode():
        trials.parts += [measure(case, backend, machine, 5 if options.quick else 21) for case in CASES]
    conclude(
        "attention_bandwidth",
        "of the rate of a plain read",
        trials,
        floor=FLOOR,
        machine=machine.report(),
        peer="torch.sum over as many contiguous bytes",
        sequences=SEQUENCES,
        length=LENGTH,
        head_dim=HEAD_DIM,
        block=BLOCK,
        layers={case.name: case.layers for case in CASES},
        threads=options.threads,
    )


if __name__ == "__main__":
    main()
