"""Decodes: one token's query heads over a range of the tokens it sees. Numba.

An item has several kv heads: K of all heads of a block and layer is one piece of memory, V of them the next. Read in
this order, memory comes at nearly the rate of a plain read; the runs of one head alone come at two thirds of it.
"""

# mypy: ignore-errors
import math

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention import softmax
from kvcpu.attention.attention_call import DECODE_CHUNK, SPREAD
from kvcpu.attention.pool_rows import ahead_of, row_of, tile_bytes, tile_of
from kvcpu.attention.softmax import MINUS_INFINITY, ONE
from kvcpu.vector.cells import copy_bytes, prefetch, read_float, read_int, row_fill, write_float
from kvcpu.vector.emit import CACHE_LINE
from kvcpu.vector.numbers import ITEM_BYTES, LANES
from kvcpu.vector.products import MOST_ROWS, dots, pair_dots, pair_weigh, tiled, weigh
from kvcpu.vector.rows import row_scale

multiply = tiled((8, 2), (4, 4), (2, 4), (1, 4))


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
        record = p[c.PARTIALS] + partial * softmax.record_bytes(p[c.SPAN] * group, padded)
    else:
        scratch += softmax.record_bytes(rows, padded)
    tops, totals, out = record, softmax.totals_of(record, rows), softmax.accumulators_of(record, rows)
    query_bytes, weight_bytes = (2 * padded, 2) if p[c.PAIRS] else (4 * padded, 4)
    queries = scratch
    scores = queries + 4 * rows * padded
    buffer = scores + 4 * rows * DECODE_CHUNK
    softmax.clear_rows(record, rows, padded)
    if p[c.SINKS] and read_int(item + 8 * c.ITEM_LOW) == 0:  # in one part of a sequence
        softmax.take_sinks(p, head, rows, rows, record)
    softmax.take_rows(p, flat, head, rows, rows, queries)

    for at in range(low // LANES * LANES, high, DECODE_CHUNK):
        end = min(at + DECODE_CHUNK, high)
        for token in range(at, end, LANES):
            for h in range(heads):
                ahead = ahead_of(p, table, head + h, token, 1)
                row = h * group
                first, last = max(token, low), min(token + LANES, end)
                query, score = queries + row * query_bytes, scores + 4 * (row * DECODE_CHUNK + token - at)
                score_tile(p, table, head + h, token, first, last, query, score, buffer, ahead)
        count = (end - at + LANES - 1) // LANES * LANES
        for row in range(rows):
            where, top, total = scores + 4 * row * DECODE_CHUNK, tops + 4 * row, totals + 4 * row
            sums = out + row * 4 * padded
            softmax.fold(where, count, low - at, end - at, factor, cap, top, total, sums, padded, p[c.PAIRS])
        for token in range(at, end, LANES):
            for h in range(heads):
                ahead = ahead_of(p, table, head + h, token + DECODE_CHUNK, 0) if token + DECODE_CHUNK < high else 0
                row = h * group
                first, last = max(token, low), min(token + LANES, end)
                weights = scores + 4 * row * DECODE_CHUNK + weight_bytes * (token - at)
                weigh_tile(p, table, head + h, token, first, last, weights, out + row * 4 * padded, buffer, ahead)
    if partial < 0:
        softmax.write_rows(p, flat, head, rows, rows, out, totals)


@njit(nogil=True, error_model="numpy")
def score_tile(p, table, head, token, low, high, queries, scores, buffer, ahead):
    """Scores of the tokens from `token` on; only those from `low` to `high` mean anything. Prefetches the tile at
    `ahead`, in the pool's own kind of numbers (0: none)."""
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
    """Add the values from `low` to `high`, times their weights; the others are not even multiplied by zero. `ahead` as
    in `score_tile`."""
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


@njit(nogil=True, error_model="numpy")
def combine_splits(p, scratch):
    """Partial decodes, one after the other in the order of their sequences, to results."""
    padded = p[c.PADDED]
    size = softmax.record_bytes(p[c.SPAN] * p[c.GROUP], padded)
    for at in range(p[c.SPLITS]):
        split = p[c.SPLIT_TABLE] + 8 * c.SPLIT_FIELDS * at
        flat, head = read_int(split), read_int(split + 8)
        first, parts = read_int(split + 16), read_int(split + 24)
        rows = min(p[c.SPAN], p[c.KV_HEADS] - head) * p[c.GROUP]
        total = p[c.PARTIALS] + first * size
        for other in range(1, parts):
            one = total + other * size
            for row in range(rows):
                top, sums = total + 4 * row, softmax.totals_of(total, rows) + 4 * row
                theirs, ours = read_float(one + 4 * row), read_float(top)
                if theirs == MINUS_INFINITY:
                    continue
                largest = max(ours, theirs)
                left = np.float32(math.exp(ours - largest))
                right = np.float32(math.exp(theirs - largest))
                out = softmax.accumulators_of(total, rows) + row * 4 * padded
                add = softmax.accumulators_of(one, rows) + row * 4 * padded
                row_scale(out, padded, left)
                write_float(scratch, right)
                multiply(1, padded // LANES, scratch, 4, add, 4, 1, out, 4)
                write_float(sums, left * read_float(sums) + right * read_float(softmax.totals_of(one, rows) + 4 * row))
                write_float(top, largest)
        out = softmax.accumulators_of(total, rows)
        softmax.write_rows(p, flat, head, rows, rows, out, softmax.totals_of(total, rows))
