"""Normalisation and rotation of rows of floats. Numba intrinsics on memory addresses; sizes are multiples of LANES."""

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
    FAST,
    FLOAT,
    I64,
    LANES,
    VECTOR,
    call,
    constant,
    fma,
    load,
    loop,
    offset_by,
    returning_nothing,
    splat,
    store,
)


def _total(builder, vector):
    total = call(builder, "vector.reduce.fadd", VECTOR, [ir.Constant(F32, -0.0), vector])
    for flag in FAST:
        total.fastmath.add(flag)
    return total


@intrinsic
def row_sum(_context, row, count):
    """Sum of `count` floats."""

    def emit(_, builder, __, arguments):
        address, elements = arguments

        def body(i, values):
            return [builder.fadd(values[0], load(builder, offset_by(builder, address, i, 4 * LANES)))]

        return _total(builder, loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [constant(0.0)], body)[0])

    return FLOAT(ADDRESS, COUNT), emit


@intrinsic
def row_spread(_context, row, count, mean):
    """Sum of the squares of `count` floats less `mean`."""

    def emit(_, builder, __, arguments):
        address, elements, middle = arguments
        middles = splat(builder, middle)

        def body(i, values):
            x = builder.fsub(load(builder, offset_by(builder, address, i, 4 * LANES)), middles)
            return [fma(builder, x, x, values[0])]

        return _total(builder, loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [constant(0.0)], body)[0])

    return FLOAT(ADDRESS, COUNT, FLOAT), emit


@intrinsic
def row_affine(_context, row, count, mean, scale, weight, bias):
    """Each x of `count` floats becomes (x - mean) * scale * weight + bias, the last two being rows."""

    def emit(_, builder, __, arguments):
        address, elements, middle, factor, weights, biases = arguments
        middles, factors = splat(builder, middle), splat(builder, factor)

        def body(i, values):
            offset = builder.mul(i, ir.Constant(I64, 4 * LANES))
            where = builder.add(address, offset)
            x = builder.fmul(builder.fsub(load(builder, where), middles), factors)
            weighted = load(builder, builder.add(weights, offset))
            store(builder, fma(builder, x, weighted, load(builder, builder.add(biases, offset))), where)
            return []

        loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)

    return types.void(ADDRESS, COUNT, FLOAT, FLOAT, ADDRESS, ADDRESS), returning_nothing(emit)


@intrinsic
def row_rotate(_context, row, cosines, sines, half):
    """Rotary embedding of 2 * `half` floats: the halves (x, y) become (x cos - y sin, y cos + x sin)."""

    def emit(_, builder, __, arguments):
        address, cosine, sine, elements = arguments
        shift = builder.mul(elements, ir.Constant(I64, 4))

        def body(i, values):
            offset = builder.mul(i, ir.Constant(I64, 4 * LANES))
            first, second = builder.add(address, offset), builder.add(builder.add(address, offset), shift)
            x, y = load(builder, first), load(builder, second)
            low, high = (builder.add(base, offset) for base in (cosine, sine))
            turned = builder.fmul(y, load(builder, high))
            store(builder, builder.fsub(builder.fmul(x, load(builder, low)), turned), first)
            across = builder.fmul(x, load(builder, builder.add(high, shift)))
            store(builder, fma(builder, y, load(builder, builder.add(low, shift)), across), second)
            return []

        loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)

    return types.void(ADDRESS, ADDRESS, ADDRESS, COUNT), returning_nothing(emit)
