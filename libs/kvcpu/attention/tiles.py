"""Products of rows in attention, in tiles whose accumulators fit the registers. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

from numba import njit

from kvcpu.vector.numbers import LANES
from kvcpu.vector.products import product


def _strip(rows, wide):
    """out += left * right for `rows` rows: columns `wide` vectors at a time, the rest one by one."""

    @njit(nogil=True, error_model="numpy")
    def strip(columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
        column = 0
        while column < columns:
            at = column * 4 * LANES
            if columns - column >= wide:
                product(rows, wide, left, left_bytes, right + at, right_bytes, depth, out + at, out_bytes, 0)
                column += wide
            else:
                product(rows, 1, left, left_bytes, right + at, right_bytes, depth, out + at, out_bytes, 0)
                column += 1

    return strip


_eight, _four, _two, _one = _strip(8, 2), _strip(4, 4), _strip(2, 4), _strip(1, 4)


@njit(nogil=True, error_model="numpy")
def multiply(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
    """out += left * right, in tiles whose accumulators fit the registers; `columns` counts vectors."""
    row = 0
    while row < rows:
        rest = rows - row
        a, o = left + row * left_bytes, out + row * out_bytes
        if rest >= 8:
            _eight(columns, a, left_bytes, right, right_bytes, depth, o, out_bytes)
            row += 8
        elif rest >= 4:
            _four(columns, a, left_bytes, right, right_bytes, depth, o, out_bytes)
            row += 4
        elif rest >= 2:
            _two(columns, a, left_bytes, right, right_bytes, depth, o, out_bytes)
            row += 2
        else:
            _one(columns, a, left_bytes, right, right_bytes, depth, o, out_bytes)
            row += 1


@njit(nogil=True, error_model="numpy")
def score_rows(rows, columns, queries, query_bytes, keys, key_bytes, depth, scores, score_bytes):
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
