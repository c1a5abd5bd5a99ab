"""Single numbers in memory, fills, copies, prefetches, counters that threads share, calls."""

# mypy: ignore-errors
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import types

from kvcpu.vector import team as c
from kvcpu.vector.emit import ADDRESS, CACHE_LINE, COUNT, F32, FLOAT, I8, I32, I64, instruction

BYTES = I8.as_pointer()


@instruction(ADDRESS, returns=FLOAT)
def read_float(b, address):
    return b.load(address, F32)


@instruction(ADDRESS, FLOAT)
def write_float(b, address, value):
    b.store(value, address)


@instruction(ADDRESS, types.int32)
def write_byte(b, address, value):
    """The low 8 bits of an integer."""
    b.store(b.trunc(value, I8), address, align=1)


@instruction(ADDRESS, returns=types.int64)
def read_int(b, address):
    return b.load(address, I64, align=8)


@instruction(ADDRESS, returns=types.voidptr)
def pointer(b, address):
    """As `numba.carray` takes it."""
    return b.inttoptr(address, BYTES)


@instruction(ADDRESS, COUNT, FLOAT)
def row_fill(b, row, count, value):
    b.loop(count, [], lambda i, _: b.store(value, b.offset_by(row, i, 4)))


@instruction(ADDRESS, ADDRESS, COUNT)
def copy_bytes(b, source, target, count):
    kind = ir.FunctionType(ir.VoidType(), [BYTES, BYTES, I64, ir.IntType(1)])
    move = b.module.declare_intrinsic("llvm.memcpy", (BYTES, BYTES, I64), kind)
    to, where = (b.inttoptr(address, BYTES) for address in (target, source))
    b.call(move, [to, where, count, ir.Constant(ir.IntType(1), 0)])


def ask_for(b, address):
    """Emits a request to bring the cache line of `address` into the second-level cache."""
    ask = b.module.declare_intrinsic("llvm.prefetch", (BYTES,), ir.FunctionType(ir.VoidType(), [BYTES, I32, I32, I32]))
    read, second_level, data = (ir.Constant(I32, number) for number in (0, 2, 1))
    b.call(ask, [b.inttoptr(address, BYTES), read, second_level, data])


@instruction(ADDRESS, COUNT)
def prefetch(b, address, count):
    """Into the second-level cache."""
    lines = b.sdiv(count, ir.Constant(I64, CACHE_LINE))
    b.loop(lines, [], lambda i, _: ask_for(b, b.offset_by(address, i, CACHE_LINE)))


@instruction(ADDRESS, returns=types.int64)
def take_ticket(b, address):
    """Adds one to the integer at `address`, atomically, and returns what it was."""
    counter = b.inttoptr(address, I64.as_pointer())
    return b.atomic_rmw("add", counter, ir.Constant(I64, 1), "monotonic")


@instruction(ADDRESS, ADDRESS)
def call_at(b, function, argument):
    """Call the C function at an address, `void f(void *)`; what it calls may change any memory."""
    kind = ir.FunctionType(ir.VoidType(), [BYTES])
    b.call(b.inttoptr(function, kind.as_pointer()), [b.inttoptr(argument, BYTES)])


def run_all(block):
    """Calls one compiled function after the other: see `Program`."""
    p = carray(block, (c.FIELDS,), np.int64)
    for at in range(p[c.COUNT]):
        operation = p[c.TABLE] + 16 * at
        call_at(read_int(operation), read_int(operation + 8))
        if p[c.BARRIER] and at + 1 < p[c.COUNT]:
            call_at(p[c.BARRIER], 0)
