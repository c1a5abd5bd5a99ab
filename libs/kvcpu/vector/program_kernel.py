"""Calls one compiled function after the other."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import carray

from kvcpu.vector.cells import call_at, read_int
from kvcpu.vector.program import BARRIER, COUNT, FIELDS, TABLE


def run_all(block):
    p = carray(block, (FIELDS,), np.int64)
    for at in range(p[COUNT]):
        operation = p[TABLE] + 16 * at
        call_at(read_int(operation), read_int(operation + 8))
        if p[BARRIER] and at + 1 < p[COUNT]:
            call_at(p[BARRIER], 0)
