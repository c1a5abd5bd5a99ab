"""Decodes: one token's query heads over a range of the tokens it sees. Numba.

An item has several kv heads, because K of all heads of a block and layer is one piece of memory and V of them is the
next: read in this order, a chunk at a time, memory comes at nearly the rate of a plain read, where the runs of one head
lie far from one another and come at two thirds of it.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.chunks import DECODE_CHUNK
from kvcpu.attention.decode_tiles import score_tile, weigh_tile
from kvcpu.attention.pool_rows import ahead_of
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
from kvcpu.vector.cells import read_float, read_int
from kvcpu.vector.numbers import LANES
from kvcpu.vector.rows import row_cap, row_fill, row_scale


@njit(nogil=True, error_model="numpy")
def decode(p, item, scratch):
    group, padded = p[c.GROUP], p[c.PADDED]
    part = p[c.SLICES] + 8 * c.SLICE_FIELDS * read_int(item + 8 * c.ITEM_SLICE)
    head = read_int(item + 8 * c.ITEM_HEAD)
    heads = min(p[c.SPAN], p[c.KV_HEADS] - head)
    rows = heads * group
    partial = read_int(item + 8 * c.ITEM_PARTIAL)
    flat = read_int(part + 8 * c.SLICE_FIRST)
    position = read_int(part + 8 * c.SLICE_START)
    table = p[c.TABLES] + 8 * read_int(part + 8 * c.SLICE_TABLE)
    low = read_int(item + 8 * c.ITEM_LOW)
    high = read_int(item + 8 * c.ITEM_HIGH)
    if p[c.WINDOW] > 0:
        low = max(low, position + 1 - p[c.WINDOW])
    scaling, cap = read_float(p[c.FLOATS]), read_float(p[c.FLOATS] + 4)
    factor = scaling if p[c.PAIRS] else ONE  # queries are scaled beforehand otherwise

    record = scratch
    if partial >= 0:
        record = p[c.PARTIALS] + partial * record_bytes(p[c.SPAN] * group, padded)
    else:
        scratch += record_bytes(rows, padded)
    tops, totals, out = record, totals_of(record, rows), accumulators_of(record, rows)
    query_bytes, weight_bytes = (2 * padded, 2) if p[c.PAIRS] else (4 * padded, 4)
    queries = scratch
    scores = queries + 4 * rows * padded
    buffer = scores + 4 * rows * DECODE_CHUNK
    clear_rows(record, rows, padded)
    if p[c.PAIRS]:
        copy_rows(p, flat, head, rows, rows, queries)
    else:
        begin_rows(p, flat, head, rows, rows, queries)

    at = low // LANES * LANES
    while at < high:
        end = min(at + DECODE_CHUNK, high)
        for token in range(at, end, LANES):
            for h in range(heads):
                ahead = ahead_of(p, table, head + h, token, 1)
                row = h * group
                score_tile(
                    p,
                    table,
                    head + h,
                    token,
                    max(token, low),
                    min(token + LANES, end),
                    queries + row * query_bytes,
                    scores + 4 * (row * DECODE_CHUNK + token - at),
                    buffer,
                    ahead,
                )
        count = (end - at + LANES - 1) // LANES * LANES
        for row in range(rows):
            where = scores + 4 * row * DECODE_CHUNK
            if cap > 0:
                row_scale(where, count, factor)
                row_cap(where, count, cap)
            if low > at:
                row_fill(where, low - at, MINUS_INFINITY)
            row_fill(where + 4 * (end - at), count - (end - at), MINUS_INFINITY)
            once = ONE if cap > 0 else factor
            fold(where, count, once, tops + 4 * row, totals + 4 * row, out + row * 4 * padded, padded, p[c.PAIRS])
        for token in range(at, end, LANES):
            for h in range(heads):
                ahead = ahead_of(p, table, head + h, token + DECODE_CHUNK, 0) if token + DECODE_CHUNK < high else 0
                row = h * group
                weigh_tile(
                    p,
                    table,
                    head + h,
                    token,
                    max(token, low),
                    min(token + LANES, end),
                    scores + 4 * row * DECODE_CHUNK + weight_bytes * (token - at),
                    out + row * 4 * padded,
                    buffer,
                    ahead,
                )
        at = end
    if partial < 0:
        write_rows(p, flat, head, rows, rows, out, totals)
