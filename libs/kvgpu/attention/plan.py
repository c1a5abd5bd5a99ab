"""Cuts a step's attention into tiles that programs of a GPU can take. Pure, once per step for all layers.

A tile is some tokens of one sequence, with all query heads that share a kv head, or some of them where they are many:
rows of one matrix product. Prefill chunks and decodes are tiles alike. Where tiles are fewer than the device has room
for, long ones are cut along their keys, and what the parts give is combined afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcpu.blocks import Batch, KvShape

Table = NDArray[np.int32]

LEAST_ROWS = 16  # of a matrix product
PREFILL_ROWS = 64
TILE_NUMBERS = 16_384  # of a tile's results, which are in a multiprocessor's registers
SHORTEST_PART = 256  # keys of a part
WAVES = 4  # programs for each multiprocessor that a cut aims at

# Columns of `Tiles.items`.
TABLE, POSITION, TOKEN, COUNT, LOW, HIGH, PARTIAL = range(7)
ITEM_FIELDS = 7
# Columns of `Tiles.merges`.
MERGE_TOKEN, MERGE_COUNT, MERGE_FIRST, MERGE_PARTS = range(4)
MERGE_FIELDS = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """`items` `[n, 7]`: where the sequence's block table begins, the position of the tile's first token, its place in
    the flat arrays, how many tokens, the keys [low, high) that it looks at, and where its partial result goes (-1: it
    has none). `merges` `[m, 4]`: a tile's first token, its tokens, its first partial, how many."""

    rows: int  # of a tile: tokens times heads that share a kv head
    items: Table
    merges: Table
    partials: int


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """How the heads of one token are put into tiles: `count` of them, of `group` query heads each. `share` tiles that
    follow one another read the same kv head."""

    count: int
    group: int
    share: int
    padded: int  # numbers of a value, up to a power of two, and those that a key has more
    tail_padded: int
    prefill_rows: int

    @classmethod
    def of(cls, shape: KvShape, heads: int) -> HeadTiles:
        padded, tail = (max(16, _power(size)) for size in (shape.value_dim, shape.head_dim - shape.value_dim))
        most, group = max(LEAST_ROWS, TILE_NUMBERS // padded), heads // shape.kv_heads
        share = next(by for by in range(1, group + 1) if group % by == 0 and _power(group // by) <= most)
        return cls(shape.kv_heads * share, group // share, share, padded, tail, min(PREFILL_ROWS, most))


def _power(number: int) -> int:
    """Of two, from `number` on."""
    return 1 << max(0, number - 1).bit_length()


def rows_of(several: bool, group: int, prefill_rows: int = PREFILL_ROWS) -> int:
    """Of a tile; `several`: some sequence runs on more than one token."""
    return max(prefill_rows if several else LEAST_ROWS, _power(group))


def most_parts(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Items of a cut of so many decodes, however long they are."""
    return sequences + WAVES * multiprocessors // kv_heads


def cut(batch: Batch, kv_heads: int, group: int, multiprocessors: int, prefill_rows: int = PREFILL_ROWS) -> Tiles:
    """`group` query heads share a kv head, or a part of one: see `HeadTiles`."""
    rows = rows_of(bool((batch.counts > 1).any()), group, prefill_rows)
    tokens = rows // group
    tiles = -(-batch.counts // tokens)
    owner = np.repeat(np.arange(len(batch.counts)), tiles)
    lows = (np.arange(len(owner)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
    counts = np.minimum(batch.counts[owner] - lows, tokens)
    positions = batch.starts[owner] + lows
    keys = positions + counts
    fair = -(-int(keys.sum()) * kv_heads // (WAVES * multiprocessors))
    parts = -(-keys // max(SHORTEST_PART, fair))
    of = np.repeat(np.arange(len(owner)), parts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    step = -(-keys // parts)
    items = np.empty((len(of), ITEM_FIELDS), dtype=np.int32)
    items[:, TABLE] = batch.offsets[owner][of]
    items[:, POSITION] = positions[of]
    items[:, TOKEN] = (batch.first[owner] + lows)[of]
    items[:, COUNT] = counts[of]
    items[:, LOW] = number * step[of]
    items[:, HIGH] = np.minimum((number + 1) * step[of], keys[of])
    split = parts > 1
    kept = np.where(split, parts, 0)
    first = np.cumsum(kept) - kept
    items[:, PARTIAL] = np.where(split[of], first[of] + number, -1)
    merges = np.empty((int(split.sum()), MERGE_FIELDS), dtype=np.int32)
    merges[:, MERGE_TOKEN] = (batch.first[owner] + lows)[split]
    merges[:, MERGE_COUNT] = counts[split]
    merges[:, MERGE_FIRST] = first[split]
    merges[:, MERGE_PARTS] = parts[split]
    longest_first = np.argsort(items[:, LOW] - items[:, HIGH], kind="stable")
    return Tiles(rows, np.ascontiguousarray(items[longest_first]), merges, int(kept.sum()))
