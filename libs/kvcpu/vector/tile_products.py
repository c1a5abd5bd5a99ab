"""Products of a tile of LANES rows (tokens) with up to MOST_ROWS others, whose number is known when they run.

On memory addresses, in bytes; code for each number of rows stands in one switch, so that accumulators live in registers
and no row is computed for nothing.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir
from numba.core import types

from kvcpu.vector.cells import ask_for
from kvcpu.vector.conversion import add_pairs
from kvcpu.vector.emit import ADDRESS, COUNT, F32, I16, I32, I64, INTS, LANES, constant, instruction
from kvcpu.vector.products import accumulate, add_floats

MOST_ROWS = 8


def switch(b, number, most, emit):
    """Emits `emit(n)` for n from 1 to `most`, of which the one for `number` runs."""
    after = b.function.append_basic_block("after")
    choice = b.switch(number, after)
    for n in range(1, most + 1):
        block = b.function.append_basic_block("case")
        choice.add_case(ir.Constant(I64, n), block)
        b.position_at_end(block)
        emit(n)
        b.branch(after)
    b.position_at_end(after)


@instruction(types.int64, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, COUNT)
def weigh(b, rows, weights, weight_bytes, values, value_bytes, count, out, out_bytes, ahead, ahead_bytes):
    """out[r] += sum over `count` tokens t of weights[r][t] * values[t], of 2 LANES floats, for `rows` rows, 1 to
    MOST_ROWS. Meanwhile asks for the memory at `ahead`, for `ahead_bytes` (128 at most) with every token.
    """
    factors = weights, weight_bytes, values, value_bytes, count, out, out_bytes

    def ask(i):
        address = b.add(ahead, b.mul(i, ahead_bytes))
        ask_for(b, address)
        ask_for(b, b.add(address, b.ashr(ahead_bytes, ir.Constant(I64, 1))))

    switch(b, rows, MOST_ROWS, lambda r: accumulate(b, r, 2, False, factors, F32, add_floats, ask))


@instruction(ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS)
def pair_dots(b, query, keys, key_bytes, size, scores):
    """As `dots`, of bfloat16; `size` is a multiple of 2 LANES."""
    rows = b.rows_of(keys, key_bytes, LANES)

    def body(i, values):
        part = b.load(b.vector_at(query, i), INTS)
        return [
            add_pairs(b, value, b.load(b.vector_at(row, i), INTS), part)
            for row, value in zip(rows, values, strict=True)
        ]

    totals = b.loop(b.sdiv(size, ir.Constant(I64, 2 * LANES)), [constant(0.0)] * LANES, body)
    b.store(b.lane_sums(totals), scores)


@instruction(types.int64, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS)
def pair_weigh(b, rows, weights, weight_bytes, values, value_bytes, size, out, out_bytes, ahead):
    """out[r] += sum over LANES tokens t of weights[r][t] * values[t], for `rows` rows, 1 to MOST_ROWS.

    Weights and values are bfloat16, `size` values a token, a multiple of 2 LANES. Pairs of tokens are interleaved in
    registers, once for all rows. Meanwhile asks for the tile at `ahead`.
    """
    halves, order = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, 2 * LANES)
    masks = [
        ir.Constant(order, [half + lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)])
        for half in (0, LANES)
    ]

    def emit_rows(r):
        w_rows = b.rows_of(weights, weight_bytes, r)

        def strip(i, _):
            column = b.vector_at(values, i)
            distance = b.sub(ahead, values)
            places = [
                b.plus(row, half)
                for row in b.rows_of(b.offset_by(out, i, 8 * LANES), out_bytes, r)
                for half in (0, 4 * LANES)
            ]

            def body(pair, sums):
                first = b.add(column, b.mul(b.mul(pair, ir.Constant(I64, 2)), value_bytes))
                tokens = first, b.add(first, value_bytes)
                both = [b.load(token, halves, align=2) for token in tokens]
                for token in tokens:
                    ask_for(b, b.add(token, distance))
                parts = [b.bitcast(b.shuffle_vector(*both, mask), INTS) for mask in masks]
                result = []
                for at, row in enumerate(w_rows):
                    factor = b.splat(b.load(b.offset_by(row, pair, 4), I32))
                    result += [add_pairs(b, sums[2 * at + j], factor, parts[j]) for j in range(2)]
                return result

            sums = b.loop(ir.Constant(I64, LANES // 2), [b.load(place) for place in places], body)
            for total, place in zip(sums, places, strict=True):
                b.store(total, place)

        b.loop(b.sdiv(size, ir.Constant(I64, 2 * LANES)), [], strip)

    switch(b, rows, MOST_ROWS, emit_rows)
