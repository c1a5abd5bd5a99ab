"""Cuts a step's attention into items that threads can take. Pure, once per step for all layers.

Work is counted in pairs of (query row, visible token). Prefills are cut along their queries. All decode items of a step
have the same number of kv heads, as many as leave items for all threads; those longer than a thread's fair share are
also cut along the sequence. Costly items come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcpu.attention import attention_call as c
from kvcpu.blocks import Batch, Ints

TILE_ROWS = 128  # query rows of a prefill item: enough to pay for staging K and V, few enough for the cache
SHORTEST_PART = 256  # tokens of a split decode
SHARES = 4  # items per thread that a split of a prefill aims at
DECODE_SHARES = 2  # and one of a decode, whose parts cost a combination and begin with memory that nobody asked for


@dataclass(frozen=True, slots=True)
class Items:
    """Tables in the layout of `attention_call`."""

    items: Ints
    slices: Ints
    splits: Ints
    partials: int  # how many partial results there are
    span: int  # kv heads of a decode item


def cut(batch: Batch, kv_heads: int, group: int, threads: int, widest: int = 1) -> Items:
    """`group` query heads share a kv head; a decode item has up to `widest` kv heads."""
    starts, counts = batch.starts, batch.counts
    slices = np.empty((len(starts), c.SLICE_FIELDS), dtype=np.int64)
    slices[:, c.SLICE_FIRST], slices[:, c.SLICE_START], slices[:, c.SLICE_TABLE] = batch.first, starts, batch.offsets
    work = int((counts * (starts + (counts + 1) / 2)).sum() * kv_heads * group)
    decoding = np.flatnonzero(counts == 1)
    shares = threads * DECODE_SHARES
    span = _span(starts[decoding] + 1, kv_heads, group, min(widest, kv_heads), work // shares, shares)
    decodes, splits, partials = _decodes(decoding, batch, kv_heads, group, span, work // shares)
    several: list[int] = np.flatnonzero(counts > 1).tolist()
    chunks = [_prefill(at, int(counts[at]), int(starts[at]), kv_heads, group, threads) for at in several]
    items = np.concatenate([*(items for items, _ in chunks), decodes[0]])
    cost = np.concatenate([*(cost for _, cost in chunks), decodes[1]])
    return Items(np.ascontiguousarray(items[np.argsort(-cost, kind="stable")]), slices, splits, partials, span)


def _prefill(at: int, count: int, start: int, kv_heads: int, group: int, threads: int) -> tuple[Ints, Ints]:
    """Items of one slice, and their cost: tiles of queries times kv heads."""
    fair = -(-count * kv_heads // (threads * SHARES))
    tokens = max(1, min(max(TILE_ROWS // group, 1), fair))
    lows = np.arange(0, count, tokens, dtype=np.int64)
    highs = np.minimum(lows + tokens, count)
    items = _items(c.PREFILL, at, np.arange(kv_heads), lows[:, None], highs[:, None])
    cost = np.repeat((highs - lows) * (start + highs) * group, kv_heads)
    return items.reshape(-1, c.ITEM_FIELDS), cost


def _items(kind: int, of: Ints | int, heads: Ints, lows: Ints, highs: Ints) -> Ints:
    """`[ranges, heads, ITEM_FIELDS]`, without partial results."""
    items = np.empty((len(lows), len(heads), c.ITEM_FIELDS), dtype=np.int64)
    for column, values in enumerate((kind, of, heads, lows, highs, -1)):
        items[:, :, column] = values
    return items


def _parts(ends: Ints, rows: int, fair: int) -> Ints:
    """In how many parts decodes of `rows` rows are cut along their sequences, which end at `ends`."""
    return -(-ends // max(SHORTEST_PART, fair // rows))


def _span(ends: Ints, kv_heads: int, group: int, widest: int, fair: int, wanted: int) -> int:
    """Kv heads of an item: so few that there are as many items as `wanted`, if cutting along sequences gives fewer."""
    span = widest
    while span > 1 and _parts(ends, span * group, fair).sum() * -(-kv_heads // span) < wanted:
        span = -(-span // 2)
    return -(-kv_heads // -(-kv_heads // span))  # as even as it can be


def _decodes(
    which: Ints, batch: Batch, kv_heads: int, group: int, span: int, fair: int
) -> tuple[tuple[Ints, Ints], Ints, int]:
    """Items of all decodes and their cost, the split table, and how many partials there are."""
    ends, first = batch.starts + batch.counts, batch.first
    parts = _parts(ends[which], span * group, fair)
    step = -(-ends[which] // parts)
    heads = np.arange(0, kv_heads, span)
    owner = np.repeat(np.arange(len(which)), parts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    lows = number * step[owner]
    highs = np.minimum(lows + step[owner], ends[which][owner])
    items = _items(c.DECODE, which[owner][:, None], heads, lows[:, None], highs[:, None])
    split = np.flatnonzero(parts > 1)
    splits = np.empty((len(split), len(heads), c.SPLIT_FIELDS), dtype=np.int64)
    partials = 0
    if len(split):  # partials of one (sequence, head) follow one another
        before = np.cumsum(np.where(parts > 1, parts, 0)) - np.where(parts > 1, parts, 0)
        base, place = before * len(heads), np.arange(len(heads))
        numbered = base[owner][:, None] + place * parts[owner][:, None] + number[:, None]
        items[:, :, c.ITEM_PARTIAL] = np.where((parts[owner] > 1)[:, None], numbered, -1)
        splits[:, :, 0] = first[which][split][:, None]
        splits[:, :, 1] = heads
        splits[:, :, 2] = base[split][:, None] + place * parts[split][:, None]
        splits[:, :, 3] = parts[split][:, None]
        partials = int(parts[split].sum()) * len(heads)
    cost = ((highs - lows) * group)[:, None] * np.minimum(span, kv_heads - heads)
    return (items.reshape(-1, c.ITEM_FIELDS), cost.reshape(-1)), splits.reshape(-1, c.SPLIT_FIELDS), partials
