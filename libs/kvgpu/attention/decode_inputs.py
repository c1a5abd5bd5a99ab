"""What a decode step reads, at addresses that stay, so that a recorded step can be replayed with other sequences.

    host, pinned   ids │ positions │ slots │ items │ merges │ tables       one copy, as far as the tables reach
    device         ids │ positions │ slots │ items │ merges │ tables

A step of fewer sequences than were recorded is filled up with rows that store nothing and attend to nothing.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvcpu.blocks import Batch, Pool
from kvgpu.attention.backend import TablesOnDevice, TritonBackend, TritonStep, partial_results
from kvgpu.attention.plan import ITEM_FIELDS, MERGE_FIELDS, PARTIAL, HeadTiles, cut, most_parts, rows_of


class DecodeInputs:
    """Of up to `most` sequences, whose block tables have up to `blocks` entries together. The host's side may be filled
    once the device has read what was there."""

    def __init__(self, backend: TritonBackend, pool: Pool, heads: int, most: int, blocks: int) -> None:
        self._backend, self._pool, self._heads = backend, pool, heads
        device = backend.device
        self._by = HeadTiles.of(pool.shape, heads)
        parts = self._parts(most)
        self._ends = list(accumulate([2 * most, 2 * most, most, parts * ITEM_FIELDS, most * MERGE_FIELDS, blocks]))
        host = torch.zeros(self._ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host, self._device = host, torch.zeros_like(host, device=device)
        self._tile_rows = rows_of(False, self._by.group)
        self._partials = partial_results(self._by, parts, self._tile_rows, device)
        ids, positions, *_ = self._split(self._device)
        self.ids, self.positions = ids.view(torch.int64), positions.view(torch.int64)
        self.rows = torch.arange(most, device=device)

    def step(self, size: int) -> TritonStep:
        """Attention of the first `size` sequences, whatever they are filled with by then; now with none."""
        self._device.zero_()  # what is left of a larger step would reach past the end of this one
        _, _, slots, items, merges, tables = self._split(self._device)
        slots.fill_(-1)
        on = TablesOnDevice(
            self._tile_rows, items.view(-1, ITEM_FIELDS)[: self._parts(size)], merges.view(-1, MERGE_FIELDS)[:size],
            tables, slots[:size], *self._partials,
        )  # fmt: skip
        return TritonStep(self._backend, None, self._pool, on, self._heads)

    def fill(self, batch: Batch, size: int, first_position: int) -> None:
        """With `batch`, in which each of at most `size` sequences runs on one token."""
        tiles = cut(batch, self._by.count, self._by.group, self._backend.multiprocessors)
        count = len(batch.ids)
        ids, positions, slots, items, merges, tables = self._split(self._host.numpy())
        ids, positions = ids.view(np.int64), positions.view(np.int64)
        ids[count:size] = positions[count:size] = 0
        ids[:count], positions[:count] = batch.ids, batch.starts + first_position
        slots[:count], slots[count:size] = batch.slots, -1
        items, merges = items.reshape(-1, ITEM_FIELDS), merges.reshape(-1, MERGE_FIELDS)
        items[len(tiles.items) : self._parts(size)] = 0
        items[len(tiles.items) : self._parts(size), PARTIAL] = -1
        items[: len(tiles.items)] = tiles.items
        merges[len(tiles.merges) : size] = 0
        merges[: len(tiles.merges)] = tiles.merges
        tables[: len(batch.tables)] = batch.tables
        used = self._ends[-2] + len(batch.tables)
        self._device[:used].copy_(self._host[:used], non_blocking=True)

    def _parts(self, size: int) -> int:
        return most_parts(size, self._by.count, self._backend.multiprocessors)

    def _split(self, whole: Any) -> list[Any]:
        return [whole[begin:end] for begin, end in zip([0, *self._ends], self._ends, strict=False)]
