"""Rows of stored numbers to int8 and back, with what that costs. Numba intrinsics on memory addresses.

A row is one (token, head) group. It is read from memory once; its second pass, which quantises and measures, finds it
in the first-level cache. Addresses are in bytes, sizes count elements. Nothing here checks bounds.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    VECTOR,
    call,
    constant,
    fma,
    load,
    loop,
    offset_by,
    plus,
    returning_nothing,
    splat,
    store,
)
from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, ITEM_BYTES, LEVELS, SCALE_BYTES

F64 = ir.DoubleType()
DOUBLES = ir.VectorType(F64, LANES)
STORED = {FLOAT32: F32, BFLOAT16: I16, FLOAT16: F16}
BITS = {FLOAT32: I32, BFLOAT16: I16, FLOAT16: I16}
INFINITE = {FLOAT32: 0x7F80_0000, BFLOAT16: 0x7F80, FLOAT16: 0x7C00}  # bits of |x|: from here on it is no number

# A scale is a normal number, and so is its inverse; 127 times the largest one is finite.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.nextafter(np.float32(np.finfo(np.float32).max / LEVELS), np.float32(0)))


def _vector(element):
    return ir.VectorType(element, LANES)


def _strips(builder, count, carried, body):
    """`body(start, whole, values) -> values` for each LANES elements, then for each element after them by itself."""
    lanes = ir.Constant(I64, LANES)
    strips = builder.sdiv(count, lanes)
    values = loop(builder, strips, carried, lambda i, values: body(builder.mul(i, lanes), True, values))
    done = builder.mul(strips, lanes)
    rest = builder.sub(count, done)
    return loop(builder, rest, values, lambda i, values: body(builder.add(done, i), False, values))


def _read(builder, element, address, whole):
    """LANES numbers; of a single one, that and zeros."""
    if whole:
        return load(builder, address, _vector(element), align=1)
    zeros = ir.Constant(_vector(element), None)
    return builder.insert_element(zeros, load(builder, address, element, align=1), ir.Constant(I32, 0))


def _write(builder, vector, address, whole):
    if not whole:
        vector = builder.extract_element(vector, ir.Constant(I32, 0))
    store(builder, vector, address, align=1)


def _widened(builder, kind, stored):
    if kind == FLOAT32:
        return stored
    if kind == FLOAT16:
        return builder.fpext(stored, VECTOR)
    return builder.bitcast(builder.shl(builder.zext(stored, INTS), constant(16, I32)), VECTOR)


def _narrowed(builder, kind, floats):
    """To nearest, ties to even. Numbers only: a NaN may become infinite."""
    if kind == FLOAT32:
        return floats
    if kind == FLOAT16:
        return builder.fptrunc(floats, _vector(F16))
    bits = builder.bitcast(floats, INTS)
    odd = builder.and_(builder.lshr(bits, constant(16, I32)), constant(1, I32))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF, I32)))
    return builder.trunc(builder.lshr(rounded, constant(16, I32)), _vector(I16))


def _reduced(builder, name, vector):
    element = vector.type.element
    suffix = f"v{LANES}{'f64' if element == F64 else f'i{element.width}'}"
    if name == "fadd":
        kind = ir.FunctionType(element, [element, vector.type])
        reduce = builder.module.declare_intrinsic(f"llvm.vector.reduce.fadd.{suffix}", (), kind)
        return builder.call(reduce, [ir.Constant(element, 0.0), vector], fastmath=("reassoc",))
    kind = ir.FunctionType(element, [vector.type])
    return builder.call(builder.module.declare_intrinsic(f"llvm.vector.reduce.{name}.{suffix}", (), kind), [vector])


def _largest_bits(builder, kind, source, size):
    """Of |x| in a row: integers compare like the numbers that they spell, and what is none compares larger."""
    element = BITS[kind]
    mask = constant((1 << (element.width - 1)) - 1, element)

    def body(start, whole, values):
        raw = _read(builder, element, offset_by(builder, source, start, ITEM_BYTES[kind]), whole)
        size_of_it = builder.and_(raw, mask)
        larger = builder.icmp_unsigned(">", size_of_it, values[0])
        return [builder.select(larger, size_of_it, values[0])]

    (largest,) = _strips(builder, size, [constant(0, element)], body)
    return _reduced(builder, "umax", largest)


def _number(builder, kind, bits):
    """One number's bits as a float."""
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(bits, F16), F32)
    if kind == BFLOAT16:
        bits = builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16))
    return builder.bitcast(bits, F32)


def _clamped(builder, scale):
    least, most = (ir.Constant(F32, limit) for limit in (SMALLEST_SCALE, LARGEST_SCALE))
    scale = builder.select(builder.fcmp_ordered("<", scale, least), least, scale)
    return builder.select(builder.fcmp_ordered(">", scale, most), most, scale)


def _quantised(builder, kind, source, target, size, inverse):
    """Emits a row's numbers; returns the sums of squares, by lane and in levels, of the row and of what it lost."""
    inverses = splat(builder, inverse)

    def body(start, whole, values):
        signal, noise = values
        stored = _read(builder, STORED[kind], offset_by(builder, source, start, ITEM_BYTES[kind]), whole)
        exact = builder.fmul(_widened(builder, kind, stored), inverses)
        rounded = call(builder, "rint", VECTOR, [exact])
        numbers = builder.trunc(builder.fptosi(rounded, INTS), _vector(I8))
        _write(builder, numbers, builder.add(target, start), whole)
        lost = builder.fsub(exact, rounded)
        return [fma(builder, exact, exact, signal), fma(builder, lost, lost, noise)]

    return _strips(builder, size, [constant(0.0), constant(0.0)], body)


@intrinsic(prefer_literal=True)
def quantise(_context, kind, source, target, scales, rows, size, sums):
    """`rows` rows of `size` numbers of a stored `kind` (a literal) become int8 at `target` and fp32 at `scales`.

    A scale is the row's largest |x| / 127, within what makes it and its inverse normal numbers, or 0 for zeros. To
    `sums`, three doubles: sum of squares of the row and of what rounding to levels cost, and 1 if anything was no
    number; then what was written means nothing.
    """
    number_kind = kind.literal_value
    element = BITS[number_kind]

    def emit(_, builder, __, arguments):
        _, read, written, factors, count, length, out = arguments
        row_bytes = builder.mul(length, ir.Constant(I64, ITEM_BYTES[number_kind]))

        def body(row, values):
            signal, noise, worst = values
            start = builder.add(read, builder.mul(row, row_bytes))
            bits = _largest_bits(builder, number_kind, start, length)
            worst = builder.select(builder.icmp_unsigned(">", bits, worst), bits, worst)
            scale = builder.fdiv(_number(builder, number_kind, bits), ir.Constant(F32, LEVELS))
            zero, some = ir.Constant(F32, 0.0), builder.icmp_unsigned("!=", bits, ir.Constant(element, 0))
            scale = _clamped(builder, scale)
            inverse = builder.select(some, builder.fdiv(ir.Constant(F32, 1.0), scale), zero)
            store(builder, builder.select(some, scale, zero), offset_by(builder, factors, row, SCALE_BYTES), align=1)
            target_row = builder.add(written, builder.mul(row, length))
            wide = builder.fpext(scale, F64)
            weight = splat(builder, builder.fmul(wide, wide))
            sums_of_row = _quantised(builder, number_kind, start, target_row, length, inverse)
            totals = []
            for total, part in zip((signal, noise), sums_of_row, strict=True):
                totals.append(builder.fadd(total, builder.fmul(builder.fpext(part, DOUBLES), weight)))
            return [*totals, worst]

        nothing = [ir.Constant(DOUBLES, [0.0] * LANES)] * 2
        signal, noise, worst = loop(builder, count, [*nothing, ir.Constant(element, 0)], body)
        bad = builder.icmp_unsigned(">=", worst, ir.Constant(element, INFINITE[number_kind]))
        store(builder, _reduced(builder, "fadd", signal), out, align=8)
        store(builder, _reduced(builder, "fadd", noise), plus(builder, out, 8), align=8)
        store(builder, builder.uitofp(bad, F64), plus(builder, out, 16), align=8)

    return types.void(kind, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS), returning_nothing(emit)


@intrinsic(prefer_literal=True)
def restore(_context, kind, source, scales, target, rows, size, bad):
    """Inverse of `quantise`. To `bad`, a double: 1 if a scale was none; then what was written means nothing."""
    number_kind = kind.literal_value

    def emit(_, builder, __, arguments):
        _, read, factors, written, count, length, out = arguments
        row_bytes = builder.mul(length, ir.Constant(I64, ITEM_BYTES[number_kind]))

        def body(row, values):
            scale = load(builder, offset_by(builder, factors, row, SCALE_BYTES), F32, align=1)
            bits = builder.bitcast(scale, I32)
            worst = builder.select(builder.icmp_unsigned(">", bits, values[0]), bits, values[0])
            scales_of_row = splat(builder, scale)
            source_row = builder.add(read, builder.mul(row, length))
            target_row = builder.add(written, builder.mul(row, row_bytes))

            def convert(start, whole, nothing):
                levels = _read(builder, I8, builder.add(source_row, start), whole)
                floats = builder.fmul(builder.sitofp(builder.sext(levels, INTS), VECTOR), scales_of_row)
                where = offset_by(builder, target_row, start, ITEM_BYTES[number_kind])
                _write(builder, _narrowed(builder, number_kind, floats), where, whole)
                return nothing

            _strips(builder, length, [], convert)
            return [worst]

        (worst,) = loop(builder, count, [ir.Constant(I32, 0)], body)
        largest = np.float32(LARGEST_SCALE).view(np.uint32)  # a negative scale's bits are larger still
        wrong = builder.icmp_unsigned(">", worst, ir.Constant(I32, int(largest)))
        store(builder, builder.uitofp(wrong, F64), out, align=8)

    return types.void(kind, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS), returning_nothing(emit)
