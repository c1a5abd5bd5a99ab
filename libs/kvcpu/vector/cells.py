"""Single numbers in memory, copies, prefetches, counters that threads share. Numba intrinsics on memory addresses."""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from kvcpu.vector.emit import (
    ADDRESS,
    CACHE_LINE,
    COUNT,
    F32,
    FLOAT,
    I8,
    I32,
    I64,
    load,
    loop,
    offset_by,
    returning_nothing,
    store,
)


@intrinsic
def read_float(_context, address):
    return FLOAT(ADDRESS), lambda _, builder, __, arguments: load(builder, arguments[0], F32)


@intrinsic
def write_float(_context, address, value):
    def emit(_, builder, __, arguments):
        store(builder, arguments[1], arguments[0])

    return types.void(ADDRESS, FLOAT), returning_nothing(emit)


@intrinsic
def write_byte(_context, address, value):
    """The low 8 bits of an integer."""

    def emit(_, builder, __, arguments):
        store(builder, builder.trunc(arguments[1], I8), arguments[0], align=1)

    return types.void(ADDRESS, types.int32), returning_nothing(emit)


@intrinsic
def read_int(_context, address):
    return types.int64(ADDRESS), lambda _, builder, __, arguments: load(builder, arguments[0], I64, align=8)


@intrinsic
def pointer(_context, address):
    """As `numba.carray` takes it."""

    def emit(_, builder, __, arguments):
        return builder.inttoptr(arguments[0], I8.as_pointer())

    return types.voidptr(ADDRESS), emit


@intrinsic
def copy_bytes(_context, source, target, count):
    def emit(_, builder, __, arguments):
        source, target, count = arguments
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I8.as_pointer(), I64, ir.IntType(1)])
        move = builder.module.declare_intrinsic("llvm.memcpy", (I8.as_pointer(), I8.as_pointer(), I64), kind)
        to, where = (builder.inttoptr(address, I8.as_pointer()) for address in (target, source))
        builder.call(move, [to, where, count, ir.Constant(ir.IntType(1), 0)])

    return types.void(ADDRESS, ADDRESS, COUNT), returning_nothing(emit)


def ask_for(builder, address):
    """Emits a request to bring the cache line of `address` into the second-level cache."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (I8.as_pointer(),), kind)
    read, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
    builder.call(ask, [builder.inttoptr(address, I8.as_pointer()), read, second_level, data])


@intrinsic
def prefetch(_context, address, count):
    """Ask for `count` bytes to be brought into the second-level cache."""

    def emit(_, builder, __, arguments):
        start, count = arguments

        def body(i, values):
            ask_for(builder, offset_by(builder, start, i, CACHE_LINE))
            return []

        loop(builder, builder.sdiv(count, ir.Constant(I64, CACHE_LINE)), [], body)

    return types.void(ADDRESS, COUNT), returning_nothing(emit)


@intrinsic
def take_ticket(_context, address):
    """Adds one to the integer at `address`, atomically, and returns what it was."""

    def emit(_, builder, __, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(I64, 1), "monotonic")

    return types.int64(ADDRESS), emit


@intrinsic
def call_at(_context, function, argument):
    """Call the C function at an address, `void f(void *)`; what it calls may change any memory."""

    def emit(_, builder, __, arguments):
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer()])
        function, argument = arguments
        builder.call(builder.inttoptr(function, kind.as_pointer()), [builder.inttoptr(argument, I8.as_pointer())])

    return types.void(ADDRESS, ADDRESS), returning_nothing(emit)
