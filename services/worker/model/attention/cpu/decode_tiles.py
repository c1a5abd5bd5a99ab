"""One tile of a decode: LANES tokens of one kv head, with the query heads that share it. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from services.worker.model.attention.cpu import call as c
from services.worker.model.attention.cpu.chunks import DECODE_CHUNK
from services.worker.model.attention.cpu.pool_rows import ask_ahead, row_of, tile_of
from services.worker.model.attention.cpu.tiles import multiply
from services.worker.model.vector.cells import copy_bytes
from services.worker.model.vector.numbers import LANES
from services.worker.model.vector.products import dots
from services.worker.model.vector.rows import row_fill
from services.worker.model.vector.tile_products import MOST_ROWS, pair_dots, pair_weigh


@njit(nogil=True, error_model="numpy")
def score_tile(p, table, head, token, low, high, queries, scores, buffer, ahead):
    """Scores of the tokens from `token` on, of which those from `low` to `high` count; the others' are anything."""
    padded = p[c.PADDED]
    if p[c.PAIRS]:
        tile = row_of(p, table, head, token, 0)
        for g in range(p[c.GROUP]):
            ask_ahead(p, ahead, g, p[c.GROUP])
            pair_dots(queries + g * 2 * padded, tile, 2 * padded, padded, scores + 4 * g * DECODE_CHUNK)
        return
    keys = tile_of(p, table, head, token, low, high, 0, buffer)
    for g in range(p[c.GROUP]):
        ask_ahead(p, ahead, g, p[c.GROUP])
        dots(queries + g * 4 * padded, keys, 4 * padded, padded, scores + 4 * g * DECODE_CHUNK)


@njit(nogil=True, error_model="numpy")
def weigh_tile(p, table, head, token, low, high, weights, out, buffer, ahead):
    """Add the values from `low` to `high`, times their weights; the others are not even multiplied by zero."""
    padded = p[c.PADDED]
    if p[c.PAIRS]:
        tile = row_of(p, table, head, token, 1)
        ahead = ahead if ahead else tile
        if high - low < LANES:  # what has no weight may be NaN
            row_fill(buffer, LANES * padded // 2, np.float32(0.0))
            skipped = (low - token) * 2 * padded
            copy_bytes(tile + skipped, buffer + skipped, (high - low) * 2 * padded)
            tile = buffer
        for row in range(0, p[c.GROUP], MOST_ROWS):
            rows = min(MOST_ROWS, p[c.GROUP] - row)
            left = weights + row * 4 * DECODE_CHUNK
            pair_weigh(
                rows, left, 4 * DECODE_CHUNK, tile, 2 * padded, padded, out + row * 4 * padded, 4 * padded, ahead
            )
        return
    ask_ahead(p, ahead, 0, 1)
    values = tile_of(p, table, head, token, low, high, 1, buffer) + (low - token) * 4 * padded
    multiply(
        p[c.GROUP],
        padded // LANES,
        weights + 4 * (low - token),
        4 * DECODE_CHUNK,
        values,
        4 * padded,
        high - low,
        out,
        4 * padded,
    )
