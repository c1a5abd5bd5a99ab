"""Decode steps recorded once, by how many sequences they have, and replayed: a GPU then waits for no launch.

A step takes the smallest recorded size that holds it. One with a prompt's tokens in it, or with too many sequences, is
launched kernel by kernel. So is every step of a model that cannot be recorded, which is found out at the start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvcpu.blocks import Batch
from kvfleet.worker.model.attention.interface import AttentionStep, attending

log = logging.getLogger(__name__)

RECORDING_LIMIT_S = 60.0  # sizes that are not recorded by then never are
SMALL = (1, 2, 4)
STEP, WIDE_STEP, WIDE = 8, 32, 64  # between sizes, and from which size on they are further apart

Replay = Callable[[], None]
Record = Callable[[Callable[[], None]], Replay]


def sizes_up_to(most: int) -> list[int]:
    """How many sequences recorded steps have, ascending."""
    sizes = [*SMALL, *range(STEP, WIDE, STEP), *range(WIDE, most + WIDE_STEP, WIDE_STEP)]
    return sorted({min(size, most) for size in sizes}) if most else []


class Inputs(Protocol):
    """See `kvgpu.attention.decode_inputs.DecodeInputs`."""

    ids: Tensor  # [most], as is all that follows
    positions: Tensor
    rows: Tensor

    def step(self, size: int) -> AttentionStep: ...

    def fill(self, batch: Batch, size: int, first_position: int) -> None: ...


class DecodeGraphs:
    """Of `model`, whose attention is `inputs`' where it runs within `attending`."""

    def __init__(self, model: Any, inputs: Inputs, first_position: int, record: Record) -> None:
        self._model, self._inputs, self._first_position, self._record = model, inputs, first_position, record
        self._replays: dict[int, Replay] = {}  # ascending
        self._logits: Tensor | None = None
        self.replayed = 0  # steps

    def record(self, sizes: list[int], is_right: Callable[[int, Callable[[Batch], Tensor | None]], bool]) -> None:
        """The largest first, as the smaller ones fit into its memory. `is_right` runs a step of so many sequences both
        ways. What cannot be recorded, or computes something else, is left out."""
        began = time.monotonic()
        for size in reversed(sizes):
            if time.monotonic() - began > RECORDING_LIMIT_S:
                log.warning("decode steps of %d sequences and fewer are not recorded: it takes too long", size)
                break
            run = partial(self._run, size, self._inputs.step(size))
            try:
                run()
                self._replays = {size: self._record(run), **self._replays}
                if is_right(size, self.logits):
                    continue
                why = "it computes something else"
            except Exception as error:  # noqa: BLE001 - whatever a model does that cannot be recorded, it can be launched
                why = f"{type(error).__name__}: {error}"
            self._replays.pop(size, None)
            log.warning("decode steps of %d sequences are not recorded: %s", size, why)
            break
        log.info("recorded decode steps of %s sequences in %.1f s", list(self._replays), time.monotonic() - began)

    def logits(self, batch: Batch) -> Tensor | None:
        """`[sequences, vocab]`, valid until the next call; None where no recorded step has what this one needs."""
        count = len(batch.ids)
        size = next((size for size in self._replays if size >= count), None)
        if size is None or len(batch.counts) != count or self._logits is None:
            return None
        self._inputs.fill(batch, size, self._first_position)
        self._replays[size]()
        self.replayed += 1
        return self._logits[:count]

    def _run(self, size: int, step: AttentionStep) -> None:
        inputs = self._inputs
        with torch.inference_mode(), attending(step):
            output = self._model(
                input_ids=inputs.ids[:size].unsqueeze(0),
                position_ids=inputs.positions[:size].unsqueeze(0),
                use_cache=False,
                logits_to_keep=inputs.rows[:size],
            )
            logits = output.logits[0]
            if self._logits is None:  # the largest step comes first
                self._logits = torch.empty_like(logits)
            self._logits[:size].copy_(logits)


def cuda_graphs(device: torch.device) -> Record:
    """All in one pool of memory: two of them never run at once."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Callable[[], None]) -> Replay:
        beside, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(current)
        with torch.cuda.stream(beside):  # libraries choose and set up what they need, which cannot be recorded
            run()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            run()
        return graph.replay

    return record
