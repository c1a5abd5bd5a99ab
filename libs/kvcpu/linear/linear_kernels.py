"""Matrix product on a packed weight: what each thread does. Numba.

A weight `[out, in]` is packed in panels of PANEL output columns, `[panel][in][PANEL]`, of bfloat16 in pairs along the
input, `[panel][in / 2][PANEL][2]`: read from front to back whatever the number of rows, which is what limits a decode
step with its few rows. A panel meets ROWS_AT_ONCE rows of x at a time, in tiles of 8 rows whose sums stay in registers,
so that with many rows the arithmetic is the limit. A gated layer (`act(gate(x)) * up(x)`) has a panel of the gate
before each panel of the other, and only the product is written.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import carray, njit

from kvcpu.linear import linear_call as c
from kvcpu.vector.cells import copy_bytes, row_fill, take_ticket
from kvcpu.vector.conversion import from_floats, line_to_halves, to_floats
from kvcpu.vector.numbers import BFLOAT16, FLOAT32, ITEM_BYTES
from kvcpu.vector.products import pair_product, product
from kvcpu.vector.rows import row_act, row_add, row_gate

ONE = np.float32(1.0)
ZERO = np.float32(0.0)
LINE = 4 * c.PANEL  # bytes of a panel's row, of floats or of pairs


@njit(nogil=True, error_model="numpy")
def _add_products(p, x, panel, rows, start, depth, sums):
    """sums[rows][PANEL] += x[rows][start : start + depth] * panel."""
    stride = p[c.X_BYTES]
    if p[c.KIND] == FLOAT32:
        left, right, steps = x + 4 * start, panel + start * LINE, depth
    else:
        left, right, steps = x + 2 * start, panel + start // 2 * LINE, depth // 2
    row = 0
    while row < rows:
        a, o = left + row * stride, sums + row * LINE
        if p[c.KIND] == FLOAT32:
            if rows - row >= 8:
                product(8, 2, a, stride, right, LINE, steps, o, LINE, 0)
                row += 8
            elif rows - row >= 4:
                product(4, 2, a, stride, right, LINE, steps, o, LINE, 0)
                row += 4
            else:
                product(1, 2, a, stride, right, LINE, steps, o, LINE, 0)
                row += 1
        elif rows - row >= 8:
            pair_product(8, 2, a, stride, right, LINE, steps, o, LINE, 0)
            row += 8
        elif rows - row >= 4:
            pair_product(4, 2, a, stride, right, LINE, steps, o, LINE, 0)
            row += 4
        else:
            pair_product(1, 2, a, stride, right, LINE, steps, o, LINE, 0)
            row += 1


@njit(nogil=True, error_model="numpy")
def _sum_panel(p, panel, first, rows, sums):
    """The product of `rows` rows of x from `first` on and one panel, bias included."""
    if p[c.BIAS]:
        for row in range(rows):
            copy_bytes(p[c.BIAS] + panel * LINE, sums + row * LINE, LINE)
    else:
        row_fill(sums, rows * c.PANEL, ZERO)
    x = p[c.X] + first * p[c.X_BYTES]
    weight = p[c.WEIGHT] + panel * (p[c.DEPTH] * ITEM_BYTES[p[c.KIND]] * c.PANEL)
    for start in range(0, p[c.DEPTH], c.DEPTH_AT_ONCE):
        _add_products(p, x, weight, rows, start, min(c.DEPTH_AT_ONCE, p[c.DEPTH] - start), sums)


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
                from_floats(p[c.KIND], sums + row * LINE, p[c.OUT] + at, width, ONE)


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
