"""Draws by compiled loops, rows split over threads: the way on a CPU. Computes what `weights` says, bit for bit.

Blocks of 256 logits whose largest logit is too small are passed over; nothing is sorted. Blocks are slices, not ranges
of indices, because the compiler makes vector loops of slices alone.
"""

# mypy: ignore-errors
import numba
import numpy as np
from llvmlite import ir
from numba import carray
from numba.core import types

from kvcpu.sampling import sampling_call as c
from kvcpu.vector.cells import pointer, take_ticket
from kvcpu.vector.emit import instruction

BLOCK = 256
_SIGN, _REST, _LOWEST = np.int32(31), np.int32(0x7FFFFFFF), np.int32(-0x80000000)
BINS = 2048
LARGEST_HEAP = 256  # beyond, gathering in bins is faster

_compiled = numba.njit(nogil=True, error_model="numpy")


@instruction(types.float64, returns=types.float64)
def _power_of_2(b, part):
    """2**part by the polynomial, term by term and without fused operations."""
    power = ir.Constant(ir.DoubleType(), c.POWERS_OF_2[0])
    for coefficient in c.POWERS_OF_2[1:]:
        power = b.fadd(b.fmul(power, part), ir.Constant(ir.DoubleType(), coefficient))
    return power


def draw_share(block):
    """One token for each row; every thread takes rows until none is left. The rest is DrawSettings'."""
    p = carray(block, (c.FIELDS,), np.int64)
    rows = p[c.ROWS]
    logits = carray(pointer(p[c.LOGITS]), (rows, p[c.VOCAB]), np.float32)
    scale, top_p = carray(pointer(p[c.SCALE]), (rows,), np.float64), carray(pointer(p[c.TOP_P]), (rows,), np.float64)
    top_k, least = carray(pointer(p[c.TOP_K]), (rows,), np.int64), carray(pointer(p[c.LEAST]), (rows,), np.int64)
    points, tokens = carray(pointer(p[c.POINTS]), (rows,), np.float64), carray(pointer(p[c.TOKENS]), (rows,), np.int64)
    while True:
        row = take_ticket(p[c.SELF] + 8 * c.TICKET)
        if row >= rows:
            return
        tokens[row] = _draw_row(logits[row], p[c.BITS], scale[row], top_k[row], top_p[row], least[row], points[row])


def masses_share(block):
    p = carray(block, (c.FIELDS,), np.int64)
    rows = p[c.ROWS]
    logits = carray(pointer(p[c.LOGITS]), (rows, p[c.VOCAB]), np.float32)
    scale = carray(pointer(p[c.SCALE]), (1,), np.float64)[0]
    masses = carray(pointer(p[c.MASSES]), (rows,), np.int64)
    best = carray(pointer(p[c.BEST]), (rows, p[c.COUNT]), np.int64)
    while True:
        row = take_ticket(p[c.SELF] + 8 * c.TICKET)
        if row >= rows:
            return
        tops = _block_tops(logits[row])
        weights = np.empty(logits.shape[1], np.int64)
        masses[row] = _weigh(logits[row], tops, tops.max(), scale, p[c.BITS], np.float32(-np.inf), weights)
        _best(logits[row], tops, best[row])


@_compiled
def _draw_row(row, bits, scale, top_k, top_p, least, point):
    weights = np.empty(len(row), np.int64)
    tops = _block_tops(row)
    peak = tops.max()
    floor = np.float32(-np.inf)
    if top_k > 0:
        floor = _kth_largest(row, tops, peak, top_k)
    total = _weigh(row, tops, peak, scale, bits, floor, weights)
    if top_p < 1:
        need = max(np.int64(top_p * np.float64(total)), np.int64(1))
        lightest = max(np.float64(total - need) / len(row), 1.0)
        # Tokens lighter than that, were they the whole vocabulary, could not make up the rest: one bin is enough.
        per_logit = BINS * scale / (bits + 1.0 - np.log2(lightest))
        floor = _reaching(row, weights, tops, floor, peak, per_logit, need)
    if top_p < 1 or least > 0:
        total = _drop(row, weights, floor, least)
    return _find(weights, min(np.int64(point * np.float64(total)), total - 1))


@_compiled
def _block_tops(row):
    """The largest logit of each block, found as integers that sort as the numbers do: those compare many at a time."""
    bits = row.view(np.int32)
    keys = np.empty((len(row) + BLOCK - 1) // BLOCK, np.int32)
    for block in range(len(keys)):
        part = bits[block * BLOCK : block * BLOCK + BLOCK]
        top = _LOWEST
        for i in range(len(part)):
            top = max(top, part[i] ^ ((part[i] >> _SIGN) & _REST))
        keys[block] = top ^ ((top >> _SIGN) & _REST)
    return keys.view(np.float32)


@_compiled
def _weigh(row, tops, peak, scale, bits, floor, weights):
    """Fill in the weights, 0 below `floor`; their sum."""
    total = np.int64(0)
    down = np.int64(c.MANTISSA_BITS - bits)
    highest = np.float64(peak)
    for block in range(len(tops)):
        logits = row[block * BLOCK : block * BLOCK + BLOCK]
        out = weights[block * BLOCK : block * BLOCK + BLOCK]
        if tops[block] < floor:
            out[:] = 0
            continue
        for i in range(len(logits)):
            z = max((np.float64(logits[i]) - highest) * scale, c.DEEPEST)
            whole = np.rint(z)
            part = z - whole
            weight = np.int64(_power_of_2(part) * 2.0**c.MANTISSA_BITS) >> min(down - np.int64(whole), np.int64(63))
            weight = weight if logits[i] >= floor else np.int64(0)
            out[i] = weight
            total += weight
    return total


@_compiled
def _drop(row, weights, floor, least):
    """Take the weight of what lies below the limits; the sum of what is left."""
    total = np.int64(0)
    for i in range(len(row)):
        weight = weights[i] if row[i] >= floor and weights[i] >= least else np.int64(0)
        weights[i] = weight
        total += weight
    return total


@_compiled
def _find(weights, target):
    """The first token up to which the weights sum to more than `target`, which is less than their sum."""
    before = np.int64(0)
    for first in range(0, len(weights), BLOCK):
        part = weights[first : first + BLOCK]
        mass = np.int64(0)
        for i in range(len(part)):
            mass += part[i]
        if before + mass > target:
            for i in range(len(part)):
                before += part[i]
                if before > target:
                    return first + i
        before += mass
    return len(weights) - 1  # never, unless a caller's target is wrong


@_compiled
def _kth_largest(row, tops, peak, k):
    if k <= LARGEST_HEAP:
        heap = np.empty(k, np.int64)
        _best(row, tops, heap)
        return row[heap[-1]]
    spread = np.float64(peak) - np.float64(tops.min())
    per_logit = BINS / spread if 0 < spread < np.inf else 1.0
    return _reaching(row, np.ones(len(row), np.int64), tops, np.float32(-np.inf), peak, per_logit, np.int64(k))


@_compiled
def _best(row, tops, ids):
    """Fill `ids` with those of the largest logits, best first, equal ones in id order, through a heap of the best."""
    count = len(ids)
    if count == 0:
        return
    for i in range(count):
        ids[i] = i
    for i in range(count // 2 - 1, -1, -1):
        _sift(row, ids, i, count)
    for block in range(count // BLOCK, len(tops)):
        if not tops[block] > row[ids[0]]:
            continue
        for i in range(max(block * BLOCK, count), min(block * BLOCK + BLOCK, len(row))):
            if row[i] > row[ids[0]]:
                ids[0] = i
                _sift(row, ids, 0, count)
    for last in range(count - 1, 0, -1):  # the worst goes to the end
        ids[0], ids[last] = ids[last], ids[0]
        _sift(row, ids, 0, last)


@_compiled
def _sift(row, ids, at, count):
    """Restore the heap below `at`: nothing is worse than its parent; of equal logits the later one is worse."""
    while True:
        worst = at
        for child in (2 * at + 1, 2 * at + 2):
            if child < count:
                a, b = ids[child], ids[worst]
                if row[a] < row[b] or (row[a] == row[b] and a > b):
                    worst = child
        if worst == at:
            return
        ids[at], ids[worst] = ids[worst], ids[at]
        at = worst


@_compiled
def _reaching(row, masses, tops, floor, peak, per_logit, need):
    """The largest logit x such that the masses of all logits >= x sum to `need`; those of the whole row do. There is no
    mass below `floor`. Masses are summed in bins by distance from the peak, then anew within the bin that reaches it.
    """
    bins = np.zeros(BINS, np.int64)
    for block in range(len(tops)):
        if tops[block] >= floor and _bin(tops[block], peak, per_logit) < BINS - 1:
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, len(row))):
                bins[_bin(row[i], peak, per_logit)] += masses[i]
    crossing, before = _crossing(bins, need)
    logits, kept, count = np.empty(len(row), np.float32), np.empty(len(row), np.int64), 0
    for block in range(len(tops)):
        if tops[block] >= floor and _bin(tops[block], peak, per_logit) <= crossing:
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, len(row))):
                if masses[i] > 0 and _bin(row[i], peak, per_logit) == crossing:
                    logits[count], kept[count] = row[i], masses[i]
                    count += 1
    return _reaching_among(logits[:count], kept[:count], need - before)


@_compiled
def _reaching_among(logits, masses, need):
    """The same for a few logits: bins from the largest to the smallest, again and again, until all in one are equal."""
    count = len(logits)
    while True:
        high, low = logits[:count].max(), logits[:count].min()
        if high == low:
            return high
        if low == -np.inf:  # bins of finite width cannot hold it: the last one takes it all
            low = np.float32(np.finfo(np.float32).min)
        per_logit = BINS / (np.float64(high) - np.float64(low))
        bins = np.zeros(BINS, np.int64)
        for i in range(count):
            bins[_bin(logits[i], high, per_logit)] += masses[i]
        crossing, before = _crossing(bins, need)
        need -= before
        left = 0
        for i in range(count):
            if _bin(logits[i], high, per_logit) == crossing:
                logits[left], masses[left] = logits[i], masses[i]
                left += 1
        count = left


@_compiled
def _crossing(bins, need):
    """The bin in which the sum reaches `need`, the last one where it is not known to; the sum before that."""
    before, bin_ = np.int64(0), 0
    while bin_ < BINS - 1 and before + bins[bin_] < need:
        before += bins[bin_]
        bin_ += 1
    return bin_, before


@_compiled
def _bin(logit, peak, per_logit):
    """Grows with the distance from the peak, never falls: so the bins are in order whatever their width."""
    return np.int64(min((np.float64(peak) - np.float64(logit)) * per_logit, BINS - 1.0))
