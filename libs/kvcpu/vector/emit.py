"""Emits LLVM IR on vectors of `LANES` floats: loads, loops with values in registers, transposition, e**x. Pure.

Inner loops are written in these terms, as Numba intrinsics, so that accumulators stay in registers and the speed does
not hang on what a compiler recognises. LLVM maps the vectors to whatever the machine has.
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

import math
from functools import cache

from llvmlite import binding, ir
from numba.core import types

from kvcpu.vector.numbers import LANES

CACHE_LINE = 64  # bytes

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
FAST = ("reassoc", "nsz", "contract")  # not nnan or ninf: masks are infinite, and a NaN must come out as one
ADDRESS, COUNT, FLOAT = types.int64, types.int64, types.float32


@cache
def most_sums() -> int:
    """Vectors of LANES floats that a loop may add to without keeping them in memory: half of those that the registers
    hold, which are 32 of AVX-512, 16 of a half each of AVX2 or 32 of a quarter of NEON. Emitted code is cached per
    processor, so it may ask."""
    return 16 if binding.get_host_cpu_features().get("avx512f") else 4


def offset_by(builder, base, elements, size):
    return builder.add(base, builder.mul(elements, ir.Constant(I64, size)))


def load(builder, address, kind=VECTOR, align=4):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder, value, address, align=4):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def plus(builder, address, offset):
    return builder.add(address, ir.Constant(I64, offset)) if offset else address


def splat(builder, scalar):
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def constant(value, kind=F32):
    return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES)


def call(builder, name, kind, arguments):
    """An LLVM intrinsic on vectors or floats, overloaded by `kind`."""
    suffix = f"v{LANES}f32" if isinstance(kind, ir.VectorType) else "f32"
    declared = builder.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), _signature(name, kind))
    return builder.call(declared, arguments)


def _signature(name, kind):
    if name.startswith("vector.reduce.fadd"):
        return ir.FunctionType(F32, [F32, kind])
    if name.startswith("vector.reduce"):
        return ir.FunctionType(F32, [kind])
    return ir.FunctionType(kind, [kind] * {"fmuladd": 3, "maxnum": 2, "minnum": 2}.get(name, 1))


def fma(builder, a, b, c):
    return call(builder, "fmuladd", a.type, [a, b, c])


def loop(builder, count, carried, body):
    """`for i in range(count)` with values carried in registers; `body(i, values) -> values`. Returns the last ones."""
    function = builder.function
    before = builder.block
    head = function.append_basic_block("head")
    inside = function.append_basic_block("inside")
    after = function.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, count), inside, after)
    builder.position_at_end(inside)
    results = body(index, phis)
    end = builder.block
    index.add_incoming(builder.add(index, ir.Constant(I64, 1)), end)
    for phi, result in zip(phis, results, strict=True):
        phi.add_incoming(result, end)
    builder.branch(head)
    builder.position_at_end(after)
    return phis


def exchange(builder, a, b, distance):
    """One stage of a transposition: lanes of a and b that differ in bit `distance` change places."""
    low, high = [], []
    for lane in range(LANES):
        upper = bool(lane & distance)
        low.append(lane - distance + LANES if upper else lane)
        high.append(lane + LANES if upper else lane + distance)
    masks = (ir.Constant(ir.VectorType(I32, LANES), order) for order in (low, high))
    return [builder.shuffle_vector(a, b, mask) for mask in masks]


def lane_sums(builder, vectors):
    """LANES vectors to one: lane i is the sum over vector i."""
    distance = 1
    while len(vectors) > 1:
        halves = []
        for first, second in zip(vectors[::2], vectors[1::2], strict=True):
            halves.append(builder.fadd(*exchange(builder, first, second, distance)))
        vectors, distance = halves, distance * 2
    return vectors[0]


def larger(builder, a, b):
    """Lane by lane; b where a is NaN. One instruction, unlike LLVM's maxnum."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def lane_max(builder, vector):
    """The largest lane, as a float."""
    distance = LANES // 2
    while distance:
        order = ir.Constant(ir.VectorType(I32, LANES), [lane ^ distance for lane in range(LANES)])
        vector = larger(builder, builder.shuffle_vector(vector, vector, order), vector)
        distance //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def transposed(builder, rows):
    distance = 1
    while distance < LANES:
        for at in range(LANES):
            if not at & distance:
                rows[at], rows[at + distance] = exchange(builder, rows[at], rows[at + distance], distance)
        distance *= 2
    return rows


def exp(builder, x):
    """e**x for x <= 0 to about 1 unit in the last place; what is below -87 becomes the smallest normal number or 0.

    x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial for e**r, n added to the exponent bits.
    """
    low = builder.fcmp_ordered("<", x, constant(-87.3))
    clamped = builder.select(low, constant(-87.3), x)
    scaled = builder.fmul(clamped, constant(1 / math.log(2)))
    n = call(builder, "rint", VECTOR, [scaled])
    r = fma(builder, n, constant(-0.693359375), clamped)
    r = fma(builder, n, constant(2.12194440e-4), r)
    power = constant(1 / 5040)
    for denominator in (720, 120, 24, 6, 2, 1, 1):
        power = fma(builder, power, r, constant(1 / denominator))
    exponent = builder.shl(builder.fptosi(n, INTS), constant(23, I32))
    result = builder.bitcast(builder.add(builder.bitcast(power, INTS), exponent), VECTOR)
    return builder.select(low, constant(0.0), result)


def returning_nothing(emit):
    def emit_and_return(context, builder, signature, arguments):
        emit(context, builder, signature, arguments)
        return context.get_dummy_value()

    return emit_and_return
