"""A step's slices as flat arrays: a ragged batch without padding. Host memory only; the runner moves it.

`[T]` below is all tokens of all slices, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.step_plan import Draw, Slice

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """`first[i]` is where slice i begins in the flat arrays; `rows[j]` the flat index whose logits `draws[j]` needs."""

    slices: Sequence[Slice]
    ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T], block * block_size + offset: where K and V of the token go
    first: list[int]
    rows: Ints
    draws: list[Draw]

    @classmethod
    def of(cls, slices: Sequence[Slice], block_size: int) -> RaggedBatch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        first: list[int] = []
        rows: list[int] = []
        draws: list[Draw] = []
        for part in slices:
            first.append(len(ids))
            ids.extend(part.ids)
            positions.extend(range(part.start, part.end))
            for position in range(part.start, part.end):
                slots.append(part.blocks[position // block_size] * block_size + position % block_size)
            if part.draw is not None:
                rows.append(len(ids) - 1)
                draws.append(part.draw)
        return cls(slices, _array(ids), _array(positions), _array(slots), first, _array(rows), draws)


def _array(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
