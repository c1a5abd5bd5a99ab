"""K and V of a step's tokens into the pool, as the pool keeps them. Numba."""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.softmax import ONE
from kvcpu.vector.cells import copy_bytes, read_float, read_int, write_byte, write_float
from kvcpu.vector.conversion import to_floats
from kvcpu.vector.numbers import INT8, ITEM_BYTES, LEVELS


@njit(nogil=True, error_model="numpy")
def _store_row(kind, source, source_kind, run, offset, size, dim, scratch):
    """One token's K or V of one head into its run."""
    if kind != INT8:
        item = ITEM_BYTES[kind]
        copy_bytes(source, run + offset * dim * item, dim * item)
        return
    to_floats(source_kind, source, scratch, dim, ONE)
    largest = np.float32(0.0)
    for i in range(dim):
        size_of_it = abs(read_float(scratch + 4 * i))
        if not size_of_it <= largest:  # a NaN becomes the scale: what is read back is none either
            largest = size_of_it
        if largest != largest:
            break
    scale = largest / np.float32(LEVELS)  # in float32, as torch divides
    write_float(run + size * dim + 4 * offset, scale)
    inverse = ONE / scale if scale > 0 else np.float32(0.0)
    target = run + offset * dim
    for i in range(dim):
        write_byte(target + i, np.int32(np.rint(read_float(scratch + 4 * i) * inverse)))


@njit(nogil=True, error_model="numpy")
def store_tokens(p, first, last, scratch):
    """K and V of the flat tokens from `first` to before `last` into the pool."""
    size, dim, kind, item = p[c.BLOCK_SIZE], p[c.HEAD_DIM], p[c.KV_KIND], ITEM_BYTES[p[c.QUERY_KIND]]
    for token in range(first, last):
        slot = read_int(p[c.SLOTS] + 8 * token)
        runs = ((slot // size) * p[c.LAYERS] + p[c.LAYER]) * 2
        for head in range(p[c.KV_HEADS]):
            key = p[c.KEY] + (token * p[c.KEY_TOKEN] + head * p[c.KEY_HEAD]) * item
            value = p[c.VALUE] + (token * p[c.VALUE_TOKEN] + head * p[c.VALUE_HEAD]) * item
            run = p[c.POOL] + (runs * p[c.KV_HEADS] + head) * p[c.RUN_BYTES]
            _store_row(kind, key, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)
            run += p[c.KV_HEADS] * p[c.RUN_BYTES]
            _store_row(kind, value, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)
