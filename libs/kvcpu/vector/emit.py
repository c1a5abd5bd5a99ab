"""Emits LLVM IR on vectors of `LANES` floats: loads, loops with values in registers, transposition, e**x. Pure.

Inner loops are Numba intrinsics in these terms, so that accumulators stay in registers. In all of kvcpu, addresses are
integers in bytes, sizes count elements unless said otherwise, and nothing checks bounds.
"""

# mypy: ignore-errors
import math
from functools import wraps

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector.numbers import LANES

CACHE_LINE = 64  # bytes

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)
FAST = ("reassoc", "nsz", "contract")  # not nnan or ninf: masks are infinite, and a NaN must come out as one
ADDRESS, COUNT, FLOAT = types.int64, types.int64, types.float32
LITERAL = None  # an argument that is known when it is compiled: emitters get Python's number


def constant(value, kind=F32, lanes=LANES):
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


class Emitter:
    """An llvmlite builder, and what is made of its instructions: `load` and `store` take addresses as integers."""

    def __init__(self, builder):
        self._builder = builder

    def __getattr__(self, name):
        return getattr(self._builder, name)

    def offset_by(self, base, elements, size):
        return self.add(base, self.mul(elements, ir.Constant(I64, size)))

    def load(self, address, kind=VECTOR, align=4):
        return self._builder.load(self.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value, address, align=4):
        self._builder.store(value, self.inttoptr(address, value.type.as_pointer()), align=align)

    def plus(self, address, offset):
        return self.add(address, ir.Constant(I64, offset)) if offset else address

    def rows_of(self, base, stride, count):
        return [self.offset_by(base, stride, row) for row in range(count)]

    def splat(self, scalar, lanes=LANES):
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.shuffle_vector(first, undefined, constant(0, I32, lanes))

    def llvm(self, name, *arguments):
        """An LLVM function that is overloaded by the type of its last argument, of the type of its first."""
        types_of = [one.type for one in arguments]
        suffix = f"v{LANES}f32" if isinstance(types_of[-1], ir.VectorType) else "f32"
        kind = ir.FunctionType(types_of[0], types_of)
        return self.call(self.module.declare_intrinsic(f"llvm.{name}.{suffix}", (), kind), arguments)

    def fma(self, a, b, c):
        return self.llvm("fmuladd", a, b, c)

    def loop(self, count, carried, body):
        """`for i in range(count)`, values carried in registers: `body(i, values) -> values`. Returns the last ones."""
        before = self.block
        head, inside, after = (self.function.append_basic_block(name) for name in ("head", "inside", "after"))
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        phis = []
        for value in carried:
            phi = self.phi(value.type)
            phi.add_incoming(value, before)
            phis.append(phi)
        self.cbranch(self.icmp_signed("<", index, count), inside, after)
        self.position_at_end(inside)
        results = body(index, phis) or ()
        end = self.block
        index.add_incoming(self.add(index, ir.Constant(I64, 1)), end)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, end)
        self.branch(head)
        self.position_at_end(after)
        return phis

    def strips(self, count, carried, body):
        """As `loop`, over `count` numbers, LANES at a time: the body's `i` counts vectors."""
        return self.loop(self.sdiv(count, ir.Constant(I64, LANES)), carried, body)

    def pieces(self, count, carried, body):
        """As `loop`, over `count` numbers: `body(start, lanes, values)` for each LANES, then for each that is left."""
        lanes = ir.Constant(I64, LANES)
        whole = self.sdiv(count, lanes)
        values = self.loop(whole, carried, lambda i, values: body(self.mul(i, lanes), LANES, values))
        done = self.mul(whole, lanes)
        return self.loop(self.sub(count, done), values, lambda i, values: body(self.add(done, i), 1, values))

    def vector_at(self, row, i, size=4):
        """Address of vector `i` of a row of numbers of `size` bytes."""
        return self.offset_by(row, i, size * LANES)

    def exchange(self, a, b, distance):
        """One stage of a transposition: lanes of a and b that differ in bit `distance` change places."""
        low, high = [], []
        for lane in range(LANES):
            upper = bool(lane & distance)
            low.append(lane - distance + LANES if upper else lane)
            high.append(lane + LANES if upper else lane + distance)
        masks = (ir.Constant(INTS, order) for order in (low, high))
        return [self.shuffle_vector(a, b, mask) for mask in masks]

    def lane_sums(self, vectors):
        """LANES vectors to one: lane i is the sum over vector i."""
        distance = 1
        while len(vectors) > 1:
            halves = []
            for first, second in zip(vectors[::2], vectors[1::2], strict=True):
                halves.append(self.fadd(*self.exchange(first, second, distance)))
            vectors, distance = halves, distance * 2
        return vectors[0]

    def larger(self, a, b):
        """Lane by lane; b where a is NaN. One instruction, unlike LLVM's maxnum."""
        return self.select(self.fcmp_ordered(">", a, b), a, b)

    def lane_sum(self, vector):
        total = self.llvm("vector.reduce.fadd", ir.Constant(F32, -0.0), vector)
        for flag in FAST:
            total.fastmath.add(flag)
        return total

    def lane_max(self, vector):
        distance = LANES // 2
        while distance:
            order = ir.Constant(INTS, [lane ^ distance for lane in range(LANES)])
            vector = self.larger(self.shuffle_vector(vector, vector, order), vector)
            distance //= 2
        return self.extract_element(vector, ir.Constant(I32, 0))

    def transposed(self, rows):
        distance = 1
        while distance < LANES:
            for at in range(LANES):
                if not at & distance:
                    rows[at], rows[at + distance] = self.exchange(rows[at], rows[at + distance], distance)
            distance *= 2
        return rows

    def exp(self, x):
        """e**x for x <= 0 to about 1 unit in the last place; what is below -87 becomes the smallest normal number or 0.

        x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial for e**r, n added to the exponent bits.
        """
        low = self.fcmp_ordered("<", x, constant(-87.3))
        clamped = self.select(low, constant(-87.3), x)
        scaled = self.fmul(clamped, constant(1 / math.log(2)))
        n = self.llvm("rint", scaled)
        r = self.fma(n, constant(-0.693359375), clamped)
        r = self.fma(n, constant(2.12194440e-4), r)
        power = constant(1 / 5040)
        for denominator in (720, 120, 24, 6, 2, 1, 1):
            power = self.fma(power, r, constant(1 / denominator))
        exponent = self.shl(self.fptosi(n, INTS), constant(23, I32))
        result = self.bitcast(self.add(self.bitcast(power, INTS), exponent), VECTOR)
        return self.select(low, constant(0.0), result)


def instruction(*kinds, returns=types.void):
    """Makes `emit(emitter, *arguments)` a function that Numba code can call, with arguments of these kinds."""

    def made(emit):
        @intrinsic(prefer_literal=LITERAL in kinds)
        @wraps(emit)
        def typed(_context, *given):
            literal = [one.literal_value if kind is LITERAL else None for one, kind in zip(given, kinds, strict=True)]

            def lowered(context, builder, _, values):
                arguments = [one if told is None else told for one, told in zip(values, literal, strict=True)]
                # LLVM may take an offset for the base of a sum. Where it is 0, a null pointer, what uses the sum as an
                # address would be dropped: whole loops vanished. (llvmlite knows no such name: `add` refuses it.)
                builder.function.attributes.update({"null_pointer_is_valid"})
                result = emit(Emitter(builder), *arguments)
                return context.get_dummy_value() if returns is types.void else result

            return returns(*(kind or one for one, kind in zip(given, kinds, strict=True))), lowered

        return typed

    return made


def switched(*known):
    """Makes `emit(emitter, n, ...)`, which needs n when it emits, take n at run time: a switch over all `known`."""

    def made(emit):
        @wraps(emit)
        def switching(b, number, *arguments):
            after = b.function.append_basic_block("after")
            choice = b.switch(number, after)
            for n in known:
                block = b.function.append_basic_block("case")
                choice.add_case(ir.Constant(I64, n), block)
                b.position_at_end(block)
                emit(b, n, *arguments)
                b.branch(after)
            b.position_at_end(after)

        return switching

    return made
