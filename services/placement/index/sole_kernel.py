"""Which blocks one holder has alone, for Numba to compile. Pure but for the arrays they fill.

What nobody else of those who count has, and no vault, is lost with its holder.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np

from kvfleet.placement.index.entry_kernels import (
    AT_ONCE,
    BITS,
    FEW_HOLD,
    NOBODY,
    ONE,
    PLACE,
    bit_of,
    entry_at,
    fetch,
    holder_in,
    inlined,
    kernel,
    note_at,
    place_of,
    wide_of,
)
from kvfleet.placement.index.find_kernel import BIT_NUMBER, DE_BRUIJN

SHARED = -1  # by several, or by nobody


@inlined
def _sole(rows, entry, tiers, counted, pool):
    """Holder of an entry that one of `counted` has, in whatever tier, and nobody of the pool; else SHARED."""
    words, holder, wide = len(counted), np.int64(SHARED), wide_of(rows, entry)
    if wide == NOBODY:
        for number in range(FEW_HOLD):
            note = note_at(rows, entry, number)
            if note == 0:
                break
            found = holder_in(note)
            word, bit = bit_of(found)
            if pool[word] & bit:
                return np.int64(SHARED)
            if counted[word] & bit:
                if holder != SHARED and holder != found:
                    return np.int64(SHARED)
                holder = found
        return holder
    column = (wide << PLACE) + BITS
    for word in range(words):
        who = np.uint64(0)
        for tier in range(tiers):
            who |= rows[column + tier * words + word]
        if who & pool[word]:
            return np.int64(SHARED)
        who &= counted[word]
        if who:
            if holder != SHARED or who & (who - ONE):
                return np.int64(SHARED)
            holder = word * 64 + BIT_NUMBER[(who * DE_BRUIJN) >> np.uint64(58)]
    return holder


@kernel
def count(rows, first, end, tiers, counted, pool, counts):
    """Add to `counts` `[holders]` the entries from `first` to `end` that one has alone. Free entries have nobody."""
    for entry in range(first, end):
        holder = _sole(rows, entry, tiers, counted, pool)
        if holder != SHARED:
            counts[holder] += 1


@kernel
def owners(table, rows, named, most, tiers, words, hashes, counted, pool, found):
    """To `found` `[n, 2]`: entry of each block, or NOBODY, and who has it alone, or SHARED."""
    fetched = np.uint64(0)
    for number in range(len(hashes)):
        if number % AT_ONCE == 0:
            fetched ^= fetch(table, rows, hashes[number : number + AT_ONCE])
        place = place_of(table, rows, hashes[number, 0], hashes[number, 1])
        entry = NOBODY if place == NOBODY else entry_at(named, most, tiers, words, place)
        found[number, 0] = entry
        found[number, 1] = SHARED if entry == NOBODY else _sole(rows, entry, tiers, counted, pool)
    return fetched
