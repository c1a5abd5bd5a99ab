"""Products on packed weights, norms and rotary embeddings: what each thread does. Numba.

A weight `[out, in]` is packed in panels of PANEL output columns, `[panel][in][PANEL]`, of bfloat16 in pairs along the
input, `[panel][in / 2][PANEL][2]`, so that it is read from front to back whatever the number of rows. A panel meets
ROWS_AT_ONCE rows of x at a time, in tiles of 8 rows whose sums stay in registers. A gated layer
(`act(gate(x)) * up(x)`) has a panel of the gate before each panel of the other. Norms and rotations work in fp32.
"""

# mypy: ignore-errors
import math

import numpy as np
from numba import carray, njit

from kvcpu.layers import layer_call as c
from kvcpu.vector.cells import copy_bytes, read_float, row_fill, take_ticket
from kvcpu.vector.conversion import line_to_halves, narrow, to_floats
from kvcpu.vector.numbers import BFLOAT16, FLOAT32, ITEM_BYTES
from kvcpu.vector.products import pair_product, tiled
from kvcpu.vector.rows import row_act, row_add, row_affine, row_gate, row_rotate, row_spread, row_sum

ONE = np.float32(1.0)
ZERO = np.float32(0.0)
LINE = 4 * c.PANEL  # bytes of a panel's row, of floats or of pairs

_add_products, _add_pair_products = tiled((8, 2), (4, 2), (1, 2)), tiled((8, 2), (4, 2), (1, 2), by=pair_product)


@njit(nogil=True, error_model="numpy")
def _sum_panel(p, panel, first, rows, sums):
    """The product of `rows` rows of x from `first` on and one panel, bias included."""
    if p[c.BIAS]:
        for row in range(rows):
            copy_bytes(p[c.BIAS] + panel * LINE, sums + row * LINE, LINE)
    else:
        row_fill(sums, rows * c.PANEL, ZERO)
    item = ITEM_BYTES[p[c.KIND]]
    for start in range(0, p[c.DEPTH], c.DEPTH_AT_ONCE):
        depth = min(c.DEPTH_AT_ONCE, p[c.DEPTH] - start)
        x = p[c.X] + first * p[c.X_BYTES] + start * item
        weight = p[c.WEIGHT] + (panel * p[c.DEPTH] + start) * item * c.PANEL
        if p[c.KIND] == FLOAT32:
            _add_products(rows, 2, x, p[c.X_BYTES], weight, LINE, depth, sums, LINE)
        else:
            _add_pair_products(rows, 2, x, p[c.X_BYTES], weight, LINE, depth // 2, sums, LINE)


@njit(nogil=True, error_model="numpy")
def _panel(p, panel, first, last, sums):
    """Result columns of one panel (of a pair of panels, gated) for the rows from `first` to before `last`."""
    size = ITEM_BYTES[p[c.KIND]]
    width = min(c.PANEL, p[c.COLUMNS] - panel * c.PANEL)
    others = sums + c.ROWS_AT_ONCE * LINE
    for begin in range(first, last, c.ROWS_AT_ONCE):
        rows = min(c.ROWS_AT_ONCE, last - begin)
        if p[c.ACT] in (c.SILU_GATE, c.TANH_GATE):
            _sum_panel(p, 2 * panel, begin, rows, sums)
            _sum_panel(p, 2 * panel + 1, begin, rows, others)
        else:
            _sum_panel(p, panel, begin, rows, sums)
        if p[c.ACT] == c.SILU_GATE:
            row_gate(sums, others, rows * c.PANEL, 0)
        elif p[c.ACT] == c.TANH_GATE:
            row_gate(sums, others, rows * c.PANEL, 1)
        elif p[c.ACT] == c.SILU:
            row_act(sums, rows * c.PANEL, 0)
        elif p[c.ACT] == c.TANH:
            row_act(sums, rows * c.PANEL, 1)
        for row in range(rows):
            at = (begin + row) * p[c.OUT_BYTES] + panel * c.PANEL * size
            if p[c.RESIDUAL]:
                to_floats(p[c.KIND], p[c.RESIDUAL] + at, others, width, ONE)
                row_add(sums + row * LINE, others, c.PANEL)
            if width == c.PANEL and p[c.KIND] == BFLOAT16:
                line_to_halves(sums + row * LINE, p[c.OUT] + at)
            else:
                narrow(p[c.KIND], sums + row * LINE, p[c.OUT] + at, width, ONE)


def multiply_share(block):
    """Items are blocks of rows and panels, all panels of one block of rows before the next."""
    p = carray(block, (c.FIELDS,), np.int64)
    sums = p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * (4 * c.SCRATCH_FLOATS)
    outputs = (p[c.COLUMNS] + c.PANEL - 1) // c.PANEL
    across = (outputs + p[c.PANELS_PER_ITEM] - 1) // p[c.PANELS_PER_ITEM]
    down = (p[c.ROWS] + p[c.ROWS_PER_ITEM] - 1) // p[c.ROWS_PER_ITEM]
    while True:
        item = take_ticket(p[c.SELF] + 8 * c.TICKET)
        if item >= across * down:
            return
        first = item // across * p[c.ROWS_PER_ITEM]
        panel = item % across * p[c.PANELS_PER_ITEM]
        last = min(first + p[c.ROWS_PER_ITEM], p[c.ROWS])
        for one in range(panel, min(panel + p[c.PANELS_PER_ITEM], outputs)):
            _panel(p, one, first, last, sums)


@njit(nogil=True, error_model="numpy")
def _norm(p, row, scratch):
    size, kind = p[c.SIZE], p[c.KIND]
    to_floats(kind, p[c.X] + row * p[c.X_BYTES], scratch, size, ONE)
    mean = row_sum(scratch, size) / np.float32(size) if p[c.CENTERED] else ZERO
    variance = row_spread(scratch, size, mean) / np.float32(size)
    scale = np.float32(1.0 / math.sqrt(variance + read_float(p[c.EPSILON])))
    row_affine(scratch, size, mean, scale, p[c.WEIGHT], p[c.BIAS])
    narrow(kind, scratch, p[c.OUT] + row * size * ITEM_BYTES[kind], size, ONE)


def norm_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    scratch = p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * p[c.SCRATCH_BYTES]
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.TICKET) * c.ROWS_PER_TICKET
        if first >= p[c.ROWS]:
            return
        for row in range(first, min(first + c.ROWS_PER_TICKET, p[c.ROWS])):
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
            narrow(kind, scratch, where, size, ONE)


def rotate_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    size, kind = p[c.SIZE], p[c.KIND]
    item = ITEM_BYTES[kind]
    cosines = p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * c.SEAT) * p[c.SCRATCH_BYTES]
    sines = cosines + 4 * size
    scratch = sines + 4 * size
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.TICKET) * c.ROWS_PER_TICKET
        if first >= p[c.ROWS]:
            return
        for token in range(first, min(first + c.ROWS_PER_TICKET, p[c.ROWS])):
            to_floats(kind, p[c.COSINES] + token * size * item, cosines, size, ONE)
            to_floats(kind, p[c.SINES] + token * size * item, sines, size, ONE)
            x = p[c.X] + token * p[c.TOKEN_STRIDE] * item
            _rotate(p, x, p[c.HEADS], p[c.HEAD_STRIDE], cosines, sines, scratch)
            x = p[c.OTHER] + token * p[c.OTHER_TOKEN_STRIDE] * item
            _rotate(p, x, p[c.OTHER_HEADS], p[c.OTHER_HEAD_STRIDE], cosines, sines, scratch)
