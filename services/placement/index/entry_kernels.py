"""The prefix index's entries and the holders of each, for Numba to compile. Pure but for the arrays they change.

An entry is a block that has a holder; its number never changes while it lives. `rows` is one array of words: half a
cache line for each entry, then wide rows, which take memory when they are first used; `named` has their entries.
A place is where a row begins, in half cache lines: an entry's is its number, a wide row's is `most` or more.

    low, high of the hash   8 notes of 16 bits, the first ones in use: holder << 2 | tier + 1        held by few
    low, high of the hash   place of its wide row << 16 | WIDE, how many bits are set in it          held by many
    low, high of the hash   bits of its holders, `words` for each tier                               the wide row

`table` is a hash table with linear probing; a slot is `low's lower half, place`, so a look-up reads only rows that it
looks for, and only the wide row of blocks that many hold.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

# `inlined` is for calls within loops: a call with its arrays takes longer than its work. Neither counts references:
# Numba would count those to arrays at each call, with locked instructions, and a look-up took twice as long. So a
# function that makes an array is plain `njit`, and should call few. Unsigned indices save the test for negative ones.
kernel = njit(_nrt=False)
inlined = njit(_nrt=False, forceinline=True)

NONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # an empty slot
NOBODY = -1  # the block has no entry
LIVE, FREE, WIDE_USED, WIDE_FREE, COUNTERS = range(5)  # counters: entries, entries on the free list, wide rows ever
# used, and 1 + the first of those free again, each of which names the next one so
LOW, HIGH, NOTES, REST = range(4)  # words of an entry's row
BITS = 2  # words of a wide row before the bits
PLACE = 2  # its words are 1 << PLACE
FEW_HOLD = 8  # notes of a row
NARROW = 4  # holdings at which a wide row is given back
TIER_BITS = 2
MOST_HOLDERS = 1 << 16 - TIER_BITS
MOST_TIERS = (1 << TIER_BITS) - 1
AT_ONCE = 16  # blocks that memory is asked for at a time
LINE = 8  # words of a cache line

HALF = np.uint64(32)
LOWER = np.uint64(0xFFFF_FFFF)
ONE = np.uint64(1)
LANE = np.uint64(16)
LANE_MASK = np.uint64(0xFFFF)
TIER_MASK = np.uint64(MOST_TIERS)
TIERS_BITS = np.uint64(TIER_BITS)
WIDE = np.uint64(1 << TIER_BITS)  # no note: those name a tier
WIDE_MASK = WIDE | TIER_MASK


@inlined
def is_of(rows, place, low, high):
    at = np.uint64(place) << np.uint64(PLACE)
    return rows[at] == low and rows[at + np.uint64(HIGH)] == high


@inlined
def _slot_of(table, rows, low, high):
    """The hash's slot, or the empty one where it would be."""
    mask = np.uint64(len(table) - 1)
    tag = low & LOWER
    at = tag & mask
    while True:
        slot = table[at]
        if slot == NONE or (slot >> HALF == tag and is_of(rows, slot & LOWER, low, high)):
            return np.int64(at)
        at = (at + ONE) & mask


@inlined
def place_of(table, rows, low, high):
    slot = table[_slot_of(table, rows, low, high)]
    return NOBODY if slot == NONE else np.int64(slot & LOWER)


def wide_places(tiers, words):
    return (BITS + tiers * words + (1 << PLACE) - 1) >> PLACE


_wide_places = kernel(wide_places)


@inlined
def entry_at(named, most, tiers, words, place):
    return place if place < most else np.int64(named[(place - most) // _wide_places(tiers, words)])


@inlined
def fetch(table, rows, hashes):
    """Have memory bring all slots, then all rows, that looking for these will read: a look-up alone waits for one
    after the other. The result means nothing."""
    mask, last = np.uint64(len(table) - 1), np.uint64((len(rows) >> PLACE) - 1)
    seen = np.uint64(0)
    for number in range(len(hashes)):
        seen ^= table[hashes[number, 0] & mask]
    for number in range(len(hashes)):
        seen ^= rows[min(table[hashes[number, 0] & mask] & LOWER, last) << np.uint64(PLACE)]
    return seen


@kernel
def _empty_slot(table, at):
    """Take a slot out and move up those that probing would no longer find."""
    mask = np.int64(len(table) - 1)
    hole = at
    while True:
        at = (at + 1) & mask
        slot = table[at]
        if slot == NONE:
            break
        home = np.int64(slot >> HALF) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            table[hole] = slot
            hole = at
    table[hole] = NONE


@inlined
def wide_of(rows, entry):
    """The place of its wide row, or NOBODY."""
    notes = rows[(entry << PLACE) + NOTES]
    return np.int64(notes >> LANE) if notes & WIDE_MASK == WIDE else NOBODY


@inlined
def note_at(rows, entry, number):
    """A note of an entry without a wide row; 0: this one and those after it are not in use."""
    return rows[(entry << PLACE) + NOTES + (number >> 2)] >> np.uint64((number & 3) << 4) & LANE_MASK


@inlined
def holder_in(note):
    return np.int64(note >> TIERS_BITS)


@inlined
def tier_in(note):
    return np.int64(note & TIER_MASK) - 1


@inlined
def bit_of(holder):
    """Its word among those of a tier, and mask."""
    return holder >> 6, ONE << np.uint64(holder & 63)


@inlined
def _note_of(tier, holder):
    return np.uint64(holder << TIER_BITS | tier + 1)


@inlined
def _set_note(rows, entry, number, note):
    at, shift = (entry << PLACE) + NOTES + (number >> 2), np.uint64((number & 3) << 4)
    rows[at] = rows[at] & ~(LANE_MASK << shift) | note << shift


@inlined
def _find_note(rows, entry, note):
    """Its number, or -1."""
    for number in range(FEW_HOLD):
        found = note_at(rows, entry, number)
        if found == note:
            return number
        if found == 0:
            break
    return -1


@inlined
def bits_at(place, words, tier):
    """Where the bits of a tier begin in a wide row."""
    return (np.uint64(place) << np.uint64(PLACE)) + np.uint64(BITS + tier * words)


@inlined
def _bit_at(place, words, tier, holder):
    """A holder's word in a wide row, and mask."""
    word, bit = bit_of(holder)
    return bits_at(place, words, tier) + np.uint64(word), bit


@inlined
def _holds(rows, words, entry, tier, holder):
    wide = wide_of(rows, entry)
    if wide == NOBODY:
        return _find_note(rows, entry, _note_of(tier, holder)) >= 0
    at, bit = _bit_at(wide, words, tier, holder)
    return rows[at] & bit != 0


@kernel
def _widen(table, rows, named, most, tiers, words, counters, entry):
    if counters[WIDE_FREE]:
        number = counters[WIDE_FREE] - 1
    else:
        number = counters[WIDE_USED]
        counters[WIDE_USED] += 1
    wide, own = most + number * _wide_places(tiers, words), entry << PLACE
    if counters[WIDE_FREE]:
        counters[WIDE_FREE] = np.int64(rows[wide << PLACE])
    for note_number in range(FEW_HOLD):
        note = note_at(rows, entry, note_number)
        at, bit = _bit_at(wide, words, tier_in(note), holder_in(note))
        rows[at] |= bit
    low, high = rows[own], rows[own + HIGH]
    table[_slot_of(table, rows, low, high)] = (low & LOWER) << HALF | np.uint64(wide)
    rows[wide << PLACE], rows[(wide << PLACE) + HIGH], named[number] = low, high, entry
    rows[own + NOTES], rows[own + REST] = np.uint64(wide) << LANE | WIDE, np.uint64(FEW_HOLD)


@kernel
def _narrow(table, rows, most, tiers, words, counters, entry):
    wide, own = wide_of(rows, entry), entry << PLACE
    low, number = rows[own], 0
    table[_slot_of(table, rows, low, rows[own + HIGH])] = (low & LOWER) << HALF | np.uint64(entry)
    rows[own + NOTES], rows[own + REST] = 0, 0
    for tier in range(tiers):
        for word in range(words):
            at = (wide << PLACE) + BITS + tier * words + word
            bits, rows[at] = rows[at], 0
            for bit in range(64 if bits else 0):
                if bits >> np.uint64(bit) & ONE:
                    _set_note(rows, entry, number, _note_of(tier, word << 6 | bit))
                    number += 1
    rows[wide << PLACE] = np.uint64(counters[WIDE_FREE])
    counters[WIDE_FREE] = (wide - most) // _wide_places(tiers, words) + 1


@inlined
def _add(table, rows, named, most, tiers, words, counters, entry, tier, holder):
    """Returns whether that is new."""
    if wide_of(rows, entry) == NOBODY:
        note = _note_of(tier, holder)
        for number in range(FEW_HOLD):
            found = note_at(rows, entry, number)
            if found == note:
                return False
            if found == 0:
                _set_note(rows, entry, number, note)
                return True
        _widen(table, rows, named, most, tiers, words, counters, entry)
    at, bit = _bit_at(wide_of(rows, entry), words, tier, holder)
    if rows[at] & bit:
        return False
    rows[at] |= bit
    rows[(entry << PLACE) + REST] += ONE
    return True


@inlined
def _take(table, rows, most, tiers, words, free, counters, entry, tier, holder):
    """Returns whether it held it. An entry without holders is free."""
    wide, own = wide_of(rows, entry), entry << PLACE
    if wide != NOBODY:
        at, bit = _bit_at(wide, words, tier, holder)
        if not rows[at] & bit:
            return False
        rows[at] ^= bit
        rows[own + REST] -= ONE
        if rows[own + REST] == NARROW:
            _narrow(table, rows, most, tiers, words, counters, entry)
        return True
    number = _find_note(rows, entry, _note_of(tier, holder))
    if number < 0:
        return False
    last = number
    while last + 1 < FEW_HOLD and note_at(rows, entry, last + 1):
        last += 1
    _set_note(rows, entry, number, note_at(rows, entry, last))
    _set_note(rows, entry, last, np.uint64(0))
    if last == 0:
        _empty_slot(table, _slot_of(table, rows, rows[own], rows[own + HIGH]))
        free[counters[FREE]] = entry
        counters[FREE] += 1
        counters[LIVE] -= 1
    return True


@kernel
def store(table, rows, named, most, tiers, words, free, counters, hashes, tier, holder, log, logged):
    """Note `hashes` `[n, 2]` as held; returns how many were, fewer than n when the index is full, and the new length of
    `log`, which has room for n new holdings from `logged` on, as `entry * tiers + tier`."""
    fetched = np.uint64(0)
    for number in range(len(hashes)):
        if number % AT_ONCE == 0:
            fetched ^= fetch(table, rows, hashes[number : number + AT_ONCE])
        low, high = hashes[number, 0], hashes[number, 1]
        at = _slot_of(table, rows, low, high)
        slot = table[at]
        if slot == NONE:
            if counters[FREE] == 0:
                return number, logged, fetched
            counters[FREE] -= 1
            counters[LIVE] += 1
            entry = np.int64(free[counters[FREE]])
            rows[entry << PLACE], rows[(entry << PLACE) + HIGH] = low, high
            table[at] = (low & LOWER) << HALF | np.uint64(entry)
        else:
            entry = entry_at(named, most, tiers, words, np.int64(slot & LOWER))
        if _add(table, rows, named, most, tiers, words, counters, entry, tier, holder):
            log[logged] = entry * tiers + tier
            logged += 1
    return len(hashes), logged, fetched


@kernel
def remove(table, rows, named, most, tiers, words, free, counters, hashes, tier, holder):
    """Note `hashes` `[n, 2]` as held no more; returns how many were."""
    removed, fetched = 0, np.uint64(0)
    for number in range(len(hashes)):
        if number % AT_ONCE == 0:
            fetched ^= fetch(table, rows, hashes[number : number + AT_ONCE])
        place = place_of(table, rows, hashes[number, 0], hashes[number, 1])
        if place != NOBODY:
            entry = entry_at(named, most, tiers, words, place)
            removed += _take(table, rows, most, tiers, words, free, counters, entry, tier, holder)
    return removed, fetched


@kernel
def forget(table, rows, named, most, tiers, words, free, counters, holder, log, logged, count):
    """Take back the last `count` notes of a holder's `log`; returns how many of them it still held."""
    removed = 0
    for number in range(logged - 1, logged - 1 - count, -1):
        entry, tier = np.int64(log[number] // tiers), log[number] % tiers
        removed += _take(table, rows, most, tiers, words, free, counters, entry, tier, holder)
    return removed


@kernel
def compact(rows, tiers, words, holder, log, logged, marks):
    """Drop from `log` what the holder no longer holds, and the earlier of equal notes, of a block given back meanwhile
    or another one with this entry. Returns its new length. `marks` has no bit set before or after."""
    kept = logged
    for number in range(logged - 1, -1, -1):
        note = log[number]
        word, bit = bit_of(note)
        if not marks[word] & bit and _holds(rows, words, note // tiers, note % tiers, holder):
            marks[word] |= bit
            kept -= 1
            log[kept] = note
    for number in range(logged - kept):
        log[number] = log[kept + number]
        marks[log[number] >> 6] = 0
    return logged - kept
