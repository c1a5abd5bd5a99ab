"""Rows of stored numbers to rows of floats and back; pairs of bfloat16, multiplied as such where the processor can.

Rows are contiguous. bfloat16 uses AVX512-BF16 where the processor has it.
"""

# mypy: ignore-errors
import numpy as np
from llvmlite import ir
from numba import njit

from kvcpu.vector.cells import row_fill
from kvcpu.vector.compiled import multiplies_pairs
from kvcpu.vector.emit import ADDRESS, COUNT, F16, F32, FLOAT, I8, I16, I32, VECTOR, constant, instruction, switched
from kvcpu.vector.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_BYTES, LANES

ELEMENTS = {FLOAT32: F32, BFLOAT16: I16, FLOAT16: F16, INT8: I8}  # as which numbers of a kind are loaded and stored


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
    kind = ir.FunctionType(result, [one.type for one in arguments])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), arguments)


def add_pairs(b, total, left, right):
    """total + the products of two bfloat16 each per lane, given as the halves of 32-bit integers."""
    if multiplies_pairs():
        pairs = [b.bitcast(one, _PAIRS) for one in (left, right)]
        return _processors(b, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [total, *pairs])
    low, high = constant(16, I32), constant(-65536, I32)
    total = b.fma(*(b.bitcast(b.shl(pairs, low), VECTOR) for pairs in (left, right)), total)
    return b.fma(*(b.bitcast(b.and_(pairs, high), VECTOR) for pairs in (left, right)), total)


def to_halves(b, vector, address):
    """LANES floats to bfloat16, in the processor's own way: numbers too small to be normal may become 0."""
    if multiplies_pairs():
        halves = _processors(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, [vector])
        b.store(b.bitcast(halves, _SHORTS), address, align=2)
    else:
        b.store(narrowed(b, BFLOAT16, vector), address, align=2)


def widened(b, kind, stored):
    """A vector of numbers of a stored kind as floats."""
    floats, ints = (ir.VectorType(element, stored.type.count) for element in (F32, I32))
    if kind == BFLOAT16:
        return b.bitcast(b.shl(b.zext(stored, ints), constant(16, I32, stored.type.count)), floats)
    if kind == FLOAT16:
        return b.fpext(stored, floats)
    return stored if kind == FLOAT32 else b.sitofp(b.sext(stored, ints), floats)


def narrowed(b, kind, floats, nan=True):
    """Floats as numbers of a stored kind, not int8: to nearest, ties to even. Without `nan` one may become infinite."""
    lanes = floats.type.count
    if kind == FLOAT32:
        return floats
    if kind == FLOAT16:
        return b.fptrunc(floats, ir.VectorType(F16, lanes))
    bits = b.bitcast(floats, ir.VectorType(I32, lanes))
    odd = b.and_(b.lshr(bits, constant(16, I32, lanes)), constant(1, I32, lanes))
    rounded = b.lshr(b.add(bits, b.add(odd, constant(0x7FFF, I32, lanes))), constant(16, I32, lanes))
    if nan:
        rounded = b.select(b.fcmp_unordered("uno", floats, floats), constant(0x7FC0, I32, lanes), rounded)
    return b.trunc(rounded, ir.VectorType(I16, lanes))


def _scaled_copy(b, source, read, target, written, count, factor):
    """Emits the copy of `count` numbers of a stored kind, times a factor, as numbers of another."""

    def copied(start, lanes, _):
        where = b.offset_by(source, start, ITEM_BYTES[read])
        stored = b.load(where, ir.VectorType(ELEMENTS[read], lanes), align=ITEM_BYTES[read])
        floats = b.fmul(widened(b, read, stored), b.splat(factor, lanes))
        b.store(narrowed(b, written, floats), b.offset_by(target, start, ITEM_BYTES[written]), ITEM_BYTES[written])

    b.pieces(count, [], copied)


@instruction(COUNT, ADDRESS, ADDRESS, COUNT, FLOAT)
@switched(FLOAT32, BFLOAT16, FLOAT16, INT8)
def widen(b, kind, source, target, count, factor):
    """`count` numbers of a stored `kind` times `factor` become floats at `target`."""
    _scaled_copy(b, source, kind, target, FLOAT32, count, factor)


@instruction(COUNT, ADDRESS, ADDRESS, COUNT, FLOAT)
@switched(FLOAT32, BFLOAT16, FLOAT16)
def narrow(b, kind, source, target, count, factor):
    """`count` floats at `source` times `factor` become numbers of a stored `kind`, not int8, which needs a scale."""
    _scaled_copy(b, source, FLOAT32, target, kind, count, factor)


@instruction(ADDRESS, ADDRESS)
def line_to_halves(b, source, target):
    """2 LANES floats become bfloat16."""
    for at in range(2):
        vector = b.load(b.plus(source, 4 * LANES * at))
        to_halves(b, vector, b.plus(target, 2 * LANES * at))


@instruction(ADDRESS, ADDRESS, ADDRESS, COUNT)
def interleave(b, first, second, target, count):
    """`count` (a multiple of LANES) pairs of 16-bit numbers, one of each row, the first in the lower half."""
    shift = constant(16, I32)

    def body(i, _):
        rows = [b.load(b.vector_at(row, i, 2), _SHORTS, align=2) for row in (first, second)]
        low, high = (b.zext(row, shift.type) for row in rows)
        b.store(b.or_(low, b.shl(high, shift)), b.vector_at(target, i))

    b.strips(count, [], body)


@njit(nogil=True, error_model="numpy")
def to_floats(kind, source, target, count, factor):
    """Times `factor`; a row is filled up with zeros to a multiple of LANES."""
    widen(kind, source, target, count, factor)
    if count % LANES:
        row_fill(target + 4 * count, LANES - count % LANES, np.float32(0.0))
