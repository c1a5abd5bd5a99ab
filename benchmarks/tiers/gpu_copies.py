"""What vLLM's connector copies between a GPU and the worker's memory, against one large copy from pinned memory.

    python -m benchmarks.gpu_copies [--quick]

512 blocks of 28 layers of 32 KiB, as a 7B model's of 16 tokens are, to and from shuffled slots in /dev/shm, by the code
that runs in vLLM. The value is the lower of both directions' rates, as a share of the large copy's in the same run and
direction; each is the median of the rounds. Without a GPU it is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness.report import finish, parse_quick, progress, skip
from kvfleet_vllm.block_copies import LayerBlocks, SlotStore
from kvfleet_vllm.block_moves import SharedStore

NAME, UNIT, FLOOR = "gpu_copies", "of the link's rate", 0.5
BLOCKS, LAYERS, PART = 512, 28, 32 * 1024


def seconds(copy: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])  # the first loads kernels and allocates


def main() -> None:
    rounds = 3 if parse_quick(__doc__) else 9
    if not torch.cuda.is_available():
        skip(NAME, UNIT, floor=FLOOR, peer="one large copy", why="torch sees no GPU")
    layers = {f"layer.{at:02}": torch.ones(BLOCKS, PART, dtype=torch.uint8, device="cuda") for at in range(LAYERS)}
    blocks = LayerBlocks(layers, BLOCKS)
    size = BLOCKS * blocks.block_bytes
    slots = Random(1).sample(range(BLOCKS), BLOCKS)
    host, device = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8).cuda()
    shares = {}
    with TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "slots")
        path.write_bytes(bytes(size))
        store = SlotStore(SharedStore(str(path), BLOCKS), blocks, 0, 1)
        for name, save, into, out_of in (("save", True, host, device), ("load", False, device, host)):
            large = seconds(partial(into.copy_, out_of, non_blocking=True), rounds)
            ours = seconds(partial(blocks.copy, range(BLOCKS), slots, store, save=save), rounds)
            shares[name] = round(large / ours, 3)
            progress(f"{name}: {size / ours / 1e9:.1f} GB/s, in one copy {size / large / 1e9:.1f} GB/s")
    value = min(shares.values())
    device_name = torch.cuda.get_device_name()
    finish(NAME, value, UNIT, floor=FLOOR, peer="one large copy", ok=value >= FLOOR, gpu=device_name, **shares)


if __name__ == "__main__":
    main()
