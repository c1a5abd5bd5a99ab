"""Norms and rotary embeddings, row by row in fp32: what each thread does. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from kvcpu.fused import fused_call as c
from kvcpu.vector.cells import read_float, take_ticket
from kvcpu.vector.conversion import from_floats, to_floats
from kvcpu.vector.numbers import FLOAT32, ITEM_BYTES
from kvcpu.vector.rows import row_affine, row_rotate, row_spread, row_sum

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@njit(nogil=True, error_model="numpy")
def _norm(p, row, scratch):
    size, kind = p[c.SIZE], p[c.KIND]
    to_floats(kind, p[c.X] + row * p[c.X_BYTES], scratch, size, ONE)
    mean = row_sum(scratch, size) / np.float32(size) if p[c.CENTERED] else ZERO
    variance = row_spread(scratch, size, mean) / np.float32(size)
    scale = np.float32(1.0 / math.sqrt(variance + read_float(p[c.EPSILON])))
    row_affine(scratch, size, mean, scale, p[c.WEIGHT], p[c.BIAS])
    from_floats(kind, scratch, p[c.OUT] + row * size * ITEM_BYTES[kind], size, ONE)


def norm_share(block):
    p = carray(block, (c.NORM_FIELDS,), np.int64)
    scratch = p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * p[c.SCRATCH_BYTES]
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.TICKET) * c.ROWS_AT_ONCE
        if first >= p[c.ROWS]:
            return
        for row in range(first, min(first + c.ROWS_AT_ONCE, p[c.ROWS])):
            _norm(p, row, scratch)


@njit(nogil=True, error_model="numpy")
def _rotate(p, x, heads, head_stride, cosines, sines, scratch):
    size, kind = p[c.SIZE], p[c.KIND]
    for head in range(heads):
        where = x + head * head_stride * ITEM_BYTES[kind]
        if kind == FLOAT32:
            row_rotate(where, cosines, sines, size // 2)
        else:
            to_floats(kind, where, scratch, size, ONE)
            row_rotate(scratch, cosines, sines, size // 2)
            from_floats(kind, scratch, where, size, ONE)


def rotate_share(block):
    p = carray(block, (c.ROTATION_FIELDS,), np.int64)
    size, kind = p[c.SIZE], p[c.KIND]
    item = ITEM_BYTES[kind]
    cosines = p[c.ROTATION_SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * p[c.ROTATION_SCRATCH_BYTES]
    sines = cosines + 4 * size
    scratch = sines + 4 * size
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.TICKET) * c.ROWS_AT_ONCE
        if first >= p[c.ROWS]:
            return
        for token in range(first, min(first + c.ROWS_AT_ONCE, p[c.ROWS])):
            to_floats(kind, p[c.COSINES] + token * size * item, cosines, size, ONE)
            to_floats(kind, p[c.SINES] + token * size * item, sines, size, ONE)
            x = p[c.X] + token * p[c.TOKEN_STRIDE] * item
            _rotate(p, x, p[c.HEADS], p[c.HEAD_STRIDE], cosines, sines, scratch)
            x = p[c.OTHER] + token * p[c.OTHER_TOKEN_STRIDE] * item
            _rotate(p, x, p[c.OTHER_HEADS], p[c.OTHER_HEAD_STRIDE], cosines, sines, scratch)
