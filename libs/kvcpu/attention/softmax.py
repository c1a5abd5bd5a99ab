"""Rows of an item from queries to results, by online softmax. Numba."""

# mypy: ignore-errors
import math

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.attention_call import whole_lines
from kvcpu.vector.cells import copy_bytes, read_float, row_fill, write_float
from kvcpu.vector.conversion import narrow, to_floats
from kvcpu.vector.numbers import ITEM_BYTES
from kvcpu.vector.rows import row_cap, row_exp, row_exp_halves, row_max, row_scale, row_sum

MINUS_INFINITY = np.float32(-math.inf)
ONE = np.float32(1.0)

_whole_lines = njit(whole_lines)


@njit(nogil=True, error_model="numpy")
def record_bytes(rows, padded):
    """See `record_floats`: a record begins with its maxima."""
    return 8 * _whole_lines(rows) + 4 * rows * padded


@njit(nogil=True, error_model="numpy")
def totals_of(record, rows):
    return record + 4 * _whole_lines(rows)


@njit(nogil=True, error_model="numpy")
def accumulators_of(record, rows):
    return record + 8 * _whole_lines(rows)


@njit(nogil=True, error_model="numpy")
def clear_rows(record, rows, padded):
    row_fill(record, rows, MINUS_INFINITY)
    row_fill(totals_of(record, rows), rows, np.float32(0.0))
    row_fill(accumulators_of(record, rows), rows * padded, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def take_sinks(p, head, width, rows, record):
    """Sinks as the scores that are folded first, which have no values; rows as in `query_of`."""
    for row in range(rows):
        write_float(record + 4 * row, read_float(p[c.SINKS] + 4 * (head * p[c.GROUP] + row % width)))
        write_float(totals_of(record, rows) + 4 * row, ONE)


@njit(nogil=True, error_model="numpy")
def fold(scores, count, hidden, seen, factor, cap, top, total, out, size, halves):
    """Online softmax: a row's new `count` scores, times `factor` and capped, become weights; the sums so far are scaled
    to match. The first `hidden` scores and those from `seen` on have no weight. With `halves`, weights become bfloat16,
    in the first half of the row's memory."""
    if cap > 0:
        if factor != ONE:
            row_scale(scores, count, factor)
        row_cap(scores, count, cap)
        factor = ONE
    if hidden > 0:
        row_fill(scores, min(hidden, count), MINUS_INFINITY)
    if seen < count:
        row_fill(scores + 4 * seen, count - seen, MINUS_INFINITY)
    before = read_float(top)
    largest = max(before, row_max(scores, count) * factor)
    if largest == MINUS_INFINITY:
        hidden = row_sum(scores, count) == MINUS_INFINITY
        if not hidden:  # NaN is smaller than nothing, and must not pass for a hidden score
            write_float(total, np.float32(math.nan))
        row_fill(scores, count, np.float32(0.0))
        return
    correction = ONE
    if largest != before:
        correction = np.float32(0.0) if before == MINUS_INFINITY else np.float32(math.exp(before - largest))
    summed = row_exp_halves(scores, count, factor, largest) if halves else row_exp(scores, count, factor, largest)
    write_float(total, read_float(total) * correction + summed)
    write_float(top, largest)
    if correction != ONE:
        row_scale(out, size, correction)


@njit(nogil=True, error_model="numpy")
def query_of(p, flat, head, width, row):
    """Address of a row's query: row r is token r // width, and (r % width)th of the heads from kv head `head` on."""
    token, query = flat + row // width, head * p[c.GROUP] + row % width
    return p[c.QUERY] + (token * p[c.QUERY_TOKEN] + query * p[c.QUERY_HEAD]) * ITEM_BYTES[p[c.QUERY_KIND]]


@njit(nogil=True, error_model="numpy")
def take_rows(p, flat, head, width, rows, queries):
    """Queries, rows as in `query_of`: in pairs as they are, else as scaled floats."""
    kind, dim, scaling = p[c.QUERY_KIND], p[c.HEAD_DIM], read_float(p[c.FLOATS])
    for row in range(rows):
        source = query_of(p, flat, head, width, row)
        if p[c.PAIRS]:
            copy_bytes(source, queries + row * 2 * dim, 2 * dim)
        else:
            to_floats(kind, source, queries + row * 4 * p[c.PADDED], dim, scaling)


@njit(nogil=True, error_model="numpy")
def write_rows(p, flat, head, width, rows, out, totals):
    """Accumulators, divided by their sums, to the layer's result `[T, heads, value_dim]`; rows as in `query_of`."""
    dim = p[c.VALUE_DIM]
    size = ITEM_BYTES[p[c.QUERY_KIND]] * dim
    for row in range(rows):
        target = p[c.OUT] + ((flat + row // width) * p[c.HEADS] + head * p[c.GROUP] + row % width) * size
        narrow(p[c.QUERY_KIND], out + row * 4 * p[c.PADDED], target, dim, ONE / read_float(totals + 4 * row))
