"""How much memory the largest step takes besides weights and KV pool: one is run and measured, before the pool is made.

Only a device whose allocator keeps count can tell: a GPU. On the host a step's memory is small beside the pool's.
"""

from __future__ import annotations

import logging

import torch

from kvfleet.worker.model.attention.reference import ReferenceBackend
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Draw, Slice
from kvproto.errors import OutOfMemory
from kvproto.messages import Sampling

log = logging.getLogger(__name__)

SPARE = 1.1  # of what was measured: allocators waste some


class CudaMeter:
    """A device's count of what is allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """The most that was allocated since `begin`, beyond what was then."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def end(self) -> None:
        """What is not used any more is the device's again."""
        torch.cuda.empty_cache()


def meter_of(device: torch.device) -> CudaMeter | None:
    return CudaMeter(device) if device.type == "cuda" else None


def step_bytes(loaded: LoadedModel, block_size: int, tokens: int, meter: CudaMeter | None) -> int:
    """What a step of so many prompt tokens takes; 0 where the device does not tell. Of one that does not fit at all,
    what half of it takes, and so on, as it is computed in parts. Raises OutOfMemory if one token alone does not fit."""
    if meter is None:
        return 0
    count = min(tokens, loaded.context_length)
    while True:
        try:
            taken = int(_measured(loaded, block_size, count, meter) * SPARE)
        except OutOfMemory as error:
            if count == 1:
                raise
            log.warning("a step of %d tokens does not fit beside the weights: %s", count, error)
            count //= 2
            continue
        finally:
            meter.end()
        log.info("a step of %d tokens takes %.2f GiB", count, taken / 2**30)
        return taken


def _measured(loaded: LoadedModel, block_size: int, count: int, meter: CudaMeter) -> int:
    blocks = -(-count // block_size)
    runner = TorchRunner(loaded, ReferenceBackend(), blocks, block_size)
    ids = [at % loaded.vocab_size for at in range(count)]
    meter.begin()
    runner.run([Slice(ids, 0, range(blocks), Draw(Sampling(1, temperature=0.0), 0, 0))])
    return meter.peak_bytes()
