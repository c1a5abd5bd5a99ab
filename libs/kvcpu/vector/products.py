"""Products of rows of floats, or of bfloat16 in pairs, with accumulators in registers. Strides are in bytes."""

# mypy: ignore-errors
from functools import cache

from llvmlite import binding, ir
from numba import njit

from kvcpu.vector.cells import ask_for
from kvcpu.vector.conversion import add_pairs
from kvcpu.vector.emit import ADDRESS, COUNT, F32, I16, I32, I64, INTS, LITERAL, constant, instruction, switched
from kvcpu.vector.numbers import LANES

MOST_ROWS = 8  # of a `weigh`, whose number is known when it runs: no row is computed for nothing


@cache
def _most_sums():
    """Vectors of LANES floats that a loop may sum into without spilling: half of what the registers hold, which is 32
    of AVX-512, 16 half ones of AVX2 or 32 quarter ones of NEON. Code is cached per processor, so emitters may ask."""
    return 16 if binding.get_host_cpu_features().get("avx512f") else 4


def add_floats(b, total, factor, part):
    return b.fma(factor, part, total)


def _dots(kind, add, numbers):
    @instruction(ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS)
    def dots(b, query, keys, key_bytes, size, scores):
        rows, vectors = b.rows_of(keys, key_bytes, LANES), b.sdiv(size, ir.Constant(I64, numbers))
        totals, most = [], _most_sums()
        for first in range(0, LANES, most):
            some = rows[first : first + most]

            def body(i, values, some=some):
                part, *keys_at = (b.load(b.vector_at(row, i), ir.VectorType(kind, LANES)) for row in (query, *some))
                return [add(b, value, key, part) for key, value in zip(keys_at, values, strict=True)]

            totals += b.loop(vectors, [constant(0.0)] * len(some), body)
        b.store(b.lane_sums(totals), scores)

    return dots


# scores[i] = query . keys[i] for LANES keys, rows `key_bytes` apart, `size` long: a multiple of LANES floats, or of
# 2 LANES bfloat16.
dots, pair_dots = _dots(F32, add_floats, LANES), _dots(I32, add_pairs, 2 * LANES)


def accumulate(b, rows, columns, overwrite, arguments, kind, add, meanwhile=None):
    """Emits out[r][c] (+)= sum over d of left[r][d] * right[d][c] for `rows` rows and `columns` vectors of LANES.

    `arguments`: addresses and strides of left and right, the depth, address and stride of out. A step of left is a
    4-byte number of `kind`, one of right `columns` vectors of them; `meanwhile` is emitted once a step. Sums that the
    registers do not hold at once take several passes over left and right, which are in the cache by then.
    """
    left, left_bytes, right, right_bytes, depth, out, out_bytes = arguments
    most = _most_sums()
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


def _product(kind, add):
    @instruction(LITERAL, LITERAL, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, LITERAL)
    def product(b, rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes, fresh):
        arguments = left, left_bytes, right, right_bytes, depth, out, out_bytes
        accumulate(b, rows, columns, fresh, arguments, kind, add)

    return product


# out[r][c] (+)= sum over d < depth of left[r][d] * right[d][c]. Rows, vectors of columns and `fresh` (overwrite
# out instead of adding) are literals. Of floats, or of pairs of bfloat16, which are summed in fp32.
product, pair_product = _product(F32, add_floats), _product(I32, add_pairs)


@instruction(COUNT, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS, COUNT)
@switched(*range(1, MOST_ROWS + 1))
def weigh(b, rows, weights, weight_bytes, values, value_bytes, count, out, out_bytes, ahead, ahead_bytes):
    """out[r] += sum over `count` tokens t of weights[r][t] * values[t], of 2 LANES floats, for `rows` rows, 1 to
    MOST_ROWS. Prefetches `ahead_bytes` (128 at most) from `ahead` on with every token."""
    factors = weights, weight_bytes, values, value_bytes, count, out, out_bytes

    def ask(i):
        address = b.add(ahead, b.mul(i, ahead_bytes))
        ask_for(b, address)
        ask_for(b, b.add(address, b.ashr(ahead_bytes, ir.Constant(I64, 1))))

    accumulate(b, rows, 2, False, factors, F32, add_floats, ask)


@instruction(COUNT, ADDRESS, COUNT, ADDRESS, COUNT, COUNT, ADDRESS, COUNT, ADDRESS)
@switched(*range(1, MOST_ROWS + 1))
def pair_weigh(b, rows, weights, weight_bytes, values, value_bytes, size, out, out_bytes, ahead):
    """As `weigh`, of LANES tokens and bfloat16, `size` values a token, a multiple of 2 LANES. Pairs of tokens are
    interleaved in registers, once for all rows. Prefetches the tile at `ahead`."""
    halves, order = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, 2 * LANES)
    masks = [
        ir.Constant(order, [half + lane // 2 + 2 * LANES * (lane % 2) for lane in range(2 * LANES)])
        for half in (0, LANES)
    ]
    weight_rows = b.rows_of(weights, weight_bytes, rows)

    def strip(i, _):
        column = b.vector_at(values, i)
        distance = b.sub(ahead, values)
        places = [
            b.plus(row, half)
            for row in b.rows_of(b.offset_by(out, i, 8 * LANES), out_bytes, rows)
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
            for at, row in enumerate(weight_rows):
                factor = b.splat(b.load(b.offset_by(row, pair, 4), I32))
                result += [add_pairs(b, sums[2 * at + j], factor, parts[j]) for j in range(2)]
            return result

        sums = b.loop(ir.Constant(I64, LANES // 2), [b.load(place) for place in places], body)
        for total, place in zip(sums, places, strict=True):
            b.store(total, place)

    b.loop(b.sdiv(size, ir.Constant(I64, 2 * LANES)), [], strip)


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


@njit(nogil=True, error_model="numpy")
def _nothing(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
    """What is left to do after the last tile."""


def tiled(*shapes, by=product, fresh=0):
    """A compiled out (+)= left * right, made of products `by` tiles of (rows, vectors of columns), the tallest first.

    Columns that do not fill a tile go one vector at a time; rows must come out even with the last shape's.
    """
    (height, width), *others = shapes
    rest = tiled(*others, by=by, fresh=fresh) if others else _nothing

    @njit(nogil=True, error_model="numpy")
    def multiply(rows, columns, left, left_bytes, right, right_bytes, depth, out, out_bytes):
        row = 0
        while row + height <= rows:
            a, o, column = left + row * left_bytes, out + row * out_bytes, 0
            while column < columns:
                at = column * 4 * LANES
                if column + width <= columns:
                    by(height, width, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, fresh)
                    column += width
                else:
                    by(height, 1, a, left_bytes, right + at, right_bytes, depth, o + at, out_bytes, fresh)
                    column += 1
            row += height
        if row < rows:
            a, o = left + row * left_bytes, out + row * out_bytes
            rest(rows - row, columns, a, left_bytes, right, right_bytes, depth, o, out_bytes)

    return multiply
