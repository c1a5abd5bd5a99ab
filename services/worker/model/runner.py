"""Runs a Hugging Face model on a step's slices, as one flat row of tokens. Owns the model and its KV pool.

Logits are made of few rows at once: a long prompt's, with a large vocabulary, would fill the memory. So the layers run
once, and the head on what they gave, piece by piece:

    layers ──▶ [tokens, hidden], kept ─┬─▶ head ─▶ logits of the rows to draw
                                       └─▶ head ─▶ logits of some rows to score, again and again
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvcpu.blocks import Ints
from kvfleet.worker.model.attention.interface import AttentionBackend, attending
from kvfleet.worker.model.base import Abort, BlockMemory, StatePieces
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.gpu.decode_graphs import DecodeGraphs
from kvfleet.worker.model.gpu.gpu_memory import memory_of, stream_of
from kvfleet.worker.model.gpu.step_timer import timer_of
from kvfleet.worker.model.kv_pool import KvPool
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.recurrent import mixing
from kvfleet.worker.model.state_pool import StateMemory, StatePool, StateStep
from kvfleet.worker.schedule.step_plan import Slice
from kvproto.errors import EngineFailure, KvfleetError, OutOfMemory
from kvproto.messages import TokenLogprobs
from kvsampling.changes import moved
from kvsampling.draw import Drawn, Ran, ScoredPrompt
from kvsampling.sampler import begin, is_out_of_memory, score

SCORED_BYTES = 32 * 2**20  # of float32 logits at once, to score a prompt


class TorchRunner:
    """See `kvfleet.worker.model.base.ModelRunner`. Called from one thread."""

    _aborts_between_layers = True

    def __init__(
        self, loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, block_size: int, num_states: int = 0
    ) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._first_position = loaded.first_position
        self.device = str(loaded.device)
        self._backend = backend
        self.abort = Abort()
        self.overlaps = loaded.device.type == "cuda"
        self.meanwhile: Callable[[], None] = lambda: None
        self._timer = timer_of(loaded.device)
        self.graphs: DecodeGraphs | None = None
        self.pool = KvPool(loaded.kv_shape, num_blocks, block_size, loaded.device)
        self.read_kv, self.difference = self.pool.read, self.pool.difference
        self.num_states = num_states if loaded.states is not None else 0
        self.states = StatePool(loaded.states, max(1, num_states), loaded.device) if loaded.states is not None else None
        self._stream = stream_of(loaded.device)
        self.memory: BlockMemory = memory_of(self.pool, self._stream)
        self.state_memory: StatePieces | None = None
        if self.states is not None:
            self.state_memory = StateMemory(self.states, self.memory.kv_format)
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length
        self.eos_ids = loaded.eos_ids
        self.window: int | None = loaded.window
        self.num_layers = loaded.kv_shape.layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.bytes_per_block = self.pool.block_bytes
        exact = loaded.kv_shape.dtype is torch.float32 and not loaded.kv_shape.quantized
        self.tolerance = 1e-3 if exact else 0.1

    def run(self, slices: Sequence[Slice]) -> list[Ran]:
        batch = RaggedBatch.of(slices, self.block_size)
        self.pool.reach(int(batch.slots.max()) // self.block_size)
        for draw in batch.draws:
            if draw.matcher is not None:
                draw.matcher.prepare(draw.output_ids)
        try:
            with torch.inference_mode(), self._kept_layers(slices), self._mixing(batch) as step:
                self._timer.begin()
                drawing = begin(self._logits_to_draw(batch), batch.draws)
                self._timer.end()
                if self.overlaps:
                    self.meanwhile()
                drawn = iter(drawing())
                ran = [
                    self._ran(batch, at, None if part.draw is None else next(drawn)) for at, part in enumerate(slices)
                ]
                if any(part.scoring is not None for part in slices):
                    self._timer.end()
                if step is not None:
                    step.commit()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise OutOfMemory(f"a step of {len(batch.ids)} tokens does not fit into memory") from error
        finally:
            if self._stream is not None:
                self._stream.stepped()
        if self._stream is not None and not batch.draws:
            self._stream.wait_for_step()  # as draws do; blocks change hands between steps
        return ran

    def take_device_seconds(self) -> float | None:
        return self._timer.take()

    def _logits_to_draw(self, batch: RaggedBatch) -> Tensor:
        if self.graphs is not None and len(batch.rows) == len(batch.ids):  # all decode, and so does a recorded step
            self.abort.check()
            if (logits := self.graphs.logits(batch)) is not None:
                return logits
        return self.logits(batch, batch.rows)

    def logits(self, batch: RaggedBatch, rows: Ints) -> Tensor:
        """One forward pass; logits `[len(rows), vocab]` of the flat tokens `rows`. Raises StepAborted."""
        abort = self.abort if self._aborts_between_layers else None
        with attending(self._backend.prepare(batch, self.pool), abort):
            output = self._model(
                input_ids=self._move(batch.ids).unsqueeze(0),
                position_ids=self._move(batch.positions + self._first_position).unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._move(rows),
            )
        logits: Tensor = output.logits[0]
        return logits

    def _ran(self, batch: RaggedBatch, at: int, drawn: Drawn) -> Ran:
        part = batch.slices[at]
        if (scoring := part.scoring) is None or isinstance(drawn, KvfleetError):
            return drawn
        first, count = int(batch.first[at]) + scoring.first - 1 - part.start, len(scoring.ids)
        some = max(1, SCORED_BYTES // (4 * self.vocab_size))
        found: list[TokenLogprobs] = []
        try:
            for begin in range(0, count, some):
                ids = scoring.ids[begin : begin + some]
                rows = np.arange(first + begin, first + begin + len(ids))
                found += score(self.logits(batch, rows), ids, scoring.alternatives)
        except EngineFailure as error:
            return error
        return ScoredPrompt(tuple(found), drawn)

    @contextlib.contextmanager
    def _kept_layers(self, slices: Sequence[Slice]) -> Iterator[None]:
        """Where anything is to be scored, the model's layers run once within it. One that does not tell them from its
        head runs whole again, which gives the same."""
        layers: Any = self._model.base_model
        if layers is self._model or all(part.scoring is None for part in slices):
            yield
            return
        forward, kept = layers.forward, list[Any]()

        def once(*args: Any, **keywords: Any) -> Any:
            if not kept:
                kept.append(forward(*args, **keywords))
            return kept[0]

        layers.forward = once
        try:
            yield
        finally:
            layers.forward = forward

    @contextlib.contextmanager
    def _mixing(self, batch: RaggedBatch) -> Iterator[StateStep | None]:
        step = None if self.states is None else StateStep(self.states, batch)
        with mixing(step):
            yield step

    def copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            assert self.states is not None
            with torch.inference_mode():
                self.states.copy(copies)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self.pool.copy(copies)
        if copies and self._stream is not None:
            self._stream.stepped()

    def _move(self, array: Ints) -> Tensor:
        return moved(array, self._device)
