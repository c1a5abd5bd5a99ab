"""Measures, before a GPU's pool is made, the memory of the largest steps besides weights and pool. On the host that is
small beside the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import OutOfMemory
from kvproto.messages import Sampling
from kvsampling.draw import Draw
from kvsampling.sampler import warm_up

log = logging.getLogger(__name__)

SPARE = 1.1  # factor on what was measured: allocators waste some


@dataclass(eq=False, slots=True)
class CudaMeter:
    """Measures the peak of a device's allocated memory."""

    device: torch.device
    _before: int = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        """The most that was allocated since `begin`, beyond what was allocated then."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._before

    def end(self) -> None:
        torch.cuda.empty_cache()


def meter_of(device: torch.device) -> CudaMeter | None:
    return CudaMeter(device) if device.type == "cuda" else None


def step_bytes(
    runner_of: Callable[[int], TorchRunner],
    meter: CudaMeter | None,
    tokens: int,
    sequences: int,
    *,
    in_parts: bool = True,
) -> tuple[int, int]:
    """Of a step of so many prompt tokens, and of one in which so many sequences draw a token each. `runner_of` makes a
    runner with so many blocks. 0 without a meter. `in_parts`: a step that does not fit is halved until it does, as the
    engine computes it. Raises OutOfMemory if one token does not fit."""
    if meter is None:
        return 0, 0
    one = runner_of(1)
    warm_up(torch.device(one.device))  # how it draws is decided there, and with it how much memory that takes
    prompt = partial(_prompt, one.block_size, one.vocab_size)
    most = min(tokens, one.context_length)
    taken = partial(_taken, runner_of, meter, in_parts)
    return taken(most, prompt), taken(sequences, _decodes)


def _prompt(block_size: int, vocab_size: int, tokens: int) -> Sequence[Slice]:
    ids = [at % vocab_size for at in range(tokens)]
    return [Slice(ids, 0, range(-(-tokens // block_size)), Draw(Sampling(1, temperature=0.0), 0, 0))]


def _decodes(sequences: int) -> Sequence[Slice]:
    return [Slice([0], 0, [at], Draw(Sampling(1, top_p=0.9, logprobs=0), 0, 0)) for at in range(sequences)]


def _taken(
    runner_of: Callable[[int], TorchRunner],
    meter: CudaMeter,
    in_parts: bool,
    count: int,
    slices: Callable[[int], Sequence[Slice]],
) -> int:
    while True:
        try:
            step = slices(count)
            taken = int(_measured(runner_of(1 + max(part.blocks[-1] for part in step)), step, meter) * SPARE)
        except OutOfMemory as error:
            if count == 1 or not in_parts:
                raise
            log.warning("a step does not fit beside the weights: %s", error)
            count //= 2
            continue
        finally:
            meter.end()
        log.info("a step of %d tokens, of %d sequences, takes %.2f GiB", count, len(step), taken / 2**30)
        return taken


def _measured(runner: TorchRunner, step: Sequence[Slice], meter: CudaMeter) -> int:
    meter.begin()
    runner.run(step)
    return meter.peak_bytes()
