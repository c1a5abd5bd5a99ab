"""Whole blocks to int8 and back, as C functions. Numba, compiled by `kvcpu.vector.compiled`.

One call is one thread's work, because transfer threads are ordinary threads beside the engine's team: two cores are
used by two calls. A call through ctypes lets go of the interpreter.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import carray

from kvcpu.codec.codec_rows import quantise, restore
from kvcpu.vector.numbers import BFLOAT16, FLOAT32

# Fields of the call block. SUMS: address of the three doubles that `quantise` and `restore` tell.
KIND, FLOATS, NUMBERS, SCALES, RUNS, HEAD_DIM, SUMS, FIELDS = range(8)


def encode(block):
    p = carray(block, (FIELDS,), np.int64)
    if p[KIND] == FLOAT32:
        quantise(0, p[FLOATS], p[NUMBERS], p[SCALES], p[RUNS], p[HEAD_DIM], p[SUMS])
    elif p[KIND] == BFLOAT16:
        quantise(1, p[FLOATS], p[NUMBERS], p[SCALES], p[RUNS], p[HEAD_DIM], p[SUMS])
    else:
        quantise(2, p[FLOATS], p[NUMBERS], p[SCALES], p[RUNS], p[HEAD_DIM], p[SUMS])


def decode(block):
    p = carray(block, (FIELDS,), np.int64)
    if p[KIND] == FLOAT32:
        restore(0, p[NUMBERS], p[SCALES], p[FLOATS], p[RUNS], p[HEAD_DIM], p[SUMS])
    elif p[KIND] == BFLOAT16:
        restore(1, p[NUMBERS], p[SCALES], p[FLOATS], p[RUNS], p[HEAD_DIM], p[SUMS])
    else:
        restore(2, p[NUMBERS], p[SCALES], p[FLOATS], p[RUNS], p[HEAD_DIM], p[SUMS])
