"""Rows of floats: softmax, scaling, conversion from and to stored numbers. Numba intrinsics on memory addresses.

Addresses are integers in bytes, rows are contiguous, sizes count elements. Nothing here checks bounds.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

import math

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector import halves
from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F16,
    F32,
    FAST,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    VECTOR,
    call,
    constant,
    exp,
    fma,
    lane_max,
    larger,
    load,
    loop,
    offset_by,
    plus,
    returning_nothing,
    splat,
    store,
)


@intrinsic
def row_max(_context, scores, count):
    """Largest of `count` floats at `scores`, a multiple of LANES."""

    def emit(_, builder, __, arguments):
        address, elements = arguments
        vectors = builder.sdiv(elements, ir.Constant(I64, LANES))

        def body(i, values):
            loaded = load(builder, offset_by(builder, address, i, 4 * LANES))
            return [larger(builder, loaded, values[0])]

        (largest,) = loop(builder, vectors, [constant(-math.inf)], body)
        return lane_max(builder, largest)

    return FLOAT(ADDRESS, COUNT), emit


@intrinsic
def row_cap(_context, scores, count, cap):
    """Each of `count` floats x at `scores` becomes cap * tanh(x / cap)."""

    def emit(_, builder, __, arguments):
        address, elements, limit = arguments
        vectors = builder.sdiv(elements, ir.Constant(I64, LANES))
        limits = splat(builder, limit)

        def body(i, values):
            where = offset_by(builder, address, i, 4 * LANES)
            x = builder.fdiv(load(builder, where), limits)
            size = call(builder, "fabs", VECTOR, [x])
            small = exp(builder, builder.fmul(size, constant(-2.0)))  # tanh|x| = (1 - e**-2|x|) / (1 + e**-2|x|)
            one = constant(1.0)
            tanh = builder.fdiv(builder.fsub(one, small), builder.fadd(one, small))
            negative = builder.fcmp_ordered("<", x, constant(0.0))
            signed = builder.select(negative, builder.fneg(tanh), tanh)
            store(builder, builder.fmul(signed, limits), where)
            return []

        loop(builder, vectors, [], body)
        return

    return types.void(ADDRESS, COUNT, FLOAT), returning_nothing(emit)


@intrinsic
def row_scale(_context, row, count, factor):
    """Multiply `count` floats at `row`, a multiple of LANES."""

    def emit(_, builder, __, arguments):
        address, elements, scalar = arguments
        vectors = builder.sdiv(elements, ir.Constant(I64, LANES))
        factors = splat(builder, scalar)

        def body(i, values):
            where = offset_by(builder, address, i, 4 * LANES)
            store(builder, builder.fmul(load(builder, where), factors), where)
            return []

        loop(builder, vectors, [], body)
        return

    return types.void(ADDRESS, COUNT, FLOAT), returning_nothing(emit)


@intrinsic
def row_add(_context, row, other, count):
    """Add `count` floats at `other`, a multiple of LANES, to those at `row`."""

    def emit(_, builder, __, arguments):
        address, added, elements = arguments

        def body(i, values):
            where = offset_by(builder, address, i, 4 * LANES)
            store(
                builder,
                builder.fadd(load(builder, where), load(builder, offset_by(builder, added, i, 4 * LANES))),
                where,
            )
            return []

        loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)

    return types.void(ADDRESS, ADDRESS, COUNT), returning_nothing(emit)


@intrinsic
def row_fill(_context, row, count, value):
    """Set `count` floats at `row`."""

    def emit(_, builder, __, arguments):
        address, elements, scalar = arguments

        def body(i, values):
            store(builder, scalar, offset_by(builder, address, i, 4))
            return []

        loop(builder, elements, [], body)
        return

    return types.void(ADDRESS, COUNT, FLOAT), returning_nothing(emit)


def _as_floats(builder, kind, address, lanes):
    """`lanes` numbers of a stored kind as floats; see `FLOAT32` and the others in `kernels`."""
    if kind == 0:
        return load(builder, address, ir.VectorType(F32, lanes))
    if kind == 1:
        raw = load(builder, address, ir.VectorType(I16, lanes), align=2)
        wide = builder.zext(raw, ir.VectorType(I32, lanes))
        bits = builder.shl(wide, ir.Constant(ir.VectorType(I32, lanes), [16] * lanes))
        return builder.bitcast(bits, ir.VectorType(F32, lanes))
    if kind == 2:
        raw = load(builder, address, ir.VectorType(F16, lanes), align=2)
        return builder.fpext(raw, ir.VectorType(F32, lanes))
    raw = load(builder, address, ir.VectorType(I8, lanes), align=1)
    return builder.sitofp(builder.sext(raw, ir.VectorType(I32, lanes)), ir.VectorType(F32, lanes))


_SIZES = (4, 2, 2, 1)


def _from_floats(builder, kind, value, address):
    if kind == 0:
        store(builder, value, address)
        return
    lanes = value.type.count
    if kind == 2:
        store(builder, builder.fptrunc(value, ir.VectorType(F16, lanes)), address, align=2)
        return
    bits = builder.bitcast(value, ir.VectorType(I32, lanes))  # bfloat16, to nearest, ties to even

    def each(number):
        return ir.Constant(ir.VectorType(I32, lanes), [number] * lanes)

    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, each(0x7FFF))), each(16))
    nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(nan, each(0x7FC0), rounded)
    store(builder, builder.trunc(rounded, ir.VectorType(I16, lanes)), address, align=2)


def _to_halves(builder, vector, address):
    """As bfloat16, in the processor's own way: numbers too small to be normal may become 0."""
    if halves.multiplies_pairs():
        store(builder, halves.halved(builder, vector), address, align=2)
    else:
        _from_floats(builder, 1, vector, address)


def _exp_row(builder, arguments, kind):
    """Emits e**(factor * it - largest) of each of `count` floats, written as a stored kind; returns their sum before
    that."""
    address, elements, factor, top, target = arguments
    vectors = builder.sdiv(elements, ir.Constant(I64, LANES))
    factors, tops = splat(builder, factor), splat(builder, builder.fneg(top))

    def body(i, values):
        score = load(builder, offset_by(builder, address, i, 4 * LANES))
        power = exp(builder, fma(builder, score, factors, tops))
        where = offset_by(builder, target, i, _SIZES[kind] * LANES)
        if kind == 1:
            _to_halves(builder, power, where)
        else:
            _from_floats(builder, kind, power, where)
        return [builder.fadd(values[0], power)]

    (sums,) = loop(builder, vectors, [constant(0.0)], body)
    total = call(builder, "vector.reduce.fadd", VECTOR, [ir.Constant(F32, -0.0), sums])
    for flag in FAST:
        total.fastmath.add(flag)
    return total


@intrinsic
def row_exp(_context, scores, count, factor, largest):
    """Each of `count` floats at `scores` becomes e**(factor * it - largest); returns their sum. None may exceed
    `largest`."""

    def emit(_, builder, __, arguments):
        return _exp_row(builder, [*arguments, arguments[0]], 0)

    return FLOAT(ADDRESS, COUNT, FLOAT, FLOAT), emit


@intrinsic
def row_exp_halves(_context, scores, count, factor, largest):
    """As `row_exp`, but the powers become bfloat16, from `scores` on; the sum is of what they were before."""

    def emit(_, builder, __, arguments):
        return _exp_row(builder, [*arguments, arguments[0]], 1)

    return FLOAT(ADDRESS, COUNT, FLOAT, FLOAT), emit


def _converted(builder, count, vector, scalar):
    """Run `vector(i)` for each whole group of LANES elements and `scalar(i)` for the elements after them."""
    lanes = ir.Constant(I64, LANES)
    whole = builder.sdiv(count, lanes)
    loop(builder, whole, [], lambda i, _: (vector(builder.mul(i, lanes)), [])[1])
    done = builder.mul(whole, lanes)
    loop(builder, builder.sub(count, done), [], lambda i, _: (scalar(builder.add(done, i)), [])[1])


def _scaled_copy(builder, arguments, kinds):
    """Emits the copy of `count` numbers of one stored kind, times a factor, as numbers of another; see `widen`."""
    source, target, count, scalar = arguments
    read, written = kinds

    def part(lanes):
        if lanes > 1:
            factors = splat(builder, scalar)
        else:
            one = ir.VectorType(F32, 1)
            factors = builder.insert_element(ir.Constant(one, ir.Undefined), scalar, ir.Constant(I32, 0))

        def convert(i):
            value = _as_floats(builder, read, offset_by(builder, source, i, _SIZES[read]), lanes)
            where = offset_by(builder, target, i, _SIZES[written])
            _from_floats(builder, written, builder.fmul(value, factors), where)

        return convert

    _converted(builder, count, part(LANES), part(1))


@intrinsic(prefer_literal=True)
def widen(_context, kind, source, target, count, factor):
    """`count` numbers of a stored `kind` (a literal) times `factor` become floats at `target`."""
    kinds = kind.literal_value, 0

    def emit(_, builder, __, arguments):
        _scaled_copy(builder, arguments[1:], kinds)

    return types.void(kind, ADDRESS, ADDRESS, COUNT, FLOAT), returning_nothing(emit)


@intrinsic(prefer_literal=True)
def narrow(_context, kind, source, target, count, factor):
    """`count` floats at `source` times `factor` become numbers of a stored `kind` (a literal, not int8)."""
    kinds = 0, kind.literal_value

    def emit(_, builder, __, arguments):
        _scaled_copy(builder, arguments[1:], kinds)

    return types.void(kind, ADDRESS, ADDRESS, COUNT, FLOAT), returning_nothing(emit)


@intrinsic
def line_to_halves(_context, source, target):
    """2 LANES floats become bfloat16."""

    def emit(_, builder, __, arguments):
        floats, out = arguments
        for at in range(2):
            vector = load(builder, plus(builder, floats, 4 * LANES * at))
            _to_halves(builder, vector, plus(builder, out, 2 * LANES * at))

    return types.void(ADDRESS, ADDRESS), returning_nothing(emit)


def _activated(builder, g, tanh):
    """SiLU, g / (1 + e**-g), or, where `tanh`, GELU's tanh form: 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))),
    which is g / (1 + e**-2y) with y the argument of tanh.
    """
    y = g
    if tanh:
        cubic = fma(builder, builder.fmul(builder.fmul(g, g), constant(0.044715)), g, g)
        y = builder.fmul(cubic, constant(2 * math.sqrt(2 / math.pi)))
    one = constant(1.0)
    power = exp(builder, builder.fneg(call(builder, "fabs", VECTOR, [y])))  # never overflows
    positive = builder.fcmp_ordered(">=", y, constant(0.0))
    sigmoid = builder.fdiv(builder.select(positive, one, power), builder.fadd(one, power))
    return builder.fmul(g, sigmoid)


def _activate(builder, row, elements, tanh, ups=None):
    def body(i, values):
        where = offset_by(builder, row, i, 4 * LANES)
        result = _activated(builder, load(builder, where), tanh)
        if ups is not None:
            result = builder.fmul(result, load(builder, offset_by(builder, ups, i, 4 * LANES)))
        store(builder, result, where)
        return []

    loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)


@intrinsic(prefer_literal=True)
def row_act(_context, row, count, tanh):
    """Each of `count` floats at `row` becomes act(it); `tanh` is a literal, see `_activated`."""
    curved = bool(tanh.literal_value)

    def emit(_, builder, __, arguments):
        _activate(builder, arguments[0], arguments[1], curved)

    return types.void(ADDRESS, COUNT, tanh), returning_nothing(emit)


@intrinsic(prefer_literal=True)
def row_gate(_context, gate, up, count, tanh):
    """Each of `count` floats g at `gate` becomes act(g) * the float at `up`; `tanh` is a literal, see `_activated`."""
    curved = bool(tanh.literal_value)

    def emit(_, builder, __, arguments):
        _activate(builder, arguments[0], arguments[2], curved, arguments[1])

    return types.void(ADDRESS, ADDRESS, COUNT, tanh), returning_nothing(emit)


@intrinsic
def interleave(_context, first, second, target, count):
    """`count` (a multiple of LANES) pairs of 16-bit numbers, one of each row, the first in the lower half."""

    def emit(_, builder, __, arguments):
        a, b, out, elements = arguments
        halves = ir.VectorType(I16, LANES)

        def body(i, values):
            low, high = (
                builder.zext(load(builder, offset_by(builder, row, i, 2 * LANES), halves, align=2), INTS)
                for row in (a, b)
            )
            pairs = builder.or_(low, builder.shl(high, constant(16, I32)))
            store(builder, pairs, offset_by(builder, out, i, 4 * LANES))
            return []

        loop(builder, builder.sdiv(elements, ir.Constant(I64, LANES)), [], body)

    return types.void(ADDRESS, ADDRESS, ADDRESS, COUNT), returning_nothing(emit)
