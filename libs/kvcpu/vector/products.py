"""Products of rows of floats, with accumulators in registers. On memory addresses.

Addresses and strides are in bytes, sizes count elements. Nothing here checks bounds.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir

from kvcpu.vector.conversion import add_pairs
from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F32,
    I32,
    I64,
    LANES,
    LITERAL,
    constant,
    instruction,
    most_sums,
)


@instruction(ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS)
def dots(b, query, keys, key_bytes, size, scores):
    """scores[i] = query . keys[i] for LANES keys, rows `key_bytes` apart, `size` long, a multiple of LANES."""
    rows = b.rows_of(keys, key_bytes, LANES)
    totals, most = [], most_sums()
    for first in range(0, LANES, most):
        some = rows[first : first + most]

        def body(i, values, some=some):
            part = b.load(b.vector_at(query, i))
            return [b.fma(b.load(b.vector_at(row, i)), part, value) for row, value in zip(some, values, strict=True)]

        totals += b.strips(size, [constant(0.0)] * len(some), body)
    b.store(b.lane_sums(totals), scores)


def accumulate(b, rows, columns, overwrite, arguments, kind, add, meanwhile=None):
    """Emits out[r][c] (+)= sum over d of left[r][d] * right[d][c] for `rows` rows and `columns` vectors of LANES.

    `arguments`: addresses and strides of left and right, the depth, address and stride of out. A step of left is a
    number of 4 bytes of `kind`, one of right `columns` vectors of them; `add` is told a sum and its two factors, and
    `meanwhile` is emitted once a step.

    Sums that the registers do not hold at once are computed in several passes over left and right, which are in the
    cache by then: sums that are kept in memory cost a load and a store with every step.
    """
    left, left_bytes, right, right_bytes, depth, out, out_bytes = arguments
    most = most_sums()
    if rows * columns > most:
        wide = max(1, most // rows)
        passes = -(-rows // most)
        tall = -(-rows // passes)
        for column in range(0, columns, wide):
            for row in range(0, rows, tall):
                x, y = b.offset_by(left, left_bytes, row), b.plus(right, 4 * LANES * column)
                z = b.plus(b.offset_by(out, out_bytes, row), 4 * LANES * column)
                part = x, left_bytes, y, right_bytes, depth, z, out_bytes
                some = min(tall, rows - row), min(wide, columns - column)
                accumulate(b, *some, overwrite, part, kind, add, meanwhile)
                meanwhile = None
        return
    left_rows = b.rows_of(left, left_bytes, rows)
    places = [(row, 4 * LANES * j) for row in b.rows_of(out, out_bytes, rows) for j in range(columns)]
    totals = [constant(0.0) if overwrite else b.load(b.plus(*place)) for place in places]

    def body(i, values):
        if meanwhile:
            meanwhile(i)
        right_row = b.add(right, b.mul(i, right_bytes))
        parts = [b.load(b.plus(right_row, 4 * LANES * j), ir.VectorType(kind, LANES)) for j in range(columns)]
        offset = b.mul(i, ir.Constant(I64, 4))
        result = []
        for at, row in enumerate(left_rows):
            factor = b.splat(b.load(b.add(row, offset), kind))
            result.extend(add(b, values[at * columns + j], factor, parts[j]) for j in range(columns))
        return result

    for total, place in zip(b.loop(depth, totals, body), places, strict=True):
        b.store(total, b.plus(*place))


def add_floats(b, total, factor, part):
    return b.fma(factor, part, total)


PRODUCT = LITERAL, LITERAL, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, LITERAL


@instruction(*PRODUCT)
def product(b, rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes, fresh):
    """out[r][c] (+)= sum over d of left[r][d] * right[d][c] for `rows` rows and `columns` vectors of LANES columns.

    Both are literals: all accumulators live in registers. `fresh` (a literal): out is overwritten instead of added to.
    """
    arguments = left, left_bytes, right, right_bytes, depth, out, out_bytes
    accumulate(b, rows, columns, fresh, arguments, F32, add_floats)


@instruction(*PRODUCT)
def pair_product(b, rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes, fresh):
    """As `product`, of bfloat16 in pairs: out[r][c] (+)= sum over d < depth of left[r][d] . right[d][c], each a pair.

    Accumulates in fp32, by the processor's own instruction for it where there is one (AVX512-BF16).
    """
    arguments = left, left_bytes, right, right_bytes, depth, out, out_bytes
    accumulate(b, rows, columns, fresh, arguments, I32, add_pairs)


@instruction(ADDRESS, COUNT, ADDRESS, COUNT, COUNT)
def transpose(b, source, source_bytes, target, target_bytes, size):
    """LANES rows of `size` floats (a multiple of LANES) become `size` rows of LANES floats."""
    rows = b.rows_of(source, source_bytes, LANES)

    def body(i, _):
        tile = b.transposed([b.load(b.vector_at(row, i)) for row in rows])
        first = b.add(target, b.mul(b.mul(i, ir.Constant(I64, LANES)), target_bytes))
        for vector, place in zip(tile, b.rows_of(first, target_bytes, LANES), strict=True):
            b.store(vector, place)

    b.strips(size, [], body)
