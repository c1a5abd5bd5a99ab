"""Prefills: a tile of query tokens of one slice over everything they see. Numba.

Where the processor can, pairs of bfloat16 are multiplied as such: weights are rounded to bfloat16, sums are fp32.
"""

# mypy: ignore-errors
import numpy as np
from numba import njit

from kvcpu.attention import attention_call as c
from kvcpu.attention import softmax
from kvcpu.attention.attention_call import PREFILL_CHUNK
from kvcpu.attention.pool_rows import row_of, stage, tile_of
from kvcpu.attention.softmax import ONE
from kvcpu.vector.cells import prefetch, read_float, read_int, row_fill
from kvcpu.vector.conversion import interleave
from kvcpu.vector.numbers import LANES
from kvcpu.vector.products import pair_product, tiled, transpose

LINE = 4 * PREFILL_CHUNK  # bytes of a row's scores, or of a row of transposed keys

_score, _add = tiled((8, 2), (1, 4), fresh=1), tiled((8, 2), (4, 4), (2, 4), (1, 4))
_score_pairs, _add_pairs = (tiled((8, 2), (4, 2), by=pair_product, fresh=fresh) for fresh in (1, 0))


@njit(nogil=True, error_model="numpy")
def prefill(p, item, scratch):
    group, padded, window, pairs = p[c.GROUP], p[c.PADDED], p[c.WINDOW], p[c.PAIRS]
    part = p[c.SLICES] + 8 * c.SLICE_FIELDS * read_int(item + 8 * c.ITEM_SLICE)
    head = read_int(item + 8 * c.ITEM_HEAD)
    first = read_int(item + 8 * c.ITEM_LOW)  # query tokens of the slice, from here
    last = read_int(item + 8 * c.ITEM_HIGH)  # to before this one
    flat = read_int(part + 8 * c.SLICE_FIRST) + first
    table = p[c.TABLES] + 8 * read_int(part + 8 * c.SLICE_TABLE)
    position = read_int(part + 8 * c.SLICE_START) + first
    high = position + last - first
    low = max(0, position + 1 - window) if window > 0 else 0
    scaling, cap = read_float(p[c.FLOATS]), read_float(p[c.FLOATS] + 4)
    factor = scaling if pairs else ONE  # queries are scaled beforehand otherwise

    rows = (last - first) * group
    whole = (rows + 3) // 4 * 4  # pairs go by four rows; what is computed beyond `rows` is not used
    size = 2 if pairs else 4  # bytes of a number that is multiplied
    tops, totals, out = scratch, softmax.totals_of(scratch, rows), softmax.accumulators_of(scratch, rows)
    queries = out + 4 * whole * padded
    scores = queries + size * whole * padded
    keys = scores + whole * LINE
    values = keys + size * padded * PREFILL_CHUNK
    softmax.clear_rows(scratch, rows, padded)
    if p[c.SINKS]:
        softmax.take_sinks(p, head, group, rows, scratch)
    if pairs:
        row_fill(queries, whole * padded // 2, np.float32(0.0))
    softmax.take_rows(p, flat, head, group, rows, queries)

    for at in range(low // LANES * LANES, high, PREFILL_CHUNK):
        end = min(at + PREFILL_CHUNK, high)
        begin = max(at, low)
        vectors = (end - at + LANES - 1) // LANES
        count = vectors * LANES
        unseen = max(0, at - position) * group  # rows that see nothing of this chunk
        if pairs:
            unseen = unseen // 4 * 4
        score, sums = scores + unseen * LINE, out + unseen * 4 * padded
        seeing = queries + unseen * size * padded
        _stage_keys(p, table, head, at, low, end, keys, values)
        if pairs:
            columns = (vectors + 1) // 2 * 2
            _score_pairs(whole - unseen, columns, seeing, 2 * padded, keys, LINE, padded // 2, score, LINE)
        else:
            columns = (vectors + 3) // 4 * 4
            _score(rows - unseen, columns, seeing, 4 * padded, keys, LINE, p[c.HEAD_DIM], score, LINE)
        for row in range(unseen, rows):
            own = position + row // group
            hidden = max(begin, own + 1 - window) - at if window > 0 else begin - at
            seen = max(0, min(end, own + 1) - at)
            where, top, total = scores + row * LINE, tops + 4 * row, totals + 4 * row
            softmax.fold(where, count, hidden, seen, factor, cap, top, total, out + row * 4 * padded, padded, pairs)
        line = 4 * padded
        if pairs:
            _stage_value_pairs(p, table, head, at, low, end, high, values)
            steps = (end - at + 1) // 2
            _add_pairs(whole - unseen, padded // LANES, score, LINE, values, line, steps, sums, line)
        else:
            stage(p, table, head, begin, end - begin, 1, values)
            weights = score + 4 * (begin - at)
            _add(rows - unseen, padded // LANES, weights, LINE, values, line, end - begin, sums, line)
    softmax.write_rows(p, flat, head, group, rows, out, totals)


@njit(nogil=True, error_model="numpy")
def _stage_keys(p, table, head, at, low, end, keys, buffer):
    """Keys of a chunk, transposed: `[head_dim][PREFILL_CHUNK]` floats, or `[head_dim / 2][PREFILL_CHUNK]` pairs along
    the head; what lies outside is anything."""
    pairs = p[c.PAIRS]
    row_bytes = (2 if pairs else 4) * p[c.PADDED]
    for token in range(at, end, LANES):
        if pairs:
            tile = row_of(p, table, head, token, 0)
        else:
            tile = tile_of(p, table, head, token, max(token, low), min(token + LANES, end), 0, buffer)
        transpose(tile, row_bytes, keys + 4 * (token - at), LINE, row_bytes // 4)
        if pairs:
            prefetch(row_of(p, table, head, token, 1), LANES * row_bytes)


@njit(nogil=True, error_model="numpy")
def _stage_value_pairs(p, table, head, at, low, end, limit, values):
    """Values of a chunk in pairs of tokens: `[PREFILL_CHUNK / 2][head_dim]`; those out of reach count as zero."""
    dim = p[c.HEAD_DIM]
    zeros = values + 2 * dim * PREFILL_CHUNK
    row_fill(zeros, dim // 2, np.float32(0.0))
    for token in range(at, end, 2):
        row = row_of(p, table, head, token, 1)
        first = row if token >= low else zeros
        second = row + 2 * dim if low <= token + 1 < end else zeros
        interleave(first, second, values + (token - at) * 2 * dim, dim)
        ahead = token + PREFILL_CHUNK
        if (token - at) % LANES == 0 and ahead < limit:
            prefetch(row_of(p, table, head, ahead, 0), LANES * 2 * dim)
