"""A step's slices as flat arrays in host memory: a ragged batch without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvcpu.blocks import Batch, Ints
from kvfleet.worker.schedule.step_plan import Slice
from kvsampling.draw import Draw


@dataclass(frozen=True, slots=True)
class RaggedBatch(Batch):
    """`rows[j]` is the flat index whose logits `draws[j]` needs."""

    slices: Sequence[Slice]
    positions: Ints  # [T]
    rows: Ints
    draws: list[Draw]

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int) -> RaggedBatch:
        starts = np.array([part.start for part in slices], dtype=np.int64)
        counts = np.array([len(part.ids) for part in slices], dtype=np.int64)
        total = int(counts.sum())
        first = np.cumsum(counts) - counts
        ids = np.fromiter(chain.from_iterable(part.ids for part in slices), dtype=np.int64, count=total)
        positions = np.arange(total) + np.repeat(starts - first, counts)
        lengths = -(-(starts + counts) // block_size)
        offsets = np.cumsum(lengths) - lengths
        tables = np.empty(int(lengths.sum()), dtype=np.int64)
        for part, offset, length in zip(slices, offsets.tolist(), lengths.tolist(), strict=True):
            tables[offset : offset + length] = part.blocks[:length]
        blocks = tables[np.repeat(offsets, counts) + positions // block_size]
        drawing = [at for at, part in enumerate(slices) if part.draw is not None]
        return cls(
            ids=ids,
            slots=blocks * block_size + positions % block_size,
            first=first,
            starts=starts,
            counts=counts,
            offsets=offsets,
            tables=tables,
            slices=slices,
            positions=positions,
            rows=(first + counts - 1)[drawing],
            draws=[part.draw for part in slices if part.draw is not None],
        )
