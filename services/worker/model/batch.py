"""A step's slices as flat arrays: a ragged batch without padding. Host memory only; the runner moves it.

`[T]` below is all tokens of all slices, one after the other, `[S]` the slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvcpu.blocks import Ints
from kvfleet.worker.schedule.step_plan import Draw, Slice


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """`rows[j]` is the flat index whose logits `draws[j]` needs."""

    slices: Sequence[Slice]
    ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T], block * block_size + offset: where K and V of the token go
    first: Ints  # [S], where each slice begins in the flat arrays
    starts: Ints  # [S], position of its first token
    counts: Ints  # [S], how many tokens it has
    offsets: Ints  # [S], where its block table begins in `tables`
    tables: Ints  # blocks of all slices, up to their last token's
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
            slices,
            ids,
            positions,
            blocks * block_size + positions % block_size,
            first,
            starts,
            counts,
            offsets,
            tables,
            (first + counts - 1)[drawing],
            [part.draw for part in slices if part.draw is not None],
        )
