"""Attention over the block-major pool on a CPU: what each thread does. Numba; reads K and V where they lie.

One call serves one layer of a step. Its work is cut into items beforehand (`plan`), and every thread of the team takes
items until none is left, so that a slow core takes fewer of them. An item is either

* a decode: one token's query heads that share a kv head, over a range of the tokens it can see; ranges of one sequence
  leave partial results that `combine` puts together, or
* a prefill: a tile of query tokens of one slice and their heads that share a kv head, over everything they can see.

Both go through K and V once, in chunks, with the running maximum and sum of online softmax (Milakov and Gimelshein,
arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691), all in fp32 whatever the pool holds. Heads that share K and V
share their loads. Tokens are visited in tiles of LANES; what lies beyond a sequence's end is read at most as a score
that is then overwritten, so that NaN in unused slots cannot spread.

All addresses are integers; `call` has the layout of the call block.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import carray, njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.chunks import PREFILL_CHUNK
from kvcpu.attention.decodes import decode
from kvcpu.attention.pairs import attend_pairs
from kvcpu.attention.pool_rows import stage, tile_of
from kvcpu.attention.softmax import (
    MINUS_INFINITY,
    ONE,
    accumulators_of,
    begin_rows,
    clear_rows,
    fold,
    record_bytes,
    totals_of,
    write_rows,
)
from kvcpu.attention.splits import combine_splits
from kvcpu.attention.storing import store_tokens
from kvcpu.attention.tiles import multiply, score_rows
from kvcpu.vector.cells import read_float, read_int, take_ticket
from kvcpu.vector.numbers import LANES
from kvcpu.vector.products import transpose
from kvcpu.vector.rows import row_cap, row_fill


@njit(nogil=True, error_model="numpy")
def _prefill(p, item, scratch):
    group, padded, window = p[c.GROUP], p[c.PADDED], p[c.WINDOW]
    part = p[c.SLICES] + 8 * c.SLICE_FIELDS * read_int(item + 8 * c.ITEM_SLICE)
    head = read_int(item + 8 * c.ITEM_HEAD)
    first = read_int(item + 8 * c.ITEM_LOW)  # query tokens of the slice, from here
    last = read_int(item + 8 * c.ITEM_HIGH)  # to before this one
    flat = read_int(part + 8 * c.SLICE_FIRST) + first
    table = p[c.TABLES] + 8 * read_int(part + 8 * c.SLICE_TABLE)
    position = read_int(part + 8 * c.SLICE_START) + first
    high = position + last - first
    cap = read_float(p[c.FLOATS] + 4)

    rows = (last - first) * group
    low = max(0, position + 1 - window) if window > 0 else 0
    if p[c.PAIRS]:
        attend_pairs(p, flat, head, table, position, rows, low, high, scratch)
        write_rows(p, flat, head, group, rows, accumulators_of(scratch, rows), totals_of(scratch, rows))
        return
    tops, totals, out = scratch, totals_of(scratch, rows), accumulators_of(scratch, rows)
    queries = scratch + record_bytes(rows, padded)
    scores = queries + 4 * rows * padded
    keys = scores + 4 * rows * PREFILL_CHUNK
    values = keys + 4 * padded * PREFILL_CHUNK
    clear_rows(scratch, rows, padded)
    begin_rows(p, flat, head, group, rows, queries)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        begin = max(at, low)
        for token in range(at, end, LANES):
            tile = tile_of(p, table, head, token, max(token, low), min(token + LANES, end), 0, values)
            transpose(tile, 4 * padded, keys + 4 * (token - at), 4 * PREFILL_CHUNK, padded)
        count = (end - at + LANES - 1) // LANES * LANES
        skipped = max(0, at - position) * group  # rows that see nothing of this chunk
        seeing = rows - skipped
        score = scores + skipped * 4 * PREFILL_CHUNK
        score_rows(
            seeing,
            (count // LANES + 3) // 4 * 4,
            queries + skipped * 4 * padded,
            4 * padded,
            keys,
            4 * PREFILL_CHUNK,
            p[c.HEAD_DIM],
            score,
            4 * PREFILL_CHUNK,
        )
        for row in range(skipped, rows):
            where = scores + row * 4 * PREFILL_CHUNK
            if cap > 0:
                row_cap(where, count, cap)
            own = position + row // group
            hidden = max(begin, own + 1 - window) - at if window > 0 else begin - at
            seen = min(end, own + 1) - at
            if hidden > 0:
                row_fill(where, min(hidden, count), MINUS_INFINITY)
            if seen < count:
                row_fill(where + 4 * seen, count - seen, MINUS_INFINITY)
            fold(where, count, ONE, tops + 4 * row, totals + 4 * row, out + row * 4 * padded, padded, 0)
        stage(p, table, head, begin, end - begin, 1, values)
        multiply(
            seeing,
            padded // LANES,
            score + 4 * (begin - at),
            4 * PREFILL_CHUNK,
            values,
            4 * padded,
            end - begin,
            out + skipped * 4 * padded,
            4 * padded,
        )
    write_rows(p, flat, head, group, rows, out, totals)


@njit(nogil=True, error_model="numpy")
def _scratch(p, seats):
    """This thread's own piece of the scratch memory; `seats` counts the threads of this call."""
    return p[c.SCRATCH] + take_ticket(p[c.SELF] + 8 * seats) * p[c.SCRATCH_BYTES]


def store_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    scratch = _scratch(p, c.STORE_SEAT)
    while True:
        first = take_ticket(p[c.SELF] + 8 * c.STORE_TICKET) * c.STORED_AT_ONCE
        if first >= p[c.TOKENS]:
            return
        store_tokens(p, first, min(first + c.STORED_AT_ONCE, p[c.TOKENS]), scratch)


def attend_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    scratch = _scratch(p, c.SEAT)
    while True:
        at = take_ticket(p[c.SELF] + 8 * c.TICKET)
        if at >= p[c.ITEMS]:
            return
        item = p[c.ITEM_TABLE] + 8 * c.ITEM_FIELDS * at
        if read_int(item + 8 * c.ITEM_KIND) == c.DECODE:
            decode(p, item, scratch)
        else:
            _prefill(p, item, scratch)


def combine_all(block):
    p = carray(block, (c.FIELDS,), np.int64)
    if p[c.SPLITS] and take_ticket(p[c.SELF] + 8 * c.COMBINE_TICKET) == 0:
        combine_splits(p, p[c.SCRATCH])
