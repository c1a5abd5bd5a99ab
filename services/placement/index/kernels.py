"""The prefix index's inner loops, for Numba to compile: `warm_up` does it. Pure but for the arrays they change.

Small functions are inlined by force: a call with its arrays takes longer than what they do.

An entry is a block that somebody holds; its number never changes while it lives. Its row, a cache line for 128 holders
in three tiers, is `low, high` of its hash and then bits: who holds it, `words` for each tier. `table` is a hash table
with linear probing; a slot is `low's lower half, entry`, so that rows are read only of those that are looked for.

Workers evict leaves first, so along a chain of hashes the holders only ever get fewer: what is equal at both ends of a
stretch is equal in between, and a look-up asks only where it is not. What vaults hold is one pool, with gaps anywhere:
there every block is asked for.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

NONE = np.uint64(0xFFFF_FFFF_FFFF_FFFF)  # an empty slot
NOBODY = -1  # has the block: no entry
UNASKED = -2
LIVE, FREE, COUNTERS = range(3)  # of the counters: entries, entries on the free list
KEY = 2  # words of a row before the holders'
AT_ONCE = 16  # blocks that memory is asked for at a time
IN_A_ROW = 32  # where each will be looked at
FEW = 120  # blocks, at most, that are asked for one and all; more are narrowed down first

HALF = np.uint64(32)
LOWER = np.uint64(0xFFFF_FFFF)
ONE = np.uint64(1)
DE_BRUIJN = np.uint64(0x03F7_9D71_B4CB_0A89)  # its 64 stretches of 6 bits are all different
BIT_NUMBER = np.zeros(64, dtype=np.int64)
for _number in range(64):
    BIT_NUMBER[(int(DE_BRUIJN) << _number & 0xFFFF_FFFF_FFFF_FFFF) >> 58] = _number


@njit(forceinline=True)
def _slot_of(table, rows, low, high):
    """Where the hash is in the table, or the empty slot where it would be."""
    mask = np.int64(len(table) - 1)
    tag = low & LOWER
    at = np.int64(tag) & mask
    while True:
        slot = table[at]
        if slot == NONE:
            return at
        if slot >> HALF == tag:
            entry = np.int64(slot & LOWER)
            if rows[entry, 0] == low and rows[entry, 1] == high:
                return at
        at = (at + 1) & mask


@njit(forceinline=True)
def entry_of(table, rows, low, high):
    slot = table[_slot_of(table, rows, low, high)]
    return NOBODY if slot == NONE else np.int64(slot & LOWER)


@njit(forceinline=True)
def fetch(table, rows, hashes):
    """Have memory bring what looking for these will read, all at once: slots, then rows. A look-up alone waits for one
    after the other, and what it does next hangs on what it reads. The result means nothing."""
    mask, last = np.uint64(len(table) - 1), np.uint64(len(rows) - 1)
    seen = np.uint64(0)
    for number in range(len(hashes)):
        seen ^= table[hashes[number, 0] & mask]
    for number in range(len(hashes)):
        seen ^= rows[min(table[hashes[number, 0] & mask] & LOWER, last), 0]
    return seen


@njit
def _empty_slot(table, at):
    """Take a slot out, moving up what probing would no longer find."""
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


@njit
def _free_if_unheld(table, rows, free, counters, entry):
    for word in range(KEY, rows.shape[1]):
        if rows[entry, word]:
            return
    _empty_slot(table, _slot_of(table, rows, rows[entry, 0], rows[entry, 1]))
    free[counters[FREE]] = entry
    counters[FREE] += 1
    counters[LIVE] -= 1


@njit(forceinline=True)
def _place_of(rows, tiers, tier, holder):
    """Where in a row a holder's bit is: word and mask."""
    words = (rows.shape[1] - KEY) // tiers
    return KEY + tier * words + (holder >> 6), ONE << np.uint64(holder & 63)


@njit
def store(table, rows, free, counters, hashes, tiers, tier, holder, log, logged):
    """Note `hashes` `[n, 2]` as held; returns how many were, fewer than n when the index is full. New holdings are
    appended to `log` from `logged` on, which has room for n, as `entry * tiers + tier`; the second result is its new
    length."""
    word, bit = _place_of(rows, tiers, tier, holder)
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
            rows[entry, 0], rows[entry, 1] = low, high
            table[at] = (low & LOWER) << HALF | np.uint64(entry)
        else:
            entry = np.int64(slot & LOWER)
        if not rows[entry, word] & bit:
            rows[entry, word] |= bit
            log[logged] = entry * tiers + tier
            logged += 1
    return len(hashes), logged, fetched


@njit
def remove(table, rows, free, counters, hashes, tiers, tier, holder):
    """Note `hashes` `[n, 2]` as held no more; returns how many were."""
    word, bit = _place_of(rows, tiers, tier, holder)
    removed, fetched = 0, np.uint64(0)
    for number in range(len(hashes)):
        if number % AT_ONCE == 0:
            fetched ^= fetch(table, rows, hashes[number : number + AT_ONCE])
        entry = entry_of(table, rows, hashes[number, 0], hashes[number, 1])
        if entry != NOBODY and rows[entry, word] & bit:
            rows[entry, word] &= ~bit
            removed += 1
            _free_if_unheld(table, rows, free, counters, entry)
    return removed, fetched


@njit
def forget(table, rows, free, counters, tiers, holder, log, logged, count):
    """Take back the last `count` of what `log` notes of a holder; returns how much of that it still held."""
    removed = 0
    for number in range(logged - 1, logged - 1 - count, -1):
        entry = np.int64(log[number] // tiers)
        word, bit = _place_of(rows, tiers, log[number] % tiers, holder)
        if rows[entry, word] & bit:
            rows[entry, word] &= ~bit
            removed += 1
            _free_if_unheld(table, rows, free, counters, entry)
    return removed


@njit
def compact(rows, tiers, holder, log, logged, marks, mark):
    """Drop from `log` what the holder holds no more, and of what is noted twice the earlier: that was given back
    meanwhile, or was of another block with the same entry. Returns its new length."""
    kept = logged
    for number in range(logged - 1, -1, -1):
        note = log[number]
        word, bit = _place_of(rows, tiers, note % tiers, holder)
        if marks[note] != mark and rows[note // tiers, word] & bit:
            marks[note] = mark
            kept -= 1
            log[kept] = note
    log[: logged - kept] = log[kept:logged].copy()
    return logged - kept


# ---------------------------------------------------------------------------------------------- look-ups


@njit
def _lose(before, after, depth, depths):
    """Those that have the chain up to `depth` and not beyond."""
    for word in range(len(before)):
        gone = before[word] & ~after[word]
        while gone:
            lowest = gone & (~gone + ONE)
            depths[word * 64 + BIT_NUMBER[(lowest * DE_BRUIJN) >> np.uint64(58)]] = depth
            gone ^= lowest


@njit(forceinline=True)
def _entry_at(table, rows, hashes, entries, at):
    """Entry of block `at` of the chain; asked for once."""
    if entries[at] == UNASKED:
        entries[at] = entry_of(table, rows, hashes[at, 0], hashes[at, 1])
    return entries[at]


@njit(forceinline=True)
def _step_at(starts, steps, at):
    """The last step that starts at `at` or before it."""
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) >> 1
        if starts[middle] <= at:
            low = middle
        else:
            high = middle
    return low


@njit(forceinline=True)
def _who(rows, column, entry, going, faster, step, sets, among, out):
    """Who of `sets[among]` has a block, in faster tiers as `faster[step]` do, or going on in this one: to `sets[out]`.
    Whether somebody has not."""
    differs = False
    for word in range(len(going)):
        who = faster[step, word]
        if entry != NOBODY:
            who |= going[word] & rows[entry, column + word]
        who &= sets[among, word]
        differs |= who != sets[among, word]
        sets[out, word] = who
    return differs


@njit
def _going_on(table, rows, hashes, entries, column, anyone, starts, sets, steps, out):
    """Who has in a tier the block after the last that it has in faster ones."""
    out[:] = 0
    for step in range(steps):
        entry = _entry_at(table, rows, hashes, entries, starts[step])
        if entry != NOBODY:
            for word in range(len(out)):
                before = sets[step - 1, word] if step else anyone[word]
                out[word] |= before & ~sets[step, word] & rows[entry, column + word]


@njit(forceinline=True)
def _first_not_pooled(table, rows, hashes, entries, column, pool, first, end):
    """The first block from `first` on, or `end`, that nobody of the pool has. Each pass over them reads what the next
    one hangs on, so that memory brings it at once. The second result means nothing."""
    mask = np.uint64(len(table) - 1)
    seen = np.uint64(0)
    for number in range(first, end):
        seen ^= table[hashes[number, 0] & mask]
    for number in range(first, end):
        tag = hashes[number, 0] & LOWER
        at = tag & mask
        slot = table[at]
        while slot != NONE and slot >> HALF != tag:
            at = (at + ONE) & mask
            slot = table[at]
        entries[number] = NOBODY
        if slot != NONE:
            entry = slot & LOWER
            entries[number] = np.int64(entry)
            seen ^= rows[entry, 0]
    for number in range(first, end):
        if entries[number] == NOBODY:
            return number, seen
        entry = np.uint64(entries[number])
        if rows[entry, 0] != hashes[number, 0] or rows[entry, 1] != hashes[number, 1]:  # another one with this tag
            entries[number] = entry_of(table, rows, hashes[number, 0], hashes[number, 1])
            if entries[number] == NOBODY:
                return number, seen
            entry = np.uint64(entries[number])
        held = np.uint64(0)
        for word in range(len(pool)):
            held |= rows[entry, column + word] & pool[word]
        if not held:
            return number, seen
    return end, seen


@njit(forceinline=True)
def _end_in_pool(table, rows, hashes, entries, column, pool, at):
    """The first block from `at` on that nobody of the pool has. Each is asked for: what lies in several places and is
    evicted by none but its own rules may have gaps anywhere."""
    seen = np.uint64(0)
    end = at + 1  # mostly the first one says it
    while at < len(hashes):
        at, fetched = _first_not_pooled(table, rows, hashes, entries, column, pool, at, end)
        seen ^= fetched
        if at < end:
            break
        end = min(at + IN_A_ROW, len(hashes))
    return at, seen


@njit
def _go_on_in_pool(table, rows, hashes, entries, pool, starts, steps, anyone, depths):
    """Add to the depths of `anyone`, which are those that `starts[:steps]` names, what the pool has without a gap from
    there on; returns what it has from the start. A stretch that it has is looked at once, whoever comes to it."""
    column = rows.shape[1] - len(pool)
    ends = np.empty(len(hashes) + 1, dtype=np.int64)
    ends[len(hashes)] = len(hashes)
    end, seen = -1, np.uint64(0)
    for step in range(steps):
        at = starts[step]
        if at >= end or step == 0:
            end, fetched = _end_in_pool(table, rows, hashes, entries, column, pool, at)
            seen ^= fetched
        ends[at] = end
    for word in range(len(anyone)):
        for bit in range(64):
            if anyone[word] >> np.uint64(bit) & ONE:
                depths[word * 64 + bit] = ends[depths[word * 64 + bit]]
    return ends[0], seen


@njit
def find(table, rows, hashes, used, anyone, pool, depths):
    """Length of the longest prefix of the chain `hashes` `[n, 2]` that each holder of `anyone` has in each tier and
    faster ones, to `depths` `[tiers, holders]`; tiers from `used` on are those of nobody. In the last tier it goes on
    as far as each block is held there by some holder of `pool`. Returns how far that is for whoever has nothing, and a
    number that means nothing.

    Within one tier holders only get fewer along a chain. Over several that holds from where a faster tier ends, if the
    next one goes on there: whoever does not go on stays as it is.

    A tier's result is a list of steps: from block `starts[i]` on it is `sets[i]` that have all blocks so far. While it
    is looked for, step i is known to lie behind `behind[i]`, and at `starts[i]` or before. All open steps are narrowed
    down at once, so that memory has several blocks to fetch at a time.
    """
    count, words = len(hashes), len(anyone)
    depths[:] = 0
    if count == 0:
        return 0, np.uint64(0)
    most = 64 * words + 2  # steps: each but the first loses somebody, and one is being tried
    entries = np.full(count, UNASKED, dtype=np.int64)
    starts, behind = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    sets = np.zeros((most, words), dtype=np.uint64)
    steps = 1
    next_starts, next_behind = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    next_sets = np.zeros((most, words), dtype=np.uint64)
    asked, asked_hashes = np.empty(most + FEW, dtype=np.int64), np.empty((most + FEW, 2), dtype=np.uint64)
    fetched = np.uint64(0)
    faster_starts, faster_sets = np.zeros(most, dtype=np.int64), np.zeros((most, words), dtype=np.uint64)
    going = np.zeros(words, dtype=np.uint64)

    for tier in range(used):
        column = KEY + tier * words
        _going_on(table, rows, hashes, entries, column, anyone, starts, sets, steps, going)
        if not going.any():
            if tier:
                depths[tier] = depths[tier - 1]
            continue
        faster_starts, starts = starts, faster_starts
        faster_sets, sets = sets, faster_sets
        faster = steps
        for word in range(words):
            sets[0, word] = anyone[word]
        _who(rows, column, entries[0], going, faster_sets, 0, sets, 0, 0)
        last_entry = _entry_at(table, rows, hashes, entries, count - 1)
        step = _step_at(faster_starts, faster, count - 1)
        steps = 1 + _who(rows, column, last_entry, going, faster_sets, step, sets, 0, 1)
        starts[0], starts[1], behind[1] = 0, count - 1, 0
        while True:
            wide = unknown = 0
            for step in range(1, steps):
                wide += starts[step] - behind[step] > 1
                unknown += starts[step] - behind[step] - 1
            if wide == 0:
                break
            between = AT_ONCE // wide + 1 if unknown > FEW else FEW
            asking = 0
            for step in range(1, steps):
                stride = (starts[step] - behind[step] + between) // (between + 1)
                for at in range(behind[step] + stride, starts[step], stride):
                    if entries[at] == UNASKED:
                        asked[asking] = at
                        asked_hashes[asking, 0], asked_hashes[asking, 1] = hashes[at, 0], hashes[at, 1]
                        asking += 1
            fetched ^= fetch(table, rows, asked_hashes[:asking])
            for number in range(asking):
                _entry_at(table, rows, hashes, entries, asked[number])
            found = 1
            next_starts[0] = 0
            for word in range(words):
                next_sets[0, word] = sets[0, word]
            for step in range(1, steps):
                stride = (starts[step] - behind[step] + between) // (between + 1)
                last = behind[step]
                while last < starts[step]:
                    at = min(last + stride, starts[step])
                    so_far = _step_at(faster_starts, faster, at)
                    if _who(rows, column, entries[at], going, faster_sets, so_far, next_sets, found - 1, found):
                        next_starts[found], next_behind[found] = at, last
                        found += 1
                    last = at
            starts, next_starts = next_starts, starts
            behind, next_behind = next_behind, behind
            sets, next_sets = next_sets, sets
            steps = found
        for step in range(1, steps):
            _lose(sets[step - 1], sets[step], starts[step], depths[tier])
        going[:] = 0
        _lose(sets[steps - 1], going, count, depths[tier])
    for tier in range(used, len(depths)):
        depths[tier] = depths[used - 1]
    if not pool.any():
        return 0, fetched
    pooled, seen = _go_on_in_pool(
        table, rows, hashes, entries, pool, starts, steps, anyone, depths[len(depths) - 1]
    )  # fmt: skip
    return pooled, fetched ^ seen
