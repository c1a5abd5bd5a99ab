"""Partial results of decodes that were split along their sequence, put together. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.softmax import (
    MINUS_INFINITY,
    accumulators_of,
    record_bytes,
    totals_of,
    write_rows,
)
from kvcpu.attention.tiles import multiply
from kvcpu.vector.cells import read_float, read_int, write_float
from kvcpu.vector.numbers import LANES
from kvcpu.vector.rows import row_scale


@njit(nogil=True, error_model="numpy")
def combine_splits(p, scratch):
    """Partial decodes, one after the other in the order of their sequences, to results."""
    padded = p[c.PADDED]
    size = record_bytes(p[c.SPAN] * p[c.GROUP], padded)
    at = 0
    while at < p[c.SPLITS]:
        split = p[c.SPLIT_TABLE] + 8 * c.SPLIT_FIELDS * at
        flat, head = read_int(split), read_int(split + 8)
        first, parts = read_int(split + 16), read_int(split + 24)
        rows = min(p[c.SPAN], p[c.KV_HEADS] - head) * p[c.GROUP]
        total = p[c.PARTIALS] + first * size
        for other in range(1, parts):
            one = total + other * size
            for row in range(rows):
                top, sums = total + 4 * row, totals_of(total, rows) + 4 * row
                theirs, ours = read_float(one + 4 * row), read_float(top)
                if theirs == MINUS_INFINITY:
                    continue
                largest = max(ours, theirs)
                left = np.float32(math.exp(ours - largest))
                right = np.float32(math.exp(theirs - largest))
                out = accumulators_of(total, rows) + row * 4 * padded
                add = accumulators_of(one, rows) + row * 4 * padded
                row_scale(out, padded, left)
                write_float(scratch, right)
                multiply(1, padded // LANES, scratch, 4, add, 4, 1, out, 4)
                write_float(sums, left * read_float(sums) + right * read_float(totals_of(one, rows) + 4 * row))
                write_float(top, largest)
        write_rows(p, flat, head, rows, rows, accumulators_of(total, rows), totals_of(total, rows))
        at += 1
