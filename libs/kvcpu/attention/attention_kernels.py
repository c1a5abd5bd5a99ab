"""Attention over the block-major pool on a CPU: what each thread does. Numba; reads K and V where they lie.

One call serves one layer of a step. `plan` cuts its work into items, and every thread takes items until none is left,
so that a slow core takes fewer. An item is a decode (one token's query heads over a range of the tokens it sees; ranges
of one sequence leave partial results) or a prefill (a tile of one slice's query tokens over everything they see).

Both read K and V once, in chunks, with the running maximum and sum of online softmax (Milakov and Gimelshein,
arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691), in fp32 whatever the pool holds. Tokens are visited in tiles of
LANES; slots beyond a sequence's end are read at most as scores that are then overwritten, so NaN in them cannot spread.
"""

# mypy: ignore-errors
import numpy as np
from numba import carray, njit

from kvcpu.attention import attention_call as c
from kvcpu.attention.decodes import combine_splits, decode
from kvcpu.attention.pool_rows import store_tokens
from kvcpu.attention.prefills import prefill
from kvcpu.vector.cells import read_int, take_ticket


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
            prefill(p, item, scratch)


def combine_all(block):
    p = carray(block, (c.FIELDS,), np.int64)
    if p[c.SPLITS] and take_ticket(p[c.SELF] + 8 * c.COMBINE_TICKET) == 0:
        combine_splits(p, p[c.SCRATCH])
