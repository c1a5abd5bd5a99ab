"""Products of rows of floats, with accumulators in registers. Numba intrinsics on memory addresses.

Addresses and strides are in bytes, sizes count elements. Nothing here checks bounds.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F32,
    I32,
    I64,
    LANES,
    constant,
    fma,
    lane_sums,
    load,
    loop,
    most_sums,
    plus,
    returning_nothing,
    splat,
    store,
    transposed,
)
from kvcpu.vector.halves import add_pairs


@intrinsic
def dots(_context, query, keys, key_bytes, size, scores):
    """scores[i] = query . keys[i] for LANES keys, rows `key_bytes` apart, `size` long, a multiple of LANES."""

    def emit(_, builder, __, arguments):
        q, k, stride, elements, out = arguments
        strips = builder.sdiv(elements, ir.Constant(I64, LANES))
        rows = [builder.add(k, builder.mul(stride, ir.Constant(I64, i))) for i in range(LANES)]
        totals, most = [], most_sums()
        for first in range(0, LANES, most):
            some = rows[first : first + most]

            def body(i, values, some=some):
                offset = builder.mul(i, ir.Constant(I64, 4 * LANES))
                part = load(builder, builder.add(q, offset))
                return [
                    fma(builder, load(builder, builder.add(row, offset)), part, value)
                    for row, value in zip(some, values, strict=True)
                ]

            totals += loop(builder, strips, [constant(0.0)] * len(some), body)
        store(builder, lane_sums(builder, totals), out)

    return types.void(ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS), returning_nothing(emit)


def accumulate(builder, rows, columns, overwrite, arguments, kind, add, meanwhile=None):
    """Emits out[r][c] (+)= sum over d of left[r][d] * right[d][c] for `rows` rows and `columns` vectors of LANES.

    `arguments`: addresses and strides of left and right, the depth, address and stride of out. A step of left is a
    number of 4 bytes of `kind`, one of right `columns` vectors of them; `add` is told a sum and its two factors, and
    `meanwhile` is emitted once a step.

    Sums that the registers do not hold at once are computed in several passes over left and right, which are in the
    cache by then: sums that are kept in memory cost a load and a store with every step.
    """
    a, a_stride, b, b_stride, length, o, o_stride = arguments
    most = most_sums()
    if rows * columns > most:
        wide = max(1, most // rows)
        passes = -(-rows // most)
        tall = -(-rows // passes)
        for column in range(0, columns, wide):
            for row in range(0, rows, tall):
                at = ir.Constant(I64, row)
                part = (
                    builder.add(a, builder.mul(a_stride, at)),
                    a_stride,
                    plus(builder, b, 4 * LANES * column),
                    b_stride,
                    length,
                    plus(builder, builder.add(o, builder.mul(o_stride, at)), 4 * LANES * column),
                    o_stride,
                )
                some = min(tall, rows - row), min(wide, columns - column)
                accumulate(builder, *some, overwrite, part, kind, add, meanwhile)
                meanwhile = None
        return
    a_rows = [builder.add(a, builder.mul(a_stride, ir.Constant(I64, i))) for i in range(rows)]
    o_rows = [builder.add(o, builder.mul(o_stride, ir.Constant(I64, i))) for i in range(rows)]
    totals = []
    for row in o_rows:
        for j in range(columns):
            totals.append(constant(0.0) if overwrite else load(builder, plus(builder, row, 4 * LANES * j)))

    def body(i, values):
        if meanwhile:
            meanwhile(i)
        b_row = builder.add(b, builder.mul(i, b_stride))
        parts = [load(builder, plus(builder, b_row, 4 * LANES * j), ir.VectorType(kind, LANES)) for j in range(columns)]
        offset = builder.mul(i, ir.Constant(I64, 4))
        out = []
        for at, row in enumerate(a_rows):
            factor = splat(builder, load(builder, builder.add(row, offset), kind))
            out.extend(add(builder, values[at * columns + j], factor, parts[j]) for j in range(columns))
        return out

    totals = loop(builder, length, totals, body)
    for at, row in enumerate(o_rows):
        for j in range(columns):
            store(builder, totals[at * columns + j], plus(builder, row, 4 * LANES * j))


def add_floats(builder, total, factor, part):
    return fma(builder, factor, part, total)


@intrinsic(prefer_literal=True)
def product(_context, rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes, fresh):
    """out[r][c] (+)= sum over d of left[r][d] * right[d][c] for `rows` rows and `columns` vectors of LANES columns.

    Both are literals: all accumulators live in registers. `fresh` (a literal): out is overwritten instead of added to.
    """
    r, c, overwrite = rows.literal_value, columns.literal_value, fresh.literal_value

    def emit(_, builder, __, arguments):
        accumulate(builder, r, c, overwrite, arguments[2:9], F32, add_floats)

    signature = types.void(rows, columns, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, fresh)
    return signature, returning_nothing(emit)


@intrinsic
def transpose(_context, source, source_bytes, target, target_bytes, size):
    """LANES rows of `size` floats (a multiple of LANES) become `size` rows of LANES floats."""

    def emit(_, builder, __, arguments):
        a, a_stride, b, b_stride, elements = arguments
        rows = [builder.add(a, builder.mul(a_stride, ir.Constant(I64, i))) for i in range(LANES)]

        def body(i, values):
            offset = builder.mul(i, ir.Constant(I64, 4 * LANES))
            tile = transposed(builder, [load(builder, builder.add(row, offset)) for row in rows])
            first = builder.add(b, builder.mul(builder.mul(i, ir.Constant(I64, LANES)), b_stride))
            for at, vector in enumerate(tile):
                store(builder, vector, builder.add(first, builder.mul(b_stride, ir.Constant(I64, at))))
            return []

        loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)
        return

    return types.void(ADDRESS, COUNT, ADDRESS, COUNT, COUNT), returning_nothing(emit)


@intrinsic(prefer_literal=True)
def pair_product(_context, rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes, fresh):
    """As `product`, of bfloat16 in pairs: out[r][c] (+)= sum over d < depth of left[r][d] . right[d][c], each a pair.

    Accumulates in fp32, by the processor's own instruction for it where there is one (AVX512-BF16).
    """
    r, c, overwrite = rows.literal_value, columns.literal_value, fresh.literal_value

    def emit(_, builder, __, arguments):
        accumulate(builder, r, c, overwrite, arguments[2:9], I32, add_pairs)

    signature = types.void(rows, columns, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, fresh)
    return signature, returning_nothing(emit)
