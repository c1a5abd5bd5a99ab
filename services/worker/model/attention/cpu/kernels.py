"""Attention over the block-major pool on a CPU: what each thread does. Numba; reads K and V where they lie.

One call serves one layer of a step. Its work is cut into items beforehand (`plan`), and every thread of the team takes
items until none is left, so that a slow core takes fewer of them. An item is either

* a decode: one token's query heads that share a kv head, over a range of the tokens it can see; ranges of one sequence
  leave partial results that `combine` puts together, or
* a prefill: a tile of query tokens of one slice and their heads that share a kv head, over everything they can see.

Both go through K and V once, in chunks, with the running maximum and sum of online softmax (Milakov and Gimelshein,
arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691), all in fp32 whatever the pool holds. Heads that share K and V
share their loads. Tokens are visited in tiles of LANES; what lies beyond a sequence's end is read at most as a score
that is then overwritten, so that NaN in unused slots cannot spread.

All addresses are integers; `call` has the layout of the call block.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numba import carray, njit

from services.worker.model.attention.cpu import call as c
from services.worker.model.vector.cells import (
    copy_bytes,
    prefetch,
    read_float,
    read_int,
    take_ticket,
    write_byte,
    write_float,
)
from services.worker.model.vector.compiled import Entry, entry
from services.worker.model.vector.emit import CACHE_LINE, LANES
from services.worker.model.vector.products import dots, pair_product, product, transpose
from services.worker.model.vector.rows import interleave, narrow, row_cap, row_exp, row_fill, row_max, row_scale, widen
from services.worker.model.vector.statistics import row_sum

DECODE_CHUNK = 256  # tokens whose scores are kept at a time
PREFILL_CHUNK = 128
PAIRED_GROUP = 3  # heads that share K and V from which on preparing pairs pays for one token
MINUS_INFINITY = np.float32(-math.inf)
ONE = np.float32(1.0)
LEVELS = np.float32(127.0)  # of int8, on either side of zero


# ---------------------------------------------------------------------------------------------- numbers


@njit(nogil=True, error_model="numpy")
def _widen(kind, source, target, count, factor):
    """Stored numbers to floats; a row is filled up with zeros to a multiple of LANES."""
    if kind == c.FLOAT32:
        widen(0, source, target, count, factor)
    elif kind == c.BFLOAT16:
        widen(1, source, target, count, factor)
    elif kind == c.FLOAT16:
        widen(2, source, target, count, factor)
    else:
        widen(3, source, target, count, factor)
    if count % LANES:
        row_fill(target + 4 * count, LANES - count % LANES, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def _narrow(kind, source, target, count, factor):
    if kind == c.FLOAT32:
        narrow(0, source, target, count, factor)
    elif kind == c.BFLOAT16:
        narrow(1, source, target, count, factor)
    else:
        narrow(2, source, target, count, factor)


@njit(nogil=True, error_model="numpy")
def _multiply(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
    """out += left * right, in tiles whose accumulators fit the registers; `columns` counts vectors."""
    row = 0
    while row < rows:
        rest = rows - row
        a, o = left + row * left_bytes, out + row * out_bytes
        column = 0
        if rest >= 8:
            while column < columns:
                at = column * 4 * LANES
                if columns - column >= 2:
                    product(8, 2, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 2
                else:
                    product(8, 1, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 1
            row += 8
        elif rest >= 4:
            while column < columns:
                at = column * 4 * LANES
                if columns - column >= 4:
                    product(4, 4, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 4
                else:
                    product(4, 1, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 1
            row += 4
        elif rest >= 2:
            while column < columns:
                at = column * 4 * LANES
                if columns - column >= 4:
                    product(2, 4, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 4
                else:
                    product(2, 1, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 1
            row += 2
        else:
            while column < columns:
                at = column * 4 * LANES
                if columns - column >= 4:
                    product(1, 4, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 4
                else:
                    product(1, 1, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
                    column += 1
            row += 1


@njit(nogil=True, error_model="numpy")
def _score(rows, columns, queries, query_bytes, keys, key_bytes, depth, scores, score_bytes):
    """scores = queries * keys, keys transposed; rows that do not fill a tile are computed one by one."""
    row = 0
    while row < rows:
        a, o = queries + row * query_bytes, scores + row * score_bytes
        whole = rows - row >= 8
        column = 0
        while column < columns:
            at = column * 4 * LANES
            if whole:
                product(8, 2, a, query_bytes, keys + at, key_bytes, depth, o + at, score_bytes, 1)
                column += 2
            else:
                product(1, 4, a, query_bytes, keys + at, key_bytes, depth, o + at, score_bytes, 1)
                column += 4
        row += 8 if whole else 1


# ---------------------------------------------------------------------------------------------- the pool


@njit(nogil=True, error_model="numpy")
def _divided(token, p):
    """token // block_size: a division costs as much as a vector of work, and block sizes are powers of two."""
    return token >> p[c.BLOCK_SHIFT] if p[c.BLOCK_SHIFT] >= 0 else token // p[c.BLOCK_SIZE]


@njit(nogil=True, error_model="numpy")
def _run(p, table, head, token, value):
    """Address of the run (K or V of one block, layer and head) that `token` lies in."""
    block = read_int(table + 8 * _divided(token, p))
    row = (block * p[c.LAYERS] + p[c.LAYER]) * 2 + value
    return p[c.POOL] + (row * p[c.KV_HEADS] + head) * p[c.RUN_BYTES]


@njit(nogil=True, error_model="numpy")
def _stage(p, table, head, token, count, value, target):
    """K or V of `count` tokens from `token` on as rows of floats at `target`, filled up to a multiple of LANES."""
    size, kind, dim = p[c.BLOCK_SIZE], p[c.KV_KIND], p[c.HEAD_DIM]
    row_bytes = 4 * p[c.PADDED]
    item = c.ITEM_BYTES[kind]
    done = 0
    while done < count:
        offset = token + done - _divided(token + done, p) * size
        rows = min(size - offset, count - done)
        run = _run(p, table, head, token + done, value)
        source = run + offset * dim * item
        to = target + done * row_bytes
        if kind == c.INT8:
            scales = run + size * dim + 4 * offset
            for row in range(rows):
                _widen(kind, source + row * dim, to + row * row_bytes, dim, read_float(scales + 4 * row))
        elif dim == p[c.PADDED]:
            _widen(kind, source, to, rows * dim, ONE)
        else:
            for row in range(rows):
                _widen(kind, source + row * dim * item, to + row * row_bytes, dim, ONE)
        done += rows


@njit(nogil=True, error_model="numpy")
def _tile(p, table, head, token, low, high, value, buffer):
    """Address of rows for the LANES tokens from `token` on, of which those from `low` to `high` count.

    In place where the pool holds what the kernels compute with, else staged in `buffer`.
    """
    if p[c.DIRECT]:
        offset = token - _divided(token, p) * p[c.BLOCK_SIZE]
        return _run(p, table, head, token, value) + offset * p[c.HEAD_DIM] * 4
    _stage(p, table, head, low, high - low, value, buffer + (low - token) * 4 * p[c.PADDED])
    return buffer


@njit(nogil=True, error_model="numpy")
def _ahead(p, table, head, token, value, share):
    """Have the next pass over the tile that begins at `token` find it in the cache: blocks lie anywhere in memory, so
    the processor cannot guess them. `share`: of as many shares as heads, so that the requests do not come all at once.
    """
    if p[c.TILED]:
        row_bytes = p[c.HEAD_DIM] * c.ITEM_BYTES[p[c.KV_KIND]]
        offset = token - _divided(token, p) * p[c.BLOCK_SIZE]
        start = _run(p, table, head, token, value) + offset * row_bytes
        total = LANES * row_bytes
        if share < 0:
            prefetch(start, total)
        else:
            each = (total // p[c.GROUP] + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
            prefetch(start + share * each, max(0, min(each, total - share * each)))


# ---------------------------------------------------------------------------------------------- softmax


@njit(nogil=True, error_model="numpy")
def _fold(scores, count, top, total, out, size):
    """Online softmax: a row's new `count` scores become weights; what was summed before is scaled to match."""
    before = read_float(top)
    largest = max(before, row_max(scores, count))
    if largest == MINUS_INFINITY:
        hidden = row_sum(scores, count) == MINUS_INFINITY
        if not hidden:  # NaN is smaller than nothing, and must not pass for a hidden score
            write_float(total, np.float32(math.nan))
        row_fill(scores, count, np.float32(0.0))
        return
    correction = np.float32(0.0) if before == MINUS_INFINITY else np.float32(math.exp(before - largest))
    summed = row_exp(scores, count, largest)
    write_float(total, read_float(total) * correction + summed)
    write_float(top, largest)
    if correction != ONE:
        row_scale(out, size, correction)


@njit(nogil=True, error_model="numpy")
def _begin(p, item, rows, queries, out, tops, totals, flat):
    """Scaled queries as floats, accumulators at their start; row r is token r // group, head r % group."""
    group, dim, padded = p[c.GROUP], p[c.HEAD_DIM], p[c.PADDED]
    scaling = read_float(p[c.FLOATS])
    head = read_int(item + 8 * c.ITEM_HEAD)
    item_bytes = c.ITEM_BYTES[p[c.QUERY_KIND]] * p[c.QUERY_HEAD]
    for row in range(rows):
        source = (
            p[c.QUERY]
            + (flat + row // group) * p[c.QUERY_TOKEN] * c.ITEM_BYTES[p[c.QUERY_KIND]]
            + (head * group + row % group) * item_bytes
        )
        _widen(p[c.QUERY_KIND], source, queries + row * 4 * padded, dim, scaling)
    row_fill(out, rows * padded, np.float32(0.0))
    row_fill(tops, rows, MINUS_INFINITY)
    row_fill(totals, rows, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def _write(p, flat, head, rows, out, totals):
    """Accumulators, divided by their sums, to the layer's result `[T, heads, head_dim]`."""
    group, dim = p[c.GROUP], p[c.HEAD_DIM]
    size = c.ITEM_BYTES[p[c.QUERY_KIND]] * dim
    for row in range(rows):
        target = p[c.OUT] + ((flat + row // group) * p[c.HEADS] + head * group + row % group) * size
        _narrow(p[c.QUERY_KIND], out + row * 4 * p[c.PADDED], target, dim, ONE / read_float(totals + 4 * row))


# ---------------------------------------------------------------------------------------------- items


@njit(nogil=True, error_model="numpy")
def _decode(p, item, scratch):
    group, padded = p[c.GROUP], p[c.PADDED]
    part = p[c.SLICES] + 8 * c.SLICE_FIELDS * read_int(item + 8 * c.ITEM_SLICE)
    head = read_int(item + 8 * c.ITEM_HEAD)
    partial = read_int(item + 8 * c.ITEM_PARTIAL)
    flat = read_int(part + 8 * c.SLICE_FIRST)
    position = read_int(part + 8 * c.SLICE_START)
    table = p[c.TABLES] + 8 * read_int(part + 8 * c.SLICE_TABLE)
    low = read_int(item + 8 * c.ITEM_LOW)
    high = read_int(item + 8 * c.ITEM_HIGH)
    if p[c.WINDOW] > 0:
        low = max(low, position + 1 - p[c.WINDOW])
    if p[c.PAIRS] and group >= PAIRED_GROUP:
        _attend_pairs(p, flat, head, table, position, group, low, high, scratch)
        if partial >= 0:
            copy_bytes(scratch, p[c.PARTIALS] + partial * 4 * (group * (padded + 2)), 4 * group * (padded + 2))
        else:
            _write(p, flat, head, group, scratch + 8 * group, scratch + 4 * group)
        return
    cap = read_float(p[c.FLOATS] + 4)

    if partial >= 0:
        sums = p[c.PARTIALS] + partial * 4 * (group * (padded + 2))
        tops, totals, out = sums, sums + 4 * group, sums + 8 * group
    else:
        tops = scratch
        totals = tops + 4 * group
        out = totals + 4 * group
        scratch = out + 4 * group * padded
    queries = scratch
    scores = queries + 4 * group * padded
    buffer = scores + 4 * group * DECODE_CHUNK
    _begin(p, item, group, queries, out, tops, totals, flat)

    at = low // LANES * LANES
    while at < high:
        end = min(at + DECODE_CHUNK, high)
        for token in range(at, end, LANES):
            first_chunk = token + LANES < end and at < DECODE_CHUNK
            keys = _tile(p, table, head, token, max(token, low), min(token + LANES, end), 0, buffer)
            for g in range(group):
                _ahead(p, table, head, token, 1, g)
                if first_chunk:
                    _ahead(p, table, head, token + LANES, 0, g)
                dots(
                    queries + g * 4 * padded,
                    keys,
                    4 * padded,
                    padded,
                    scores + 4 * (g * DECODE_CHUNK + token - at),
                )
        count = (end - at + LANES - 1) // LANES * LANES
        for g in range(group):
            row = scores + 4 * g * DECODE_CHUNK
            if cap > 0:
                row_cap(row, count, cap)
            if low > at:
                row_fill(row, low - at, MINUS_INFINITY)
            row_fill(row + 4 * (end - at), count - (end - at), MINUS_INFINITY)
            _fold(row, count, tops + 4 * g, totals + 4 * g, out + g * 4 * padded, padded)
        for token in range(at, end, LANES):
            if token + DECODE_CHUNK < high:
                _ahead(p, table, head, token + DECODE_CHUNK, 0, -1)
            begin, stop = max(token, low), min(token + LANES, end)
            values = _tile(p, table, head, token, begin, stop, 1, buffer) + (begin - token) * 4 * padded
            weights = scores + 4 * (begin - at)
            _multiply(
                group, padded // LANES, weights, 4 * DECODE_CHUNK, values, 4 * padded, stop - begin, out, 4 * padded
            )
        at = end
    if partial < 0:
        _write(p, flat, head, group, out, totals)


@njit(nogil=True, error_model="numpy")
def _prefill(p, item, scratch):
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

    rows = (last - first) * group
    low = max(0, position + 1 - window) if window > 0 else 0
    if p[c.PAIRS]:
        _attend_pairs(p, flat, head, table, position, rows, low, high, scratch)
        _write(p, flat, head, rows, scratch + 8 * rows, scratch + 4 * rows)
        return
    queries = scratch
    out = queries + 4 * rows * padded
    tops = out + 4 * rows * padded
    totals = tops + 4 * rows
    scores = totals + 4 * rows
    keys = scores + 4 * rows * PREFILL_CHUNK
    values = keys + 4 * padded * PREFILL_CHUNK
    _begin(p, item, rows, queries, out, tops, totals, flat)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        begin = max(at, low)
        for token in range(at, end, LANES):
            tile = _tile(p, table, head, token, max(token, low), min(token + LANES, end), 0, values)
            transpose(tile, 4 * padded, keys + 4 * (token - at), 4 * PREFILL_CHUNK, padded)
        count = (end - at + LANES - 1) // LANES * LANES
        skipped = max(0, at - position) * group  # rows that see nothing of this chunk
        seeing = rows - skipped
        score = scores + skipped * 4 * PREFILL_CHUNK
        _score(
            seeing,
            PREFILL_CHUNK // LANES,
            queries + skipped * 4 * padded,
            4 * padded,
            keys,
            4 * PREFILL_CHUNK,
            p[c.HEAD_DIM],
            score,
            4 * PREFILL_CHUNK,
        )
        for row in range(skipped, rows):
            where = scores + row * 4 * PREFILL_CHUNK
            if cap > 0:
                row_cap(where, count, cap)
            own = position + row // group
            hidden = max(begin, own + 1 - window) - at if window > 0 else begin - at
            seen = min(end, own + 1) - at
            if hidden > 0:
                row_fill(where, min(hidden, count), MINUS_INFINITY)
            if seen < count:
                row_fill(where + 4 * seen, count - seen, MINUS_INFINITY)
            _fold(where, count, tops + 4 * row, totals + 4 * row, out + row * 4 * padded, padded)
        _stage(p, table, head, begin, end - begin, 1, values)
        _multiply(
            seeing,
            padded // LANES,
            score + 4 * (begin - at),
            4 * PREFILL_CHUNK,
            values,
            4 * padded,
            end - begin,
            out + skipped * 4 * padded,
            4 * padded,
        )
    _write(p, flat, head, rows, out, totals)


# ---------------------------------------------------------------------------------------------- items, bfloat16


@njit(nogil=True, error_model="numpy")
def _multiply_pairs(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
    """out += left * right for `rows`, a multiple of 4, and `columns` vectors, an even number."""
    row = 0
    while row < rows:
        a, o = left + row * left_bytes, out + row * out_bytes
        if rows - row >= 8:
            for column in range(0, columns, 2):
                at = column * 4 * LANES
                pair_product(8, 2, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
            row += 8
        else:
            for column in range(0, columns, 2):
                at = column * 4 * LANES
                pair_product(4, 2, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, 0)
            row += 4


@njit(nogil=True, error_model="numpy")
def _row_of(p, table, head, token, value):
    """Address of one token's numbers."""
    offset = token - _divided(token, p) * p[c.BLOCK_SIZE]
    return _run(p, table, head, token, value) + offset * p[c.HEAD_DIM] * c.ITEM_BYTES[p[c.KV_KIND]]


@njit(nogil=True, error_model="numpy")
def _stage_keys(p, table, head, at, end, keys):
    """Keys of a chunk, transposed, in pairs along the head: `[head_dim / 2][PREFILL_CHUNK]`."""
    dim = p[c.HEAD_DIM]
    for token in range(at, end, LANES):
        tile = _row_of(p, table, head, token, 0)
        transpose(tile, 2 * dim, keys + 4 * (token - at), 4 * PREFILL_CHUNK, dim // 2)
        prefetch(_row_of(p, table, head, token, 1), LANES * 2 * dim)


@njit(nogil=True, error_model="numpy")
def _stage_values(p, table, head, at, low, end, limit, zeros, values):
    """Values of a chunk in pairs of tokens: `[PREFILL_CHUNK / 2][head_dim]`; those out of reach count as zero."""
    dim = p[c.HEAD_DIM]
    for token in range(at, end, 2):
        row = _row_of(p, table, head, token, 1)
        first = row if token >= low else zeros
        second = row + 2 * dim if low <= token + 1 < end else zeros
        interleave(first, second, values + (token - at) * 2 * dim, dim)
        ahead = token + PREFILL_CHUNK
        if (token - at) % LANES == 0 and ahead < limit:
            prefetch(_row_of(p, table, head, ahead, 0), LANES * 2 * dim)


@njit(nogil=True, error_model="numpy")
def _attend_pairs(p, flat, head, table, position, rows, low, high, scratch):
    """Rows (token, head) as in `_begin` over the tokens from `low` to before `high`, multiplied in bfloat16 pairs.

    Weights are rounded to bfloat16, sums are fp32. Leaves maxima, sums and accumulators at the start of `scratch`.
    """
    group, dim, window = p[c.GROUP], p[c.HEAD_DIM], p[c.WINDOW]
    scaling, cap = read_float(p[c.FLOATS]), read_float(p[c.FLOATS] + 4)
    whole = (rows + 3) // 4 * 4
    tops = scratch
    totals = tops + 4 * rows
    out = totals + 4 * rows
    queries = out + 4 * whole * dim
    scores = queries + 2 * whole * dim
    weights = scores + 4 * whole * PREFILL_CHUNK
    keys = weights + 2 * whole * PREFILL_CHUNK
    values = keys + 2 * dim * PREFILL_CHUNK
    zeros = values + 2 * dim * PREFILL_CHUNK
    row_fill(out, whole * dim, np.float32(0.0))
    row_fill(queries, whole * dim // 2, np.float32(0.0))
    row_fill(weights, whole * PREFILL_CHUNK // 2, np.float32(0.0))
    row_fill(zeros, dim // 2, np.float32(0.0))
    row_fill(tops, rows, MINUS_INFINITY)
    row_fill(totals, rows, np.float32(0.0))
    for row in range(rows):
        source = (flat + row // group) * p[c.QUERY_TOKEN] + (head * group + row % group) * p[c.QUERY_HEAD]
        copy_bytes(p[c.QUERY] + 2 * source, queries + row * 2 * dim, 2 * dim)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        count = (end - at + LANES - 1) // LANES * LANES
        _stage_keys(p, table, head, at, end, keys)
        first = max(0, at - position) * group // 4 * 4  # rows before see nothing of this chunk
        score = scores + first * 4 * PREFILL_CHUNK
        row_fill(score, (whole - first) * PREFILL_CHUNK, np.float32(0.0))
        _multiply_pairs(
            whole - first,
            PREFILL_CHUNK // LANES,
            queries + first * 2 * dim,
            2 * dim,
            keys,
            4 * PREFILL_CHUNK,
            dim // 2,
            score,
            4 * PREFILL_CHUNK,
        )
        for row in range(first, rows):
            where = scores + row * 4 * PREFILL_CHUNK
            row_scale(where, count, scaling)
            if cap > 0:
                row_cap(where, count, cap)
            own = position + row // group
            hidden = max(low, own + 1 - window) - at if window > 0 else low - at
            seen = max(0, min(end, own + 1) - at)
            if hidden > 0:
                row_fill(where, min(hidden, count), MINUS_INFINITY)
            if seen < count:
                row_fill(where + 4 * seen, count - seen, MINUS_INFINITY)
            _fold(where, count, tops + 4 * row, totals + 4 * row, out + row * 4 * dim, dim)
            narrow(1, where, weights + row * 2 * PREFILL_CHUNK, count, ONE)
        _stage_values(p, table, head, at, low, end, high, zeros, values)
        _multiply_pairs(
            whole - first,
            dim // LANES,
            weights + first * 2 * PREFILL_CHUNK,
            2 * PREFILL_CHUNK,
            values,
            4 * dim,
            (end - at + 1) // 2,
            out + first * 4 * dim,
            4 * dim,
        )


@njit(nogil=True, error_model="numpy")
def _combine(p, scratch):
    """Partial decodes, one after the other in the order of their sequences, to results."""
    group, padded = p[c.GROUP], p[c.PADDED]
    size = 4 * group * (padded + 2)
    at = 0
    while at < p[c.SPLITS]:
        split = p[c.SPLIT_TABLE] + 8 * c.SPLIT_FIELDS * at
        flat, head = read_int(split), read_int(split + 8)
        first, parts = read_int(split + 16), read_int(split + 24)
        total = p[c.PARTIALS] + first * size
        for other in range(1, parts):
            one = total + other * size
            for g in range(group):
                theirs, ours = read_float(one + 4 * g), read_float(total + 4 * g)
                if theirs == MINUS_INFINITY:
                    continue
                largest = max(ours, theirs)
                left = np.float32(math.exp(ours - largest))
                right = np.float32(math.exp(theirs - largest))
                out, add = total + 8 * group + g * 4 * padded, one + 8 * group + g * 4 * padded
                row_scale(out, padded, left)
                write_float(scratch, right)
                _multiply(1, padded // LANES, scratch, 4, add, 4, 1, out, 4)
                sums = left * read_float(total + 4 * (group + g)) + right * read_float(one + 4 * (group + g))
                write_float(total + 4 * (group + g), sums)
                write_float(total + 4 * g, largest)
        _write(p, flat, head, group, total + 8 * group, total + 4 * group)
        at += 1


# ---------------------------------------------------------------------------------------------- storing


@njit(nogil=True, error_model="numpy")
def _store_row(kind, source, source_kind, run, offset, size, dim, scratch):
    """One token's K or V of one head into its run."""
    if kind != c.INT8:
        item = c.ITEM_BYTES[kind]
        copy_bytes(source, run + offset * dim * item, dim * item)
        return
    _widen(source_kind, source, scratch, dim, ONE)
    largest = np.float32(0.0)
    for i in range(dim):
        size_of_it = abs(read_float(scratch + 4 * i))
        if not size_of_it <= largest:  # a NaN becomes the scale: what is read back is none either
            largest = size_of_it
        if largest != largest:
            break
    scale = largest / LEVELS
    write_float(run + size * dim + 4 * offset, scale)
    inverse = ONE / scale if scale > 0 else np.float32(0.0)
    target = run + offset * dim
    for i in range(dim):
        write_byte(target + i, np.int32(np.rint(read_float(scratch + 4 * i) * inverse)))


@njit(nogil=True, error_model="numpy")
def _store(p, first, last, scratch):
    """K and V of the flat tokens from `first` to before `last` into the pool."""
    size, dim, kind, item = p[c.BLOCK_SIZE], p[c.HEAD_DIM], p[c.KV_KIND], c.ITEM_BYTES[p[c.QUERY_KIND]]
    for token in range(first, last):
        slot = read_int(p[c.SLOTS] + 8 * token)
        runs = ((slot // size) * p[c.LAYERS] + p[c.LAYER]) * 2
        for head in range(p[c.KV_HEADS]):
            key = p[c.KEY] + (token * p[c.KEY_TOKEN] + head * p[c.KEY_HEAD]) * item
            value = p[c.VALUE] + (token * p[c.VALUE_TOKEN] + head * p[c.VALUE_HEAD]) * item
            run = p[c.POOL] + (runs * p[c.KV_HEADS] + head) * p[c.RUN_BYTES]
            _store_row(kind, key, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)
            run += p[c.KV_HEADS] * p[c.RUN_BYTES]
            _store_row(kind, value, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)


# ---------------------------------------------------------------------------------------------- entries


@njit(nogil=True, error_model="numpy")
def _scratch(p):
    """This thread's own piece of the scratch memory."""
    return p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * p[c.SCRATCH_BYTES]


def _store_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    scratch = _scratch(p)
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.TICKET) * c.STORED_AT_ONCE
        if first >= p[c.TOKENS]:
            return
        _store(p, first, min(first + c.STORED_AT_ONCE, p[c.TOKENS]), scratch)


def _attend_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    scratch = _scratch(p)
    while True:
        at = take_ticket(p[c.SELF] + 8 * c.TICKET)
        if at >= p[c.ITEMS]:
            return
        item = p[c.ITEM_TABLE] + 8 * c.ITEM_FIELDS * at
        if read_int(item + 8 * c.ITEM_KIND) == c.DECODE:
            _decode(p, item, scratch)
        else:
            _prefill(p, item, scratch)


def _combine_all(block):
    p = carray(block, (c.FIELDS,), np.int64)
    _combine(p, p[c.SCRATCH])


@dataclass(frozen=True, slots=True)
class Entries:
    """C functions that take a call block. `store` and `attend` share their work among the threads that call them at
    once; `combine` is for one thread, after `attend`."""

    store: Entry
    attend: Entry
    combine: Entry


@cache
def compiled() -> Entries:
    """Compile, or load what was compiled before: seconds the first time, to be spent before a worker is ready."""
    return Entries(entry(_store_share), entry(_attend_share), entry(_combine_all))
