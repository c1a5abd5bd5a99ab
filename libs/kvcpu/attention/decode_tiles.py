"""One tile of a decode: LANES tokens of one kv head, with the query heads that share it. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.chunks import DECODE_CHUNK, SPREAD
from kvcpu.attention.pool_rows import row_of, tile_bytes, tile_of
from kvcpu.attention.tiles import multiply
from kvcpu.vector.cells import copy_bytes, prefetch
from kvcpu.vector.emit import CACHE_LINE
from kvcpu.vector.numbers import ITEM_BYTES, LANES
from kvcpu.vector.products import dots
from kvcpu.vector.rows import row_fill
from kvcpu.vector.tile_products import MOST_ROWS, pair_dots, pair_weigh, weigh


@njit(nogil=True, error_model="numpy")
def score_tile(p, table, head, token, low, high, queries, scores, buffer, ahead):
    """Scores of the tokens from `token` on, of which those from `low` to `high` count; the others' are anything.

    Meanwhile asks for the tile at `ahead`, in the pool's own kind of numbers; 0: for none.
    """
    group, padded = p[c.GROUP], p[c.PADDED]
    pairs, total = p[c.PAIRS], tile_bytes(p)
    each = total
    if group >= SPREAD:
        each = (total // group + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    asked = total if ahead == 0 else 0
    keys = row_of(p, table, head, token, 0) if pairs else tile_of(p, table, head, token, low, high, 0, buffer)
    for g in range(group):
        if asked < total:
            prefetch(ahead + asked, min(each, total - asked))
            asked += each
        if pairs:
            pair_dots(queries + g * 2 * padded, keys, 2 * padded, padded, scores + 4 * g * DECODE_CHUNK)
        else:
            dots(queries + g * 4 * padded, keys, 4 * padded, padded, scores + 4 * g * DECODE_CHUNK)


@njit(nogil=True, error_model="numpy")
def weigh_tile(p, table, head, token, low, high, weights, out, buffer, ahead):
    """Add the values from `low` to `high`, times their weights; the others are not even multiplied by zero.

    Meanwhile asks for the tile at `ahead`, in the pool's own kind of numbers; 0: for none.
    """
    group, padded = p[c.GROUP], p[c.PADDED]
    if group < SPREAD and ahead:
        prefetch(ahead, tile_bytes(p))
        ahead = 0
    if p[c.PAIRS]:
        _weigh_pairs(p, table, head, token, low, high, weights, out, buffer, ahead)
        return
    values = tile_of(p, table, head, token, low, high, 1, buffer) + (low - token) * 4 * padded
    weights += 4 * (low - token)
    row_bytes = 4 * DECODE_CHUNK
    if ahead == 0 or padded % (2 * LANES):
        multiply(group, padded // LANES, weights, row_bytes, values, 4 * padded, high - low, out, 4 * padded)
        return
    step = 2 * LANES * ITEM_BYTES[p[c.KV_KIND]]
    for row in range(0, group, MOST_ROWS):
        rows = min(MOST_ROWS, group - row)
        left, sums = weights + row * row_bytes, out + row * 4 * padded
        for column in range(0, padded, 2 * LANES):
            there, at = ahead + column // 2 * step, 4 * column
            weigh(rows, left, row_bytes, values + at, 4 * padded, high - low, sums + at, 4 * padded, there, step)


@njit(nogil=True, error_model="numpy")
def _weigh_pairs(p, table, head, token, low, high, weights, out, buffer, ahead):
    group, dim = p[c.GROUP], p[c.HEAD_DIM]
    tile = row_of(p, table, head, token, 1)
    there = ahead if ahead else tile  # it is in the cache already: asking for it costs next to nothing
    if high - low < LANES:  # what has no weight may be NaN
        row_fill(buffer, LANES * dim // 2, np.float32(0.0))
        skipped = (low - token) * 2 * dim
        copy_bytes(tile + skipped, buffer + skipped, (high - low) * 2 * dim)
        tile = buffer
    for row in range(0, group, MOST_ROWS):
        rows = min(MOST_ROWS, group - row)
        left, sums = weights + row * 4 * DECODE_CHUNK, out + row * 4 * dim
        pair_weigh(rows, left, 4 * DECODE_CHUNK, tile, 2 * dim, dim, sums, 4 * dim, there)
