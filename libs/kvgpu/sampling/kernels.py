"""Kernels of a draw, as `kvsampling.portable` defines it: one program reads one row, a few times, and keeps nothing.

A threshold is found in the order of the floats' bits, two bits at a time: the largest that enough of the row's mass
reaches. Mass is 1 a token for `top_k`, its weight for `top_p`. Weights are whole numbers made of float64 without fused
operations: launch with `enable_fp_fusion=False`.
"""

# mypy: ignore-errors
# Triton compiles these functions, by other rules than a checker's.
from __future__ import annotations

from kvgpu.triton_language import tl, triton

ROUNDS = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: a number added and taken away is rounded, half to even
MANTISSA = tl.constexpr(4503599627370496.0)  # 2^52
DEEPEST = tl.constexpr(-200.0)
TERMS = tl.constexpr(14)
KEY_BITS = tl.constexpr(32)


@triton.jit
def _weight(x, peak, scale, terms, SHIFT: tl.constexpr):
    z = tl.maximum((x.to(tl.float64) - peak) * scale, DEEPEST)
    whole = z + ROUNDS - ROUNDS
    part = z - whole
    power = tl.load(terms) + part * 0
    for at in tl.static_range(1, TERMS):
        power = power * part + tl.load(terms + at)
    shift = tl.minimum(SHIFT - whole.to(tl.int64), 63)
    return (power * MANTISSA).to(tl.int64) >> shift


@triton.jit
def _key(x):
    """Whole numbers from 0 to 2^32 - 1 in the order of floats."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _threshold(
    row, vocab, need, floor, peak, scale, terms,
    BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key that a mass of `need` reaches, of tokens whose key is at least `floor`."""
    found = tl.zeros([], tl.int64)
    for digit in range(KEY_BITS // 2):
        shift = KEY_BITS - 2 - 2 * digit
        one = tl.zeros([BLOCK], tl.int64)
        two = tl.zeros([BLOCK], tl.int64)
        three = tl.zeros([BLOCK], tl.int64)
        step = tl.full([], 1, tl.int64) << shift
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            key = _key(x)
            mass = (at < vocab).to(tl.int64)
            if BY_WEIGHT:
                mass = mass * _weight(x, peak, scale, terms, SHIFT)
            mass = tl.where(key >= floor, mass, 0)
            one += tl.where(key >= found + step, mass, 0)
            two += tl.where(key >= found + 2 * step, mass, 0)
            three += tl.where(key >= found + 3 * step, mass, 0)
        reached = (tl.sum(one) >= need).to(tl.int64) + (tl.sum(two) >= need).to(tl.int64)
        found += (reached + (tl.sum(three) >= need).to(tl.int64)) * step
    return found


@triton.jit
def draw(
    logits, peaks, scales, top_ks, top_ps, leasts, points, terms, tokens,
    row_step, vocab,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills `tokens` `[rows]`. `logits` `[rows, vocab]` float32, `peaks` `[rows]` their largest, all else `[rows]` as
    in `DrawSettings`; a point below 0 takes the first of the largest. Programs: `[rows]`."""
    which = tl.program_id(0)
    row = logits + which.to(tl.int64) * row_step
    peak32 = tl.load(peaks + which)
    point = tl.load(points + which)
    if point < 0:
        place = tl.full([BLOCK], 2147483647, tl.int32)
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            place = tl.minimum(place, tl.where((x == peak32) & (at < vocab), at, 2147483647))
        tl.store(tokens + which, tl.minimum(tl.min(place), vocab - 1).to(tl.int64))
    else:
        peak = peak32.to(tl.float64)
        scale = tl.load(scales + which)
        top_k = tl.load(top_ks + which)
        top_p = tl.load(top_ps + which)
        least = tl.load(leasts + which)
        floor = tl.zeros([], tl.int64)
        if top_k > 0:
            floor = _threshold(row, vocab, top_k, floor, peak, scale, terms, False, SHIFT, BLOCK)
        if top_p < 1:
            mass = tl.zeros([BLOCK], tl.int64)
            for first in range(0, vocab, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
                kept = (at < vocab) & (_key(x) >= floor)
                mass += tl.where(kept, _weight(x, peak, scale, terms, SHIFT), 0)
            need = tl.maximum((top_p * tl.sum(mass).to(tl.float64)).to(tl.int64), 1)
            floor = tl.maximum(floor, _threshold(row, vocab, need, floor, peak, scale, terms, True, SHIFT, BLOCK))
        kept_mass = tl.zeros([BLOCK], tl.int64)
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            weight = _weight(x, peak, scale, terms, SHIFT)
            kept = (at < vocab) & (_key(x) >= floor) & (weight >= least)
            kept_mass += tl.where(kept, weight, 0)
        total = tl.sum(kept_mass)
        target = tl.minimum((point * total.to(tl.float64)).to(tl.int64), total - 1)
        before = tl.zeros([], tl.int64)
        token = tl.zeros([], tl.int64)
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            weight = _weight(x, peak, scale, terms, SHIFT)
            kept = (at < vocab) & (_key(x) >= floor) & (weight >= least)
            weight = tl.where(kept, weight, 0)
            upto = before + tl.cumsum(weight, 0)
            token += tl.sum(((upto <= target) & (at < vocab)).to(tl.int64))
            before += tl.sum(weight)
        tl.store(tokens + which, tl.minimum(token, vocab - 1))


@triton.jit
def masses_and_best(
    logits, peaks, terms, natural, masses, best, row_step, vocab, count,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills `masses` `[rows]`, sums of all weights at temperature 1, and `best` `[rows, count]`, ids of the largest
    logits, equal ones in id order. `natural` `[1]`: the scale of that temperature. Programs: `[rows]`."""
    which = tl.program_id(0)
    row = logits + which.to(tl.int64) * row_step
    peak = tl.load(peaks + which).to(tl.float64)
    scale = tl.load(natural)
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        mass += tl.where(at < vocab, _weight(x, peak, scale, terms, SHIFT), 0)
    tl.store(masses + which, tl.sum(mass))
    last = tl.full([], 9223372036854775807, tl.int64)
    for number in range(count):
        most = tl.full([BLOCK], -9223372036854775808, tl.int64)
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            order = ((_key(x) - 2147483648) << 32) + (4294967295 - at.to(tl.int64))
            most = tl.maximum(most, tl.where((at < vocab) & (order < last), order, -9223372036854775808))
        last = tl.max(most)
        tl.store(best + which.to(tl.int64) * count + number, 4294967295 - (last & 4294967295))
