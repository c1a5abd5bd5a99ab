"""The prefix index's inner loops. Numba; compiled code is kept on disk. Pure but for the arrays they change.

An entry is a block that somebody holds; its number never changes while it lives. `table` is a hash table with linear
probing from hashes to entries. `words[entry, tier]` are bits: who holds it there.

Workers evict leaves first, so along a chain of hashes the holders only ever get fewer: what is equal at both ends of a
stretch is equal in between, and a look-up asks only where it is not.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

NONE = np.int32(-1)
LIVE, FREE, COUNTERS = range(3)  # of the counters: entries, entries on the free list


@njit(cache=True)
def _slot_of(table, keys, low, high):
    """Where the hash is in the table, or the empty slot where it would be."""
    mask = np.int64(len(table) - 1)
    slot = np.int64(low) & mask
    while True:
        entry = table[slot]
        if entry == NONE or (keys[entry, 0] == low and keys[entry, 1] == high):
            return slot
        slot = (slot + 1) & mask


@njit(cache=True)
def _empty_slot(table, keys, slot):
    """Take a slot out, moving up what probing would no longer find."""
    mask = np.int64(len(table) - 1)
    hole, at = slot, slot
    while True:
        at = (at + 1) & mask
        entry = table[at]
        if entry == NONE:
            break
        home = np.int64(keys[entry, 0]) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            table[hole] = entry
            hole = at
    table[hole] = NONE


@njit(cache=True)
def _is_held(words, entry):
    for tier in range(words.shape[1]):
        for word in range(words.shape[2]):
            if words[entry, tier, word]:
                return True
    return False


@njit(cache=True)
def _free_if_unheld(table, keys, words, free, counters, entry):
    if not _is_held(words, entry):
        _empty_slot(table, keys, _slot_of(table, keys, keys[entry, 0], keys[entry, 1]))
        free[counters[FREE]] = entry
        counters[FREE] += 1
        counters[LIVE] -= 1


@njit(cache=True)
def store(table, keys, words, free, counters, hashes, tier, holder, log, logged):
    """Note `hashes` `[n, 2]` as held; returns how many were, fewer than n when the index is full. New holdings are
    appended to `log` from `logged` on, which has room for n; the second result is its new length."""
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    for at in range(len(hashes)):
        low, high = hashes[at, 0], hashes[at, 1]
        slot = _slot_of(table, keys, low, high)
        entry = table[slot]
        if entry == NONE:
            if counters[FREE] == 0:
                return at, logged
            counters[FREE] -= 1
            counters[LIVE] += 1
            entry = free[counters[FREE]]
            keys[entry, 0], keys[entry, 1] = low, high
            table[slot] = entry
        if not words[entry, tier, word] & bit:
            words[entry, tier, word] |= bit
            log[logged] = entry
            logged += 1
    return len(hashes), logged


@njit(cache=True)
def remove(table, keys, words, free, counters, hashes, tier, holder):
    """Note `hashes` `[n, 2]` as held no more; returns how many were."""
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    removed = 0
    for at in range(len(hashes)):
        entry = table[_slot_of(table, keys, hashes[at, 0], hashes[at, 1])]
        if entry != NONE and words[entry, tier, word] & bit:
            words[entry, tier, word] &= ~bit
            removed += 1
            _free_if_unheld(table, keys, words, free, counters, entry)
    return removed


@njit(cache=True)
def forget(table, keys, words, free, counters, holder, log, logged, count):
    """Take back the last `count` of what `log` notes of a holder; returns how much of that it still held."""
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    removed = 0
    for at in range(logged - 1, max(logged - count, 0) - 1, -1):
        entry = log[at]
        held = False
        for tier in range(words.shape[1]):
            if words[entry, tier, word] & bit:
                words[entry, tier, word] &= ~bit
                removed += 1
                held = True
        if held:
            _free_if_unheld(table, keys, words, free, counters, entry)
    return removed


@njit(cache=True)
def compact(words, holder, log, logged, marks, mark):
    """Drop from `log` what the holder holds no more and what is noted twice; returns its new length."""
    word, bit = holder >> 6, np.uint64(1) << np.uint64(holder & 63)
    kept = 0
    for at in range(logged):
        entry = log[at]
        if marks[entry] == mark:
            continue
        for tier in range(words.shape[1]):
            if words[entry, tier, word] & bit:
                marks[entry] = mark
                log[kept] = entry
                kept += 1
                break
    return kept


@njit(cache=True)
def _bit_number(lowest):
    """Which bit of a word is set, the only one."""
    number = 0
    for shift in (32, 16, 8, 4, 2, 1):
        if lowest >> np.uint64(shift):
            lowest >>= np.uint64(shift)
            number += shift
    return number


@njit(cache=True)
def _holders(table, keys, words, hashes, at, tier, faster, among, out):
    """Who of `among` has block `at` in `tier`, or all up to it in faster ones: those whose `faster` is beyond."""
    entry = table[_slot_of(table, keys, hashes[at, 0], hashes[at, 1])]
    for word in range(words.shape[2]):
        bits = among[word] & words[entry, tier, word] if entry != NONE else np.uint64(0)
        if tier > 0:
            rest = among[word] & ~bits
            while rest:
                lowest = rest & (~rest + np.uint64(1))
                if faster[word * 64 + _bit_number(lowest)] > at:
                    bits |= lowest
                rest ^= lowest
        out[word] = bits


@njit(cache=True)
def _going_on(table, keys, words, hashes, tier, faster, among, out):
    """Who of `among` has in `tier` the block after the last that it has in faster ones, or needs none."""
    count = len(hashes)
    last_at, last_entry = -1, NONE
    for word in range(words.shape[2]):
        out[word] = np.uint64(0)
        rest = among[word]
        while rest:
            lowest = rest & (~rest + np.uint64(1))
            at = faster[word * 64 + _bit_number(lowest)]
            if at < count and at != last_at:
                last_at = at
                last_entry = table[_slot_of(table, keys, hashes[at, 0], hashes[at, 1])]
            if at == count or (last_entry != NONE and words[last_entry, tier, word] & lowest):
                out[word] |= lowest
            rest ^= lowest


@njit(cache=True)
def _note(before, after, depth, depths):
    """Those that hold the chain up to `depth` and not beyond."""
    for word in range(len(before)):
        gone = before[word] & ~after[word]
        while gone:
            lowest = gone & (~gone + np.uint64(1))
            depths[word * 64 + _bit_number(lowest)] = depth
            gone ^= lowest


@njit(cache=True)
def find(table, keys, words, hashes, tier, among, faster, stack_at, stack, depths):
    """Length of the longest prefix of the chain `hashes` `[n, 2]` that each holder of `among` has in `tier` and faster
    ones, to `depths` `[holders]`; `faster` are those of the next faster tier, and those that tier 0 has none of must be
    0. `stack_at` `[66]` and `stack` `[66, words]` are scratch.

    Within one tier holders only get fewer along a chain. Over several that holds from where a faster tier ends, if the
    next one goes on there: whoever does not go on is left out first.
    """
    count = len(hashes)
    if count == 0:
        return
    below = stack[0]  # holders of everything up to and with block `at`
    if tier > 0:
        depths[:] = faster
        _going_on(table, keys, words, hashes, tier, faster, among, stack[1])
        _holders(table, keys, words, hashes, 0, tier, faster, stack[1], below)
    else:
        _holders(table, keys, words, hashes, 0, tier, faster, among, below)
    at = 0
    top = 1
    stack_at[1] = count - 1
    _holders(table, keys, words, hashes, count - 1, tier, faster, below, stack[1])
    while top > 0:
        end = stack_at[top]
        same = True
        for word in range(len(below)):
            same &= stack[top, word] == below[word]
        if same:
            at = end
            top -= 1
        elif end == at + 1:
            _note(below, stack[top], end, depths)
            below[:] = stack[top]
            at = end
            top -= 1
        else:
            top += 1
            stack_at[top] = (at + end) >> 1
            _holders(table, keys, words, hashes, stack_at[top], tier, faster, below, stack[top])
    nobody = stack[1]
    nobody[:] = np.uint64(0)
    _note(below, nobody, count, depths)
