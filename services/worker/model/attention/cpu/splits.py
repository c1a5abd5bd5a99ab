"""Partial results of decodes that were split along their sequence, put together. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math

import numpy as np
from numba import njit

from services.worker.model.attention.cpu import call as c
from services.worker.model.attention.cpu.softmax import MINUS_INFINITY, write_rows
from services.worker.model.attention.cpu.tiles import multiply
from services.worker.model.vector.cells import read_float, read_int, write_float
from services.worker.model.vector.numbers import LANES
from services.worker.model.vector.rows import row_scale


@njit(nogil=True, error_model="numpy")
def combine_splits(p, scratch):
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
                multiply(1, padded // LANES, scratch, 4, add, 4, 1, out, 4)
                sums = left * read_float(total + 4 * (group + g)) + right * read_float(one + 4 * (group + g))
                write_float(total + 4 * (group + g), sums)
                write_float(total + 4 * g, largest)
        write_rows(p, flat, head, group, total + 8 * group, total + 4 * group)
        at += 1
