"""Whole blocks to int8 and back, with the rounding error. One call is one thread's work, as transfer threads are not of
the engine's team.

A row is one (token, head) group. It is read from memory once; its second pass, which quantises and measures, finds it
in the first-level cache. Plain loops in Numba take twice as long.
"""

# mypy: ignore-errors
import numpy as np
from llvmlite import ir
from numba import carray

from kvcpu.vector.conversion import ELEMENTS, narrowed, widened
from kvcpu.vector.emit import ADDRESS, COUNT, F16, F32, I8, I16, I32, I64, INTS, VECTOR, constant, instruction, switched
from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, ITEM_BYTES, LANES, LEVELS, SCALE_BYTES

# Fields of the call block. SUMS: address of the doubles that `quantise` and `restore` write.
KIND, FLOATS, NUMBERS, SCALES, RUNS, HEAD_DIM, SUMS, FIELDS = range(8)

F64 = ir.DoubleType()
DOUBLES = ir.VectorType(F64, LANES)
BITS = {FLOAT32: I32, BFLOAT16: I16, FLOAT16: I16}
INFINITE = {FLOAT32: 0x7F80_0000, BFLOAT16: 0x7F80, FLOAT16: 0x7C00}  # bits of |x|: from here on it is no number

# A scale is a normal number, and so is its inverse; 127 times the largest one is finite.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
LARGEST_SCALE = float(np.nextafter(np.float32(np.finfo(np.float32).max / LEVELS), np.float32(0)))


def _read(b, element, address, lanes):
    """A vector of LANES numbers, or of one number and zeros."""
    if lanes == LANES:
        return b.load(address, ir.VectorType(element, LANES), align=1)
    zeros = ir.Constant(ir.VectorType(element, LANES), None)
    return b.insert_element(zeros, b.load(address, element, align=1), ir.Constant(I32, 0))


def _write(b, vector, address, lanes):
    b.store(vector if lanes == LANES else b.extract_element(vector, ir.Constant(I32, 0)), address, align=1)


def _reduced(b, name, vector):
    element = vector.type.element
    suffix = f"v{LANES}{'f64' if element == F64 else f'i{element.width}'}"
    if name == "fadd":
        kind = ir.FunctionType(element, [element, vector.type])
        reduce = b.module.declare_intrinsic(f"llvm.vector.reduce.fadd.{suffix}", (), kind)
        return b.call(reduce, [ir.Constant(element, 0.0), vector], fastmath=("reassoc",))
    kind = ir.FunctionType(element, [vector.type])
    return b.call(b.module.declare_intrinsic(f"llvm.vector.reduce.{name}.{suffix}", (), kind), [vector])


def _largest_bits(b, kind, source, size):
    """Of |x| in a row: integers compare like the numbers that they spell, and what is none compares larger."""
    element = BITS[kind]
    mask = constant((1 << (element.width - 1)) - 1, element)

    def body(start, lanes, values):
        raw = _read(b, element, b.offset_by(source, start, ITEM_BYTES[kind]), lanes)
        size_of_it = b.and_(raw, mask)
        larger = b.icmp_unsigned(">", size_of_it, values[0])
        return [b.select(larger, size_of_it, values[0])]

    (largest,) = b.pieces(size, [constant(0, element)], body)
    return _reduced(b, "umax", largest)


def _number(b, kind, bits):
    if kind == FLOAT16:
        return b.fpext(b.bitcast(bits, F16), F32)
    if kind == BFLOAT16:
        bits = b.shl(b.zext(bits, I32), ir.Constant(I32, 16))
    return b.bitcast(bits, F32)


def _quantised(b, kind, source, target, size, inverse):
    """Emits a row's numbers; returns the sums of squares, by lane and in levels, of the row and of what it lost."""
    inverses = b.splat(inverse)

    def body(start, lanes, values):
        signal, noise = values
        stored = _read(b, ELEMENTS[kind], b.offset_by(source, start, ITEM_BYTES[kind]), lanes)
        exact = b.fmul(widened(b, kind, stored), inverses)
        rounded = b.llvm("rint", exact)
        numbers = b.trunc(b.fptosi(rounded, INTS), ir.VectorType(I8, LANES))
        _write(b, numbers, b.add(target, start), lanes)
        lost = b.fsub(exact, rounded)
        return [b.fma(exact, exact, signal), b.fma(lost, lost, noise)]

    return b.pieces(size, [constant(0.0), constant(0.0)], body)


@instruction(COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS)
@switched(*BITS)
def quantise(b, kind, source, target, scales, rows, size, sums):
    """`rows` rows of `size` numbers of a stored `kind` become int8 at `target` and fp32 at `scales`.

    A scale is the row's largest |x| / 127, within what makes it and its inverse normal numbers, or 0 for zeros. `sums`
    gets three doubles: the sum of squares, that of the rounding errors, and 1 if any input was not finite, which makes
    the result meaningless.
    """
    element = BITS[kind]
    row_bytes = b.mul(size, ir.Constant(I64, ITEM_BYTES[kind]))

    def body(row, values):
        signal, noise, worst = values
        start = b.add(source, b.mul(row, row_bytes))
        bits = _largest_bits(b, kind, start, size)
        worst = b.select(b.icmp_unsigned(">", bits, worst), bits, worst)
        scale = b.fdiv(_number(b, kind, bits), ir.Constant(F32, LEVELS))
        zero, some = ir.Constant(F32, 0.0), b.icmp_unsigned("!=", bits, ir.Constant(element, 0))
        least, most = (ir.Constant(F32, limit) for limit in (SMALLEST_SCALE, LARGEST_SCALE))
        scale = b.select(b.fcmp_ordered("<", scale, least), least, scale)
        scale = b.select(b.fcmp_ordered(">", scale, most), most, scale)
        inverse = b.select(some, b.fdiv(ir.Constant(F32, 1.0), scale), zero)
        b.store(b.select(some, scale, zero), b.offset_by(scales, row, SCALE_BYTES), align=1)
        target_row = b.add(target, b.mul(row, size))
        wide = b.fpext(scale, F64)
        weight = b.splat(b.fmul(wide, wide))
        sums_of_row = _quantised(b, kind, start, target_row, size, inverse)
        totals = []
        for total, part in zip((signal, noise), sums_of_row, strict=True):
            totals.append(b.fadd(total, b.fmul(b.fpext(part, DOUBLES), weight)))
        return [*totals, worst]

    nothing = [ir.Constant(DOUBLES, [0.0] * LANES)] * 2
    signal, noise, worst = b.loop(rows, [*nothing, ir.Constant(element, 0)], body)
    bad = b.icmp_unsigned(">=", worst, ir.Constant(element, INFINITE[kind]))
    b.store(_reduced(b, "fadd", signal), sums, align=8)
    b.store(_reduced(b, "fadd", noise), b.plus(sums, 8), align=8)
    b.store(b.uitofp(bad, F64), b.plus(sums, 16), align=8)


@instruction(COUNT, ADDRESS, ADDRESS, ADDRESS, COUNT, COUNT, ADDRESS)
@switched(*BITS)
def restore(b, kind, source, scales, target, rows, size, bad):
    """Inverse of `quantise`. `bad` gets a double: 1 if a scale was invalid, which makes the result meaningless."""
    row_bytes = b.mul(size, ir.Constant(I64, ITEM_BYTES[kind]))

    def body(row, values):
        scale = b.load(b.offset_by(scales, row, SCALE_BYTES), F32, align=1)
        bits = b.bitcast(scale, I32)
        worst = b.select(b.icmp_unsigned(">", bits, values[0]), bits, values[0])
        scales_of_row = b.splat(scale)
        source_row = b.add(source, b.mul(row, size))
        target_row = b.add(target, b.mul(row, row_bytes))

        def convert(start, lanes, _):
            levels = _read(b, I8, b.add(source_row, start), lanes)
            floats = b.fmul(b.sitofp(b.sext(levels, INTS), VECTOR), scales_of_row)
            where = b.offset_by(target_row, start, ITEM_BYTES[kind])
            _write(b, narrowed(b, kind, floats, nan=False), where, lanes)

        b.pieces(size, [], convert)
        return [worst]

    (worst,) = b.loop(rows, [ir.Constant(I32, 0)], body)
    largest = np.float32(LARGEST_SCALE).view(np.uint32)  # a negative scale's bits are larger still
    wrong = b.icmp_unsigned(">", worst, ir.Constant(I32, int(largest)))
    b.store(b.uitofp(wrong, F64), bad, align=8)


def encode(block):
    p = carray(block, (FIELDS,), np.int64)
    quantise(p[KIND], p[FLOATS], p[NUMBERS], p[SCALES], p[RUNS], p[HEAD_DIM], p[SUMS])


def decode(block):
    p = carray(block, (FIELDS,), np.int64)
    restore(p[KIND], p[NUMBERS], p[SCALES], p[FLOATS], p[RUNS], p[HEAD_DIM], p[SUMS])
