"""Prefills: a tile of query tokens of one slice over everything they see. Numba.

As floats, or, where the processor can, as bfloat16 that is multiplied as such in pairs.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.attention_call import PREFILL_CHUNK
from kvcpu.attention.pool_rows import row_of, stage, tile_of
from kvcpu.attention.softmax import (
    MINUS_INFINITY,
    ONE,
    accumulators_of,
    begin_rows,
    clear_rows,
    copy_rows,
    fold,
    record_bytes,
    totals_of,
    write_rows,
)
from kvcpu.attention.tiles import multiply, score_rows
from kvcpu.vector.cells import prefetch, read_float, read_int, row_fill
from kvcpu.vector.conversion import interleave
from kvcpu.vector.numbers import LANES
from kvcpu.vector.products import pair_product, transpose
from kvcpu.vector.rows import row_cap, row_scale


@njit(nogil=True, error_model="numpy")
def prefill(p, item, scratch):
    group, padded, window = p[c.GROUP], p[c.PADDED], p[c.WINDOW]
    part = p[c.SLICES] + 8 * c.SLICE_FIELDS * read_int(item + 8 * c.ITEM_SLICE)
    head = read_int(item + 8 * c.ITEM_HEAD)
    first = read_int(item + 8 * c.ITEM_LOW)  # query tokens of the slice, from here
    last = read_int(item + 8 * c.ITEM_HIGH)  # to before this one
    flat = read_int(part + 8 * c.SLICE_FIRST) + first
    table = p[c.TABLES] + 8 * read_int(part + 8 * c.SLICE_TABLE)
    position = read_int(part + 8 * c.SLICE_START) + first
    high = position + last - first
    cap = read_float(p[c.FLOATS] + 4)
    line = 4 * PREFILL_CHUNK  # bytes of a row's scores, or of a row of transposed keys

    rows = (last - first) * group
    low = max(0, position + 1 - window) if window > 0 else 0
    if p[c.PAIRS]:
        _attend_pairs(p, flat, head, table, position, rows, low, high, scratch)
        write_rows(p, flat, head, group, rows, accumulators_of(scratch, rows), totals_of(scratch, rows))
        return
    tops, totals, out = scratch, totals_of(scratch, rows), accumulators_of(scratch, rows)
    queries = scratch + record_bytes(rows, padded)
    scores = queries + 4 * rows * padded
    keys = scores + 4 * rows * PREFILL_CHUNK
    values = keys + 4 * padded * PREFILL_CHUNK
    clear_rows(scratch, rows, padded)
    begin_rows(p, flat, head, group, rows, queries)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        begin = max(at, low)
        for token in range(at, end, LANES):
            tile = tile_of(p, table, head, token, max(token, low), min(token + LANES, end), 0, values)
            transpose(tile, 4 * padded, keys + 4 * (token - at), line, padded)
        count = (end - at + LANES - 1) // LANES * LANES
        skipped = max(0, at - position) * group  # rows that see nothing of this chunk
        seeing = rows - skipped
        score = scores + skipped * line
        seen_queries, columns = queries + skipped * 4 * padded, (count // LANES + 3) // 4 * 4
        score_rows(seeing, columns, seen_queries, 4 * padded, keys, line, p[c.HEAD_DIM], score, line)
        for row in range(skipped, rows):
            where = scores + row * line
            if cap > 0:
                row_cap(where, count, cap)
            own = position + row // group
            hidden = max(begin, own + 1 - window) - at if window > 0 else begin - at
            seen = min(end, own + 1) - at
            if hidden > 0:
                row_fill(where, min(hidden, count), MINUS_INFINITY)
            if seen < count:
                row_fill(where + 4 * seen, count - seen, MINUS_INFINITY)
            fold(where, count, ONE, tops + 4 * row, totals + 4 * row, out + row * 4 * padded, padded, 0)
        stage(p, table, head, begin, end - begin, 1, values)
        weights, sums = score + 4 * (begin - at), out + skipped * 4 * padded
        multiply(seeing, padded // LANES, weights, line, values, 4 * padded, end - begin, sums, 4 * padded)
    write_rows(p, flat, head, group, rows, out, totals)


def _pair_products(fresh):
    """out = left * right (`fresh`), or out += left * right, for `rows`, a multiple of 4, and `columns` vectors, an even
    number."""

    @njit(nogil=True, error_model="numpy")
    def multiply(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
        row = 0
        while row < rows:
            a, o = left + row * left_bytes, out + row * out_bytes
            step = 8 if rows - row >= 8 else 4
            for column in range(0, columns, 2):
                at = column * 4 * LANES
                if step == 8:
                    pair_product(8, 2, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, fresh)
                else:
                    pair_product(4, 2, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, fresh)
            row += step

    return multiply


_score_pairs, _add_pairs = _pair_products(1), _pair_products(0)


@njit(nogil=True, error_model="numpy")
def _stage_keys(p, table, head, at, end, keys):
    """Keys of a chunk, transposed, in pairs along the head: `[head_dim / 2][PREFILL_CHUNK]`."""
    dim = p[c.HEAD_DIM]
    for token in range(at, end, LANES):
        tile = row_of(p, table, head, token, 0)
        transpose(tile, 2 * dim, keys + 4 * (token - at), 4 * PREFILL_CHUNK, dim // 2)
        prefetch(row_of(p, table, head, token, 1), LANES * 2 * dim)


@njit(nogil=True, error_model="numpy")
def _stage_values(p, table, head, at, low, end, limit, zeros, values):
    """Values of a chunk in pairs of tokens: `[PREFILL_CHUNK / 2][head_dim]`; those out of reach count as zero."""
    dim = p[c.HEAD_DIM]
    for token in range(at, end, 2):
        row = row_of(p, table, head, token, 1)
        first = row if token >= low else zeros
        second = row + 2 * dim if low <= token + 1 < end else zeros
        interleave(first, second, values + (token - at) * 2 * dim, dim)
        ahead = token + PREFILL_CHUNK
        if (token - at) % LANES == 0 and ahead < limit:
            prefetch(row_of(p, table, head, ahead, 0), LANES * 2 * dim)


@njit(nogil=True, error_model="numpy")
def _attend_pairs(p, flat, head, table, position, rows, low, high, scratch):
    """Rows (token, head) as in `begin_rows` over the tokens from `low` to before `high`, multiplied in bfloat16 pairs.

    Weights are rounded to bfloat16, sums are fp32. Leaves maxima, sums and accumulators at the start of `scratch`.
    """
    group, dim, window = p[c.GROUP], p[c.HEAD_DIM], p[c.WINDOW]
    scaling, cap = read_float(p[c.FLOATS]), read_float(p[c.FLOATS] + 4)
    whole, line = (rows + 3) // 4 * 4, 4 * PREFILL_CHUNK
    tops = scratch
    totals, out = totals_of(scratch, rows), accumulators_of(scratch, rows)
    queries = out + 4 * whole * dim
    scores = queries + 2 * whole * dim
    keys = scores + 4 * whole * PREFILL_CHUNK
    values = keys + 2 * dim * PREFILL_CHUNK
    zeros = values + 2 * dim * PREFILL_CHUNK
    row_fill(out, whole * dim, np.float32(0.0))
    row_fill(queries, whole * dim // 2, np.float32(0.0))
    row_fill(zeros, dim // 2, np.float32(0.0))
    row_fill(tops, rows, MINUS_INFINITY)
    row_fill(totals, rows, np.float32(0.0))
    copy_rows(p, flat, head, group, rows, queries)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        count = (end - at + LANES - 1) // LANES * LANES
        _stage_keys(p, table, head, at, end, keys)
        first = max(0, at - position) * group // 4 * 4  # rows before see nothing of this chunk
        score = scores + first * line
        seen_queries, columns = queries + first * 2 * dim, (count // LANES + 1) // 2 * 2
        _score_pairs(whole - first, columns, seen_queries, 2 * dim, keys, line, dim // 2, score, line)
        for row in range(first, rows):
            where = scores + row * line
            if cap > 0:
                row_scale(where, count, scaling)
                row_cap(where, count, cap)
            own = position + row // group
            hidden = max(low, own + 1 - window) - at if window > 0 else low - at
            seen = max(0, min(end, own + 1) - at)
            if hidden > 0:
                row_fill(where, min(hidden, count), MINUS_INFINITY)
            if seen < count:
                row_fill(where + 4 * seen, count - seen, MINUS_INFINITY)
            factor = ONE if cap > 0 else scaling
            fold(where, count, factor, tops + 4 * row, totals + 4 * row, out + row * 4 * dim, dim, 1)
        _stage_values(p, table, head, at, low, end, high, zeros, values)
        weights, sums = score, out + first * 4 * dim
        _add_pairs(whole - first, dim // LANES, weights, line, values, 4 * dim, (end - at + 1) // 2, sums, 4 * dim)
