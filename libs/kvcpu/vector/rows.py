"""Contiguous rows of floats: sums, softmax, activations, normalisation, rotation. Sizes are multiples of LANES."""

# mypy: ignore-errors
import math

from llvmlite import ir

from kvcpu.vector.conversion import to_halves
from kvcpu.vector.emit import ADDRESS, COUNT, FLOAT, I64, LITERAL, Emitter, constant, instruction


def _change(b, row, count, changed, *others):
    """Emits that each vector x at `row` becomes `changed(x, those of the other rows)`."""

    def body(i, _):
        where = b.vector_at(row, i)
        x = b.load(where)
        b.store(changed(x, *(b.load(b.vector_at(other, i)) for other in others)), where)

    b.strips(count, [], body)


def _fold(b, row, count, first, add):
    """Emits `total = add(total, x)` for each vector x at `row`, from `first` on; returns the last."""

    return b.strips(count, [first], lambda i, totals: [add(totals[0], b.load(b.vector_at(row, i)))])[0]


@instruction(ADDRESS, COUNT, returns=FLOAT)
def row_max(b, row, count):
    largest = _fold(b, row, count, constant(-math.inf), lambda largest, x: b.larger(x, largest))
    return b.lane_max(largest)


@instruction(ADDRESS, COUNT, returns=FLOAT)
def row_sum(b, row, count):
    return b.lane_sum(_fold(b, row, count, constant(0.0), b.fadd))


@instruction(ADDRESS, COUNT, FLOAT, returns=FLOAT)
def row_spread(b, row, count, mean):
    """Sum of the squares of `count` floats less `mean`."""
    means = b.splat(mean)

    def add(total, x):
        distance = b.fsub(x, means)
        return b.fma(distance, distance, total)

    return b.lane_sum(_fold(b, row, count, constant(0.0), add))


@instruction(ADDRESS, COUNT, FLOAT)
def row_scale(b, row, count, factor):
    factors = b.splat(factor)
    _change(b, row, count, lambda x: b.fmul(x, factors))


@instruction(ADDRESS, ADDRESS, COUNT)
def row_add(b, row, other, count):
    """Add `count` floats at `other` to those at `row`."""
    _change(b, row, count, b.fadd, other)


@instruction(ADDRESS, COUNT, FLOAT, FLOAT, ADDRESS, ADDRESS)
def row_affine(b, row, count, mean, scale, weights, biases):
    """Each x of `count` floats becomes (x - mean) * scale * weight + bias, the last two being rows."""
    means, scales = b.splat(mean), b.splat(scale)

    def changed(x, weight, bias):
        return b.fma(b.fmul(b.fsub(x, means), scales), weight, bias)

    _change(b, row, count, changed, weights, biases)


@instruction(ADDRESS, COUNT, FLOAT)
def row_cap(b, row, count, cap):
    """Each x of `count` floats becomes cap * tanh(x / cap)."""
    caps, one = b.splat(cap), constant(1.0)

    def capped(x):
        x = b.fdiv(x, caps)
        size = b.llvm("fabs", x)
        small = b.exp(b.fmul(size, constant(-2.0)))  # tanh|x| = (1 - e**-2|x|) / (1 + e**-2|x|)
        tanh = b.fdiv(b.fsub(one, small), b.fadd(one, small))
        signed = b.select(b.fcmp_ordered("<", x, constant(0.0)), b.fneg(tanh), tanh)
        return b.fmul(signed, caps)

    _change(b, row, count, capped)


def _row_exp(store, size):
    @instruction(ADDRESS, COUNT, FLOAT, FLOAT, returns=FLOAT)
    def row_exp(b, row, count, factor, largest):
        factors, tops = b.splat(factor), b.splat(b.fneg(largest))

        def body(i, totals):
            power = b.exp(b.fma(b.load(b.vector_at(row, i)), factors, tops))
            store(b, power, b.vector_at(row, i, size))
            return [b.fadd(totals[0], power)]

        return b.lane_sum(b.strips(count, [constant(0.0)], body)[0])

    return row_exp


# Each of `count` floats becomes e**(factor * it - largest), as a float or, from `row` on, as bfloat16; returns the sum
# of the floats. None may exceed `largest`.
row_exp, row_exp_halves = _row_exp(Emitter.store, 4), _row_exp(to_halves, 2)


def _activated(b, g, tanh):
    """SiLU, g / (1 + e**-g), or, where `tanh`, GELU's tanh form: 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))),
    which is g / (1 + e**-2y) with y the argument of tanh."""
    y = g
    if tanh:
        cubic = b.fma(b.fmul(b.fmul(g, g), constant(0.044715)), g, g)
        y = b.fmul(cubic, constant(2 * math.sqrt(2 / math.pi)))
    one = constant(1.0)
    power = b.exp(b.fneg(b.llvm("fabs", y)))  # never overflows
    positive = b.fcmp_ordered(">=", y, constant(0.0))
    sigmoid = b.fdiv(b.select(positive, one, power), b.fadd(one, power))
    return b.fmul(g, sigmoid)


@instruction(ADDRESS, COUNT, LITERAL)
def row_act(b, row, count, tanh):
    """Each of `count` floats becomes act(it); `tanh` is a literal, see `_activated`."""
    _change(b, row, count, lambda g: _activated(b, g, tanh))


@instruction(ADDRESS, ADDRESS, COUNT, LITERAL)
def row_gate(b, gate, up, count, tanh):
    """Each of `count` floats g at `gate` becomes act(g) * the float at `up`; `tanh` is a literal, see `_activated`."""
    _change(b, gate, count, lambda g, other: b.fmul(_activated(b, g, tanh), other), up)


@instruction(ADDRESS, ADDRESS, ADDRESS, COUNT)
def row_rotate(b, row, cosines, sines, half):
    """Rotary embedding of 2 * `half` floats: the halves (x, y) become (x cos - y sin, y cos + x sin)."""
    shift = b.mul(half, ir.Constant(I64, 4))

    def body(i, _):
        first, low, high = (b.vector_at(base, i) for base in (row, cosines, sines))
        second = b.add(first, shift)
        x, y = b.load(first), b.load(second)
        turned = b.fmul(y, b.load(high))
        b.store(b.fsub(b.fmul(x, b.load(low)), turned), first)
        across = b.fmul(x, b.load(b.add(high, shift)))
        b.store(b.fma(y, b.load(b.add(low, shift)), across), second)

    b.strips(half, [], body)
