"""Rows of stored numbers to rows of floats and back; pairs of bfloat16, multiplied as such where the processor can.

Addresses are integers in bytes, rows are contiguous, sizes count elements. Nothing here checks bounds. bfloat16 goes by
the processor's own instructions where it has them (AVX512-BF16).
"""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit

from kvcpu.vector.cells import row_fill
from kvcpu.vector.compiled import multiplies_pairs
from kvcpu.vector.emit import (
    ADDRESS,
    COUNT,
    F16,
    F32,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    LITERAL,
    VECTOR,
    constant,
    instruction,
)
from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES


class _BFloat(ir.types.Type):
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


_SHORTS = ir.VectorType(I16, LANES)
_HALVES, _PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)


def _processors(b, name, result, arguments):
    """Emits an instruction of this processor."""
    kind = ir.FunctionType(result, [one.type for one in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def add_pairs(b, total, left, right):
    """total + the products of two bfloat16 each per lane, given as the halves of 32-bit integers."""
    if multiplies_pairs():
        pairs = [b.bitcast(one, _PAIRS) for one in (left, right)]
        return _processors(b, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, *pairs])
    for half in (_low, _high):
        total = b.fma(half(b, left), half(b, right), total)
    return total


def _low(b, pairs):
    return b.bitcast(b.shl(pairs, constant(16, I32)), VECTOR)


def _high(b, pairs):
    return b.bitcast(b.and_(pairs, constant(-65536, I32)), VECTOR)


def to_halves(b, vector, address):
    """LANES floats to bfloat16, in the processor's own way: numbers too small to be normal may become 0."""
    if multiplies_pairs():
        halves = _processors(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, [vector])
        b.store(b.bitcast(halves, _SHORTS), address, align=2)
    else:
        _from_floats(b, BFLOAT16, vector, address)


def _as_floats(b, kind, address, lanes):
    """`lanes` numbers of a stored kind as floats."""
    floats, ints = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
    stored = {FLOAT32: F32, BFLOAT16: I16, FLOAT16: F16, INT8: I8}[kind]
    raw = b.load(address, ir.VectorType(stored, lanes), align=ITEM_BYTES[kind])
    if kind == BFLOAT16:
        bits = b.shl(b.zext(raw, ints), ir.Constant(ints, [16] * lanes))
        return b.bitcast(bits, floats)
    if kind == FLOAT16:
        return b.fpext(raw, floats)
    return raw if kind == FLOAT32 else b.sitofp(b.sext(raw, ints), floats)


def _from_floats(b, kind, value, address):
    lanes = value.type.count
    ints = ir.VectorType(I32, lanes)
    if kind == FLOAT32:
        b.store(value, address)
        return
    if kind == FLOAT16:
        b.store(b.fptrunc(value, ir.VectorType(F16, lanes)), address, align=2)
        return

    def each(number):
        return ir.Constant(ints, [number] * lanes)

    bits = b.bitcast(value, ints)  # bfloat16, to nearest, ties to even
    odd = b.and_(b.lshr(bits, each(16)), each(1))
    rounded = b.lshr(b.add(bits, b.add(odd, each(0x7FFF))), each(16))
    nan = b.fcmp_unordered("uno", value, value)
    rounded = b.select(nan, each(0x7FC0), rounded)
    b.store(b.trunc(rounded, ir.VectorType(I16, lanes)), address, align=2)


def _scaled_copy(b, source, target, count, scalar, *, read=FLOAT32, written=FLOAT32):
    """Emits the copy of `count` numbers of a stored kind, times a factor, as numbers of another: LANES at a time, then
    one by one."""

    def copied(i, factors, lanes):
        value = _as_floats(b, read, b.offset_by(source, i, ITEM_BYTES[read]), lanes)
        where = b.offset_by(target, i, ITEM_BYTES[written])
        _from_floats(b, written, b.fmul(value, factors), where)

    lanes = ir.Constant(I64, LANES)
    whole = b.sdiv(count, lanes)
    factors = b.splat(scalar)
    b.loop(whole, [], lambda i, _: copied(b.mul(i, lanes), factors, LANES))
    one = b.insert_element(ir.Constant(ir.VectorType(F32, 1), ir.Undefined), scalar, ir.Constant(I32, 0))
    done = b.mul(whole, lanes)
    b.loop(b.sub(count, done), [], lambda i, _: copied(b.add(done, i), one, 1))


@instruction(LITERAL, ADDRESS, ADDRESS, COUNT, FLOAT)
def widen(b, kind, source, target, count, factor):
    """`count` numbers of a stored `kind` (a literal) times `factor` become floats at `target`."""
    _scaled_copy(b, source, target, count, factor, read=kind)


@instruction(LITERAL, ADDRESS, ADDRESS, COUNT, FLOAT)
def narrow(b, kind, source, target, count, factor):
    """`count` floats at `source` times `factor` become numbers of a stored `kind` (a literal, not int8)."""
    _scaled_copy(b, source, target, count, factor, written=kind)


@instruction(ADDRESS, ADDRESS)
def line_to_halves(b, source, target):
    """2 LANES floats become bfloat16."""
    for at in range(2):
        vector = b.load(b.plus(source, 4 * LANES * at))
        to_halves(b, vector, b.plus(target, 2 * LANES * at))


@instruction(ADDRESS, ADDRESS, ADDRESS, COUNT)
def interleave(b, first, second, target, count):
    """`count` (a multiple of LANES) pairs of 16-bit numbers, one of each row, the first in the lower half."""

    def body(i, _):
        rows = [b.load(b.vector_at(row, i, 2), _SHORTS, align=2) for row in (first, second)]
        low, high = (b.zext(row, INTS) for row in rows)
        b.store(b.or_(low, b.shl(high, constant(16, I32))), b.vector_at(target, i))

    b.strips(count, [], body)


@njit(nogil=True, error_model="numpy")
def to_floats(kind, source, target, count, factor):
    """Times `factor`; a row is filled up with zeros to a multiple of LANES."""
    if kind == FLOAT32:
        widen(0, source, target, count, factor)
    elif kind == BFLOAT16:
        widen(1, source, target, count, factor)
    elif kind == FLOAT16:
        widen(2, source, target, count, factor)
    else:
        widen(3, source, target, count, factor)
    if count % LANES:
        row_fill(target + 4 * count, LANES - count % LANES, np.float32(0.0))


@njit(nogil=True, error_model="numpy")
def from_floats(kind, source, target, count, factor):
    """Times `factor`, rounded to nearest; not to int8, which needs a scale."""
    if kind == FLOAT32:
        narrow(0, source, target, count, factor)
    elif kind == BFLOAT16:
        narrow(1, source, target, count, factor)
    else:
        narrow(2, source, target, count, factor)
