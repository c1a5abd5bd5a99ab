"""bfloat16 by the processor's own instructions, where it has them (AVX512-BF16). Emits LLVM IR; pure."""

# mypy: ignore-errors
# The bodies build IR, values of which no type checker knows anything.
from __future__ import annotations

from llvmlite import ir

from kvcpu.vector.compiled import multiplies_pairs
from kvcpu.vector.emit import I16, I32, LANES, VECTOR, constant, fma


class _BFloat(ir.types.Type):
    """LLVM's `bfloat`, which llvmlite has no name for."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


_HALVES, _PAIRS = ir.VectorType(_BFloat(), LANES), ir.VectorType(_BFloat(), 2 * LANES)


def add_pairs(builder, total, left, right):
    """total + the products of two bfloat16 each per lane, given as the halves of 32-bit integers."""
    if multiplies_pairs():
        kind = ir.FunctionType(VECTOR, [VECTOR, _PAIRS, _PAIRS])
        instruction = _declared(builder, "llvm.x86.avx512bf16.dpbf16ps.512", kind)
        return builder.call(instruction, [total, builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)])
    for half in (_low, _high):
        total = fma(builder, half(builder, left), half(builder, right), total)
    return total


def halved(builder, vector):
    """LANES floats rounded to the nearest bfloat16, as 16-bit integers; only where `multiplies_pairs`. Numbers too
    small to be normal become 0."""
    kind = ir.FunctionType(_HALVES, [VECTOR])
    instruction = _declared(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind)
    return builder.bitcast(builder.call(instruction, [vector]), ir.VectorType(I16, LANES))


def _declared(builder, name, kind):
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _low(builder, pairs):
    return builder.bitcast(builder.shl(pairs, constant(16, I32)), VECTOR)


def _high(builder, pairs):
    return builder.bitcast(builder.and_(pairs, constant(-65536, I32)), VECTOR)
