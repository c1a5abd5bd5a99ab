"""The runners of a group: the leader's tells the followers what it runs, and a follower's runs the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from kvcpu.blocks import Ints
from kvfleet.worker.model.attention.interface import AttentionBackend
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.kv_pool import PoolMemory
from kvfleet.worker.model.loader import LoadedModel
from kvfleet.worker.model.parallel.group import RankGroup
from kvfleet.worker.model.parallel.memory import GroupMemory
from kvfleet.worker.model.parallel.messages import Compare, Copies, Pass, ReadKv, Rows
from kvfleet.worker.model.runner import TorchRunner
from kvfleet.worker.schedule.step_plan import Slice
from kvsampling.draw import Ran


class GroupRunner(TorchRunner):
    """See `kvfleet.worker.model.base.ModelRunner`: the leader's, which alone draws. Each pass is told before it runs.

    A cancel is heard before ranks begin a pass, not between layers: they would part. Raises EngineFailure when the
    group is over, also where a pass does not fit into a rank's memory.
    """

    _aborts_between_layers = False

    def __init__(
        self, group: RankGroup, loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, block_size: int
    ) -> None:
        super().__init__(loaded, backend, num_blocks, block_size)
        self.group = group
        assert isinstance(self.memory, PoolMemory)
        self.memory = GroupMemory(group, self.pool, self.memory)
        self.bytes_per_block = self.memory.block_bytes
        self.read_kv, self.difference = self._read_kv, self._difference
        self._last: RaggedBatch | None = None

    def run(self, slices: Sequence[Slice]) -> list[Ran]:
        with self.group.watched():  # a GPU's pass is waited for where its tokens are drawn
            return super().run(slices)

    def logits(self, batch: RaggedBatch, rows: Ints) -> Tensor:
        self.abort.check()
        message = Rows(rows) if batch is self._last else Pass.of(batch, rows)
        self._last = batch
        with self.group.watched():
            self.group.tell(message)
            logits = super().logits(batch, rows)
        self.group.done = self.group.told
        return logits

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            with self.group.watched():
                self.group.tell(Copies(copies))
            self.group.done = self.group.told  # a target may be freed, and written, before a pass follows
        super().copy_blocks(copies)

    def _difference(self, block: int, other: int) -> float:
        spreads = [self.pool.spread(block, other), *self.group.ask(Compare(block, other))]
        largest = max(largest for _, largest in spreads)
        share = max(difference for difference, _ in spreads) / largest if largest else 0.0
        return share if all(map(math.isfinite, (share, *(one for spread in spreads for one in spread)))) else 1.0

    def _read_kv(self, blocks: Sequence[int], tokens: int, layer: int) -> tuple[Tensor, Tensor]:
        parts = [self.pool.read(blocks, tokens, layer), *self.group.ask(ReadKv(list(blocks), tokens, layer))]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys, dim=1), torch.cat(values, dim=1)


class FollowerRunner(TorchRunner):
    """Runs what the leader tells."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, num_blocks: int, block_size: int) -> None:
        super().__init__(loaded, backend, num_blocks, block_size)
        self._kept = ExitStack()
        self._last: RaggedBatch | None = None

    @torch.inference_mode()
    def obey(self, message: Any) -> Any:
        """Returns the answer, None where the leader waits for none."""
        match message:
            case Pass():
                self._kept.close()
                self._last = message.batch()
                self.pool.reach(int(self._last.slots.max()) // self.block_size)
                self._kept.enter_context(self._kept_layers(self._last.slices))
                self._follow(message.rows)
            case Rows():
                self._follow(message.rows)
            case Copies():
                self.copy_blocks(message.pairs)
            case Compare():
                return self.pool.spread(message.block, message.other)
            case ReadKv():
                return self.pool.read(message.blocks, message.tokens, message.layer)
        return None

    def _follow(self, rows: Ints) -> None:
        assert self._last is not None
        self.logits(self._last, rows)
        if self._stream is not None:
            self._stream.stepped()
