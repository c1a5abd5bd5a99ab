"""Rows of stored numbers to rows of floats and back, of a kind known when they run. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, LANES
from kvcpu.vector.rows import narrow, row_fill, widen


@njit(nogil=True, error_model="numpy")
def to_floats(kind, source, target, count, factor):
    """Times `factor`; a row is filled up with zeros to a multiple of LANES."""
    if kind == FLOAT32:
        widen(0, source, target, count, factor)
    elif kind == BFLOAT16:
        widen(1, source, target, count, factor)
    elif kind == FLOAT16:
        widen(2, source, target, count, factor)
    else:
        widen(3, source, target, count, factor)
    if count % LANES:
        row_fill(target + 4 * count, LANES - count % LANES, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def from_floats(kind, source, target, count, factor):
    """Times `factor`, rounded to nearest; not to int8, which needs a scale."""
    if kind == FLOAT32:
        narrow(0, source, target, count, factor)
    elif kind == BFLOAT16:
        narrow(1, source, target, count, factor)
    else:
        narrow(2, source, target, count, factor)
