"""What this machine can do: rates of a plain read, a copy and a product of matrices, measured in the run that is
judged.

A floor in GB/s, or in times a peer's speed, says as much of the processor that it was stated on as of our code. Work
whose bytes and products are known has a bound on any machine, `Machine.bound_s`; the share of it that ours reaches is
our own doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvcpu.vector.memory import huge_pages

SHARE = 0.7  # of the bound, from which on a comparison is kept whatever the peer's speed
READ_BYTES = 256 * 1024 * 1024
SIZE = 512  # of the matrices
REPEATS = 15
AT_MOST_S = 0.5  # for one rate: torch multiplies bfloat16 slowly where the processor does not


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and operations (two for a product and its sum) a second, by so many threads; the best of some tries."""

    threads: int
    read: float
    copy: float  # counted once: bytes that were copied
    multiply: Mapping[torch.dtype, float]  # of numbers of this kind, by whatever kind is fastest

    def bound_s(self, read: float, operations: float, dtype: torch.dtype = torch.float32) -> float:
        """Seconds that reading so many bytes, or so many operations, take at least."""
        return max(read / self.read, operations / self.multiply[dtype])

    def report(self) -> dict[str, Any]:
        products = {str(kind).removeprefix("torch."): round(rate / 1e9, 1) for kind, rate in self.multiply.items()}
        return {
            "read_gb_per_s": round(self.read / 1e9, 2),
            "copy_gb_per_s": round(self.copy / 1e9, 2),
            "multiply_gflop_per_s": products,
            "threads": self.threads,
        }


def measure_machine(threads: int) -> Machine:
    """Takes a few seconds at most, and sets torch's threads."""
    torch.set_num_threads(threads)
    source = huge_pages(READ_BYTES).view(torch.float32).fill_(1.0)
    target = huge_pages(READ_BYTES).view(torch.float32)
    read = READ_BYTES / _least(source.sum)
    copied = READ_BYTES / _least(lambda: target.copy_(source))
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(SIZE, SIZE, dtype=dtype) for _ in range(2))
        rates[dtype] = 2 * SIZE**3 / _least(partial(torch.matmul, left, right))
    rates[torch.bfloat16] = max(rates.values())  # where the processor has none: converted, and multiplied as floats
    return Machine(threads, read, copied, rates)


def _least(work: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls, the first of which is not counted: others share the machine."""
    work()
    seconds: list[float] = []
    while len(seconds) < REPEATS and sum(seconds) < AT_MOST_S:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
