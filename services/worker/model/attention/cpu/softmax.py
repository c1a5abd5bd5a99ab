"""Rows of an item from queries to results, by online softmax. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math

import numpy as np
from numba import njit

from services.worker.model.attention.cpu import call as c
from services.worker.model.vector.cells import read_float, read_int, write_float
from services.worker.model.vector.conversion import from_floats, to_floats
from services.worker.model.vector.numbers import ITEM_BYTES
from services.worker.model.vector.rows import row_exp, row_fill, row_max, row_scale
from services.worker.model.vector.statistics import row_sum

MINUS_INFINITY = np.float32(-math.inf)
ONE = np.float32(1.0)


@njit(nogil=True, error_model="numpy")
def fold(scores, count, top, total, out, size):
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
def begin_rows(p, item, rows, queries, out, tops, totals, flat):
    """Scaled queries as floats, accumulators at their start; row r is token r // group, head r % group."""
    group, dim, padded = p[c.GROUP], p[c.HEAD_DIM], p[c.PADDED]
    scaling = read_float(p[c.FLOATS])
    head = read_int(item + 8 * c.ITEM_HEAD)
    item_bytes = ITEM_BYTES[p[c.QUERY_KIND]] * p[c.QUERY_HEAD]
    for row in range(rows):
        source = (
            p[c.QUERY]
            + (flat + row // group) * p[c.QUERY_TOKEN] * ITEM_BYTES[p[c.QUERY_KIND]]
            + (head * group + row % group) * item_bytes
        )
        to_floats(p[c.QUERY_KIND], source, queries + row * 4 * padded, dim, scaling)
    row_fill(out, rows * padded, np.float32(0.0))
    row_fill(tops, rows, MINUS_INFINITY)
    row_fill(totals, rows, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def write_rows(p, flat, head, rows, out, totals):
    """Accumulators, divided by their sums, to the layer's result `[T, heads, head_dim]`."""
    group, dim = p[c.GROUP], p[c.HEAD_DIM]
    size = ITEM_BYTES[p[c.QUERY_KIND]] * dim
    for row in range(rows):
        target = p[c.OUT] + ((flat + row // group) * p[c.HEADS] + head * group + row % group) * size
        from_floats(p[c.QUERY_KIND], out + row * 4 * p[c.PADDED], target, dim, ONE / read_float(totals + 4 * row))
