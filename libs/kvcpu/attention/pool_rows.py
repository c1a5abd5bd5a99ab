"""Where K and V of a token lie in the pool, in place or staged as rows of floats; storing a step's. Numba."""

# mypy: ignore-errors
import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.softmax import ONE
from kvcpu.vector.cells import copy_bytes, read_float, read_int, write_byte, write_float
from kvcpu.vector.conversion import to_floats
from kvcpu.vector.numbers import INT8, ITEM_BYTES, LANES, LEVELS


@njit(nogil=True, error_model="numpy")
def block_index(token, p):
    """token // block_size: a division costs as much as a vector of work, and block sizes are powers of two."""
    return token >> p[c.BLOCK_SHIFT] if p[c.BLOCK_SHIFT] >= 0 else token // p[c.BLOCK_SIZE]


@njit(nogil=True, error_model="numpy")
def run_of(p, table, head, token, value):
    """Address of the run (K or V of one block, layer and head) that `token` lies in; latents are both."""
    block = read_int(table + 8 * block_index(token, p))
    row = (block * p[c.LAYERS] + p[c.LAYER]) * p[c.PARTS] + (value if p[c.PARTS] == 2 else 0)
    return p[c.POOL] + (row * p[c.KV_HEADS] + head) * p[c.RUN_BYTES]


@njit(nogil=True, error_model="numpy")
def stage(p, table, head, token, count, value, target):
    """K or V of `count` tokens from `token` on as rows of floats at `target`, filled up to a multiple of LANES."""
    size, kind, dim = p[c.BLOCK_SIZE], p[c.KV_KIND], p[c.HEAD_DIM]
    row_bytes = 4 * p[c.PADDED]
    item = ITEM_BYTES[kind]
    done = 0
    while done < count:
        offset = token + done - block_index(token + done, p) * size
        rows = min(size - offset, count - done)
        run = run_of(p, table, head, token + done, value)
        source = run + offset * dim * item
        to = target + done * row_bytes
        if kind == INT8:
            scales = run + size * dim + 4 * offset
            for row in range(rows):
                to_floats(kind, source + row * dim, to + row * row_bytes, dim, read_float(scales + 4 * row))
        elif dim == p[c.PADDED]:
            to_floats(kind, source, to, rows * dim, ONE)
        else:
            for row in range(rows):
                to_floats(kind, source + row * dim * item, to + row * row_bytes, dim, ONE)
        done += rows


@njit(nogil=True, error_model="numpy")
def tile_of(p, table, head, token, low, high, value, buffer):
    """Address of rows for the LANES tokens from `token` on, of which those from `low` to `high` count: in place where
    the pool holds what the kernels compute with, else staged in `buffer`."""
    if p[c.DIRECT]:
        return row_of(p, table, head, token, value)
    stage(p, table, head, low, high - low, value, buffer + (low - token) * 4 * p[c.PADDED])
    return buffer


@njit(nogil=True, error_model="numpy")
def tile_bytes(p):
    """K or V of LANES tokens of one head, as the pool keeps them."""
    return LANES * p[c.HEAD_DIM] * ITEM_BYTES[p[c.KV_KIND]]


@njit(nogil=True, error_model="numpy")
def ahead_of(p, table, head, token, value):
    """Address of the tile that begins at `token`, to prefetch it: blocks lie anywhere in memory, so the processor
    cannot guess them. 0 where a tile is not one piece."""
    return row_of(p, table, head, token, value) if p[c.TILED] else 0


@njit(nogil=True, error_model="numpy")
def row_of(p, table, head, token, value):
    offset = token - block_index(token, p) * p[c.BLOCK_SIZE]
    return run_of(p, table, head, token, value) + offset * p[c.HEAD_DIM] * ITEM_BYTES[p[c.KV_KIND]]


@njit(nogil=True, error_model="numpy")
def _store_row(kind, source, source_kind, run, offset, size, dim, scratch):
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
        runs = ((slot // size) * p[c.LAYERS] + p[c.LAYER]) * p[c.PARTS]
        for head in range(p[c.KV_HEADS]):
            key = p[c.KEY] + (token * p[c.KEY_TOKEN] + head * p[c.KEY_HEAD]) * item
            value = p[c.VALUE] + (token * p[c.VALUE_TOKEN] + head * p[c.VALUE_HEAD]) * item
            run = p[c.POOL] + (runs * p[c.KV_HEADS] + head) * p[c.RUN_BYTES]
            _store_row(kind, key, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)
            if p[c.PARTS] == 2:
                run += p[c.KV_HEADS] * p[c.RUN_BYTES]
                _store_row(kind, value, p[c.QUERY_KIND], run, slot % size, size, dim, scratch)
