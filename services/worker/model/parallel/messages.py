"""What a group's leader tells its followers. Plain values; pickled, as both ends are one worker's own processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvcpu.blocks import Ints
from kvfleet.worker.model.assembly import KvDtype
from kvfleet.worker.model.attention.choice import Attention
from kvfleet.worker.model.batch import RaggedBatch
from kvfleet.worker.model.loader import Device, Dtype, LoadFormat
from kvfleet.worker.schedule.step_plan import Scoring, Slice


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What all ranks load and build. `share` is a rank's of its free memory for KV blocks, `threads` are a
    rank's."""

    ranks: int
    folder: Path
    load_format: LoadFormat = "auto"
    dtype: Dtype = "auto"
    device: Device = "auto"
    kv_dtype: KvDtype = "auto"
    block_size: int = 16
    step_tokens: int = 2048
    blocks: int | None = None
    share: float = 0.1
    slots: int = 256
    attention: Attention = "auto"
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Begin:
    plan: RankPlan
    rank: int
    meeting: Path  # a file by which the ranks find each other


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass. `kept`: its layers' output is kept, as `Rows` may follow."""

    arrays: tuple[Ints, ...]  # of a RaggedBatch: ids, slots, first, starts, counts, offsets, tables, positions
    rows: Ints
    kept: bool

    @classmethod
    def of(cls, batch: RaggedBatch, rows: Ints) -> Pass:
        arrays = (
            batch.ids, batch.slots, batch.first, batch.starts, batch.counts, batch.offsets, batch.tables,
            batch.positions,
        )  # fmt: skip
        return cls(arrays, rows, any(part.scoring is not None for part in batch.slices))

    def batch(self) -> RaggedBatch:
        """Without draws and scores, which are the leader's: `Scoring` tells only that there are some."""
        ids, slots, first, starts, counts, offsets, tables, positions = self.arrays
        scoring = Scoring(0, (), 0) if self.kept else None
        ends = np.append(offsets[1:], len(tables)).tolist()
        parts = zip(first.tolist(), counts.tolist(), starts.tolist(), offsets.tolist(), ends, strict=True)
        flat: Any = ids
        flat_tables: Any = tables
        slices = [
            Slice(flat[at : at + count], start, flat_tables[begin:end], None, scoring)
            for at, count, start, begin, end in parts
        ]
        return RaggedBatch(ids, slots, first, starts, counts, offsets, tables, slices, positions, self.rows, [])


@dataclass(frozen=True, slots=True)
class Rows:
    """The head again, on other rows of the last pass."""

    rows: Ints


@dataclass(frozen=True, slots=True)
class Copies:
    pairs: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Compare:
    """The answer is `KvPool.spread`."""

    block: int
    other: int


@dataclass(frozen=True, slots=True)
class ReadKv:
    """The answer is K and V of the follower's heads."""

    blocks: Sequence[int]
    tokens: int
    layer: int


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that all ranks share; its file descriptor comes behind. Not answered."""

    size: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the parts of a block to or from a place in a region; a follower first comes to the message `after`."""

    write: bool  # to the block
    block: int
    region: int
    offset: int
    after: int
