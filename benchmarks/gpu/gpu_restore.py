"""A restore of a long prompt from pinned host memory, against one large copy over the same link.

    python -m benchmarks.gpu_restore [--quick] [--dry]

30,000 tokens of a Qwen2.5-7B shape in bf16, in blocks of 16: 1,875 blocks of 0.9 MB from shuffled slots to shuffled
blocks, by the host tier's copying thread, from the order to its end. The value is the rate as a share of one copy's of
as many bytes from the same memory in the same run, both medians of the rounds. Told beside it: the other way, and with
neighbours. What was restored is compared, byte by byte.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from random import Random
from statistics import median

import torch

from benchmarks.gpu._gpu import BLOCK, begin, end
from benchmarks.harness.gpu import QWEN_7B, TINY
from benchmarks.harness.report import progress
from kvcpu.blocks import KvShape
from kvfleet.worker.model.gpu.gpu_memory import memory_of, stream_of
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.tiers.host import Copier, Copy, HostTier

NAME, UNIT, FLOOR, PEER = "gpu_restore", "of the link's rate", 0.8, "one large copy from the same memory"
TOKENS = 30_000


class Restores:
    """A pool and a host tier of as many blocks as the prompt has, and the copier between them."""

    def __init__(self, config: dict[str, object], tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        layers, heads, kv_heads, hidden = (
            int(str(config[name]))
            for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
        )
        self.device, self.count = device, -(-tokens // BLOCK)
        self.pool = KvPool(KvShape(layers, kv_heads, hidden // heads, dtype), self.count, BLOCK, device)
        self.memory = memory_of(self.pool, stream_of(device))
        size = self.memory.block_bytes
        self.nbytes = self.count * size
        held = self.memory.host_memory(self.nbytes)
        self.outside = torch.frombuffer(held, dtype=torch.uint8).view(self.count, size)
        self.inside = self.pool.data.view(self.count, -1).view(torch.uint8)
        self.host, self.copier = HostTier(held, size, BLOCK), Copier()
        self.inside.random_(256)
        self.outside.copy_(self.inside)

    def seconds(self, copy: Copy, blocks: list[int], slots: list[int]) -> float:
        """From the order to the last block."""
        ended = threading.Event()
        job = self.host.copy_job(copy, blocks, slots, ended.set)
        began = time.perf_counter()
        self.copier.bring(job)
        ended.wait()
        taken = time.perf_counter() - began
        assert job.done == len(blocks), "a copy failed"
        return taken

    def check(self, blocks: list[int], slots: list[int]) -> None:
        """A restore brings every byte."""
        self.inside.zero_()
        self._wait()
        self.seconds(self.memory.write_blocks, blocks, slots)
        assert torch.equal(self.inside[blocks].cpu(), self.outside[slots]), "other bytes came"

    def large(self, into: torch.Tensor, out_of: torch.Tensor) -> float:
        self._wait()
        began = time.perf_counter()
        into.copy_(out_of, non_blocking=True)
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main() -> None:
    asked = begin(NAME, UNIT, floor=FLOOR, peer=PEER, doc=__doc__)
    rounds = 3 if asked.quick or asked.dry else 9
    device = torch.device("cpu" if asked.dry else "cuda")
    ours = Restores(TINY, 70, device, torch.float32) if asked.dry else Restores(QWEN_7B, TOKENS, device, torch.bfloat16)
    order = list(range(ours.count))
    blocks, slots = Random(1).sample(order, ours.count), Random(2).sample(order, ours.count)
    up, down = ours.memory.write_blocks, ours.memory.read_blocks
    ways = {
        "link_up": partial(ours.large, ours.inside, ours.outside),
        "link_down": partial(ours.large, ours.outside, ours.inside),
        "neighbours": partial(ours.seconds, up, order, order),
        "offload": partial(ours.seconds, down, blocks, slots),
        "restore": partial(ours.seconds, up, blocks, slots),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, copy in ways.items():  # in turn: all see the same machine
            taken[way].append(copy())
    ours.check(blocks, slots)
    ours.copier.close()
    times = {way: median(seconds[1:]) for way, seconds in taken.items()}  # the first touches the memory
    rates = {way: round(ours.nbytes / one / 1e9, 1) for way, one in times.items()}
    progress(f"{ours.nbytes / 1e9:.2f} GB; GB/s: {rates}")
    value = times["link_up"] / times["restore"]
    end(
        asked, NAME, value, UNIT, floor=FLOOR, peer=PEER, ok=value >= FLOOR,
        offload=round(times["link_down"] / times["offload"], 3),
        neighbours=round(times["link_up"] / times["neighbours"], 3),
        restore_ms=round(times["restore"] * 1e3, 2), gb_per_s=rates,
    )  # fmt: skip


if __name__ == "__main__":
    main()
