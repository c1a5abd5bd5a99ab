"""Products of a tile of LANES rows (tokens) with up to MOST_ROWS others, whose number is known when they run.

Numba intrinsics on memory addresses, in bytes; code for each number of rows stands in one switch, so that accumulators
live in registers and no row is computed for nothing.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector.cells import ask_for
from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F32,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    constant,
    lane_sums,
    load,
    loop,
    offset_by,
    plus,
    returning_nothing,
    splat,
    store,
)
from kvcpu.vector.products import accumulate, add_floats, add_pairs

MOST_ROWS = 8


def switch(builder, number, most, emit):
    """Emits `emit(n)` for n from 1 to `most`, of which the one for `number` runs."""
    function = builder.function
    after = function.append_basic_block("after")
    choice = builder.switch(number, after)
    for n in range(1, most + 1):
        block = function.append_basic_block("case")
        choice.add_case(ir.Constant(I64, n), block)
        builder.position_at_end(block)
        emit(n)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def weigh(_context, rows, weights, weight_bytes, values, value_bytes, count, out, out_bytes, ahead, ahead_bytes):
    """out[r] += sum over `count` tokens t of weights[r][t] * values[t], of 2 LANES floats, for `rows` rows, 1 to
    MOST_ROWS. Meanwhile asks for the memory at `ahead`, for `ahead_bytes` (128 at most) with every token.
    """

    def emit(_, builder, __, arguments):
        rows, *others = arguments[:8]
        ahead, step = arguments[8:]

        def ask(i):
            address = builder.add(ahead, builder.mul(i, step))
            ask_for(builder, address)
            ask_for(builder, builder.add(address, builder.ashr(step, ir.Constant(I64, 1))))

        switch(builder, rows, MOST_ROWS, lambda r: accumulate(builder, r, 2, False, others, F32, add_floats, ask))

    signature = types.void(types.int64, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, COUNT)
    return signature, returning_nothing(emit)


@intrinsic
def pair_dots(_context, query, keys, key_bytes, size, scores):
    """As `dots`, of bfloat16; `size` is a multiple of 2 LANES."""

    def emit(_, builder, __, arguments):
        q, k, stride, elements, out = arguments
        rows = [builder.add(k, builder.mul(stride, ir.Constant(I64, i))) for i in range(LANES)]

        def body(i, values):
            offset = builder.mul(i, ir.Constant(I64, 4 * LANES))
            part = load(builder, builder.add(q, offset), INTS)
            return [
                add_pairs(builder, value, load(builder, builder.add(row, offset), INTS), part)
                for row, value in zip(rows, values, strict=True)
            ]

        totals = loop(builder, builder.sdiv(elements, ir.Constant(I64, 2 * LANES)), [constant(0.0)] * LANES, body)
        store(builder, lane_sums(builder, list(totals)), out)

    return types.void(ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS), returning_nothing(emit)


@intrinsic
def pair_weigh(_context, rows, weights, weight_bytes, values, value_bytes, size, out, out_bytes, ahead):
    """out[r] += sum over LANES tokens t of weights[r][t] * values[t], for `rows` rows, 1 to MOST_ROWS.

    Weights and values are bfloat16, `size` values a token, a multiple of 2 LANES. Pairs of tokens are interleaved in
    registers, once for all rows. Meanwhile asks for the tile at `ahead`.
    """
    halves = ir.VectorType(I16, 2 * LANES)
    orders = [[half + lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)] for half in (0, LANES)]

    def emit(_, builder, __, arguments):
        rows, w, w_stride, v, v_stride, elements, o, o_stride, ahead = arguments
        strips = builder.sdiv(elements, ir.Constant(I64, 2 * LANES))
        masks = [ir.Constant(ir.VectorType(I32, 2 * LANES), order) for order in orders]

        def emit_rows(r):
            w_rows = [builder.add(w, builder.mul(w_stride, ir.Constant(I64, i))) for i in range(r)]

            def strip(i, _):
                column = offset_by(builder, v, i, 4 * LANES)
                distance = builder.sub(ahead, v)
                places = [
                    plus(builder, builder.add(offset_by(builder, o, i, 8 * LANES), builder.mul(o_stride, row)), half)
                    for row in (ir.Constant(I64, at) for at in range(r))
                    for half in (0, 4 * LANES)
                ]

                def body(pair, sums):
                    first = builder.add(column, builder.mul(builder.mul(pair, ir.Constant(I64, 2)), v_stride))
                    both = [load(builder, row, halves, align=2) for row in (first, builder.add(first, v_stride))]
                    for row in (first, builder.add(first, v_stride)):
                        ask_for(builder, builder.add(row, distance))
                    parts = [builder.bitcast(builder.shuffle_vector(*both, mask), INTS) for mask in masks]
                    result = []
                    for at, row in enumerate(w_rows):
                        factor = splat(builder, load(builder, offset_by(builder, row, pair, 4), I32))
                        result += [add_pairs(builder, sums[2 * at + j], factor, parts[j]) for j in range(2)]
                    return result

                sums = [load(builder, place) for place in places]
                sums = loop(builder, ir.Constant(I64, LANES // 2), sums, body)
                for total, place in zip(sums, places, strict=True):
                    store(builder, total, place)
                return []

            loop(builder, strips, [], strip)

        switch(builder, rows, MOST_ROWS, emit_rows)

    signature = types.void(types.int64, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS)
    return signature, returning_nothing(emit)
