"""Look-ups in the entries, for Numba: each holder's longest prefix of a chain, and blocks that one holder has alone.
Pure but for the arrays they fill. Workers evict leaves first, so holders only get fewer along a chain: where they are
equal at both ends of a stretch a look-up skips it. The pool has gaps anywhere: each of its blocks is looked up.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvfleet.placement.index import entry_kernels as entries
from kvfleet.placement.index.entry_kernels import NOBODY, ONE, PLACE, inlined, kernel

UNASKED = -2
SHARED = -1  # several holders, or none
IN_A_ROW = 32  # pooled blocks that memory is asked for at a time
FEW = 120  # unknown blocks that are all read; more are narrowed down first

DE_BRUIJN = np.uint64(0x03F7_9D71_B4CB_0A89)  # its 64 stretches of 6 bits are all different
BIT_NUMBER = np.zeros(64, dtype=np.int64)
for _number in range(64):
    BIT_NUMBER[(int(DE_BRUIJN) << _number & 0xFFFF_FFFF_FFFF_FFFF) >> 58] = _number


@kernel
def _lose(before, after, depth, depths):
    """Sets the depth of holders that have the chain up to `depth` and not beyond."""
    for word in range(len(before)):
        gone = before[word] & ~after[word]
        while gone:
            lowest = gone & (~gone + ONE)
            depths[word * 64 + BIT_NUMBER[(lowest * DE_BRUIJN) >> np.uint64(58)]] = depth
            gone ^= lowest


@inlined
def _place_at(table, rows, hashes, places, at):
    if places[at] == UNASKED:
        places[at] = entries.place_of(table, rows, hashes[at, 0], hashes[at, 1])
    return places[at]


@inlined
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


@kernel
def _holders_of_few(rows, tier, place, held):
    """To `held`: the holders in this tier of an entry without a wide row; none for NOBODY."""
    for word in range(len(held)):
        held[word] = 0
    for number in range(entries.FEW_HOLD if place != NOBODY else 0):
        note = entries.note_at(rows, place, number)
        if note == 0:
            break
        if entries.tier_in(note) == tier:
            word, bit = entries.bit_of(entries.holder_in(note))
            held[word] |= bit


@inlined
def _who(rows, most, tier, place, going, faster, step, sets, among, out, held):
    """To `sets[out]`, another one: holders of `sets[among]` that have a block, in faster tiers as `faster[step]`, or
    going on in this one. Returns whether one has not."""
    differs, column = False, entries.bits_at(place, len(going), tier)
    if place < most:
        _holders_of_few(rows, tier, place, held)
    for word in range(len(going)):
        here = held[word] if place < most else rows[column + np.uint64(word)]
        who = (faster[step, word] | going[word] & here) & sets[among, word]
        differs |= who != sets[among, word]
        sets[out, word] = who
    return differs


@kernel
def _going_on(table, rows, most, hashes, places, tier, anyone, starts, sets, steps, out, held):
    """To `out`: holders that have in a tier the block after their last in faster ones."""
    out[:] = 0
    for step in range(steps):
        place = _place_at(table, rows, hashes, places, starts[step])
        column = entries.bits_at(place, len(out), tier)
        if place < most:
            _holders_of_few(rows, tier, place, held)
        for word in range(len(out)):
            before = sets[step - 1, word] if step else anyone[word]
            here = held[word] if place < most else rows[column + np.uint64(word)]
            out[word] |= before & ~sets[step, word] & here


@inlined
def _fetch_wide(rows, most, column, words, places, asked):
    """Have memory bring a tier's bits of wide rows beyond their first line. The result means nothing."""
    seen = np.uint64(0)
    for number in range(len(asked) if column + words > entries.LINE else 0):
        place = places[asked[number]]
        if place >= most:
            for word in range(0, words, entries.LINE):
                seen ^= rows[(place << PLACE) + column + word]
    return seen


@kernel
def _few_pooled(rows, tier, place, pool):
    """`_is_pooled` for an entry without a wide row."""
    for number in range(entries.FEW_HOLD):
        note = entries.note_at(rows, place, number)
        if note == 0:
            break
        if entries.tier_in(note) == tier:
            word, bit = entries.bit_of(entries.holder_in(note))
            if pool[word] & bit:
                return True
    return False


@inlined
def _is_pooled(rows, most, tier, place, pool):
    if place < most:
        return _few_pooled(rows, tier, place, pool)
    held, column = np.uint64(0), entries.bits_at(place, len(pool), tier)
    for word in range(len(pool)):
        held |= rows[column + np.uint64(word)] & pool[word]
    return held != 0


@inlined
def _first_not_pooled(table, rows, most, hashes, places, tier, pool, first, end):
    """The first block from `first` on that the pool has not, or `end`. Each pass reads what the next one depends on, so
    that memory brings it at once. The second result means nothing."""
    mask = np.uint64(len(table) - 1)
    seen = np.uint64(0)
    for number in range(first, end):
        seen ^= table[hashes[number, 0] & mask]
    for number in range(first, end):
        tag = hashes[number, 0] & entries.LOWER
        at = tag & mask
        slot = table[at]
        while slot != entries.NONE and slot >> entries.HALF != tag:
            at = (at + ONE) & mask
            slot = table[at]
        places[number] = NOBODY
        if slot != entries.NONE:
            place = np.int64(slot & entries.LOWER)
            places[number] = place
            seen ^= rows[(place << PLACE) + (entries.BITS + tier * len(pool) if place >= most else 0)]
    for number in range(first, end):
        if places[number] == NOBODY:
            return number, seen
        place = places[number]
        if not entries.is_of(rows, place, hashes[number, 0], hashes[number, 1]):  # another hash with this tag
            places[number] = entries.place_of(table, rows, hashes[number, 0], hashes[number, 1])
            place = places[number]
        if place == NOBODY or not _is_pooled(rows, most, tier, place, pool):
            return number, seen
    return end, seen


@inlined
def _end_in_pool(table, rows, most, hashes, places, tier, pool, at):
    seen = np.uint64(0)
    end = at + 1  # mostly the first one decides
    while at < len(hashes):
        at, fetched = _first_not_pooled(table, rows, most, hashes, places, tier, pool, at, end)
        seen ^= fetched
        if at < end:
            break
        end = min(at + IN_A_ROW, len(hashes))
    return at, seen


@njit
def _go_on_in_pool(table, rows, most, hashes, places, tier, pool, starts, steps, anyone, depths):
    """Add to the depths of `anyone`, which `starts[:steps]` lists, what the pool has without a gap from there on;
    returns what it has from the start. Each stretch of it is read once."""
    ends = np.empty(len(hashes) + 1, dtype=np.int64)
    ends[len(hashes)] = len(hashes)
    end, seen = -1, np.uint64(0)
    for step in range(steps):
        at = starts[step]
        if at >= end or step == 0:
            end, fetched = _end_in_pool(table, rows, most, hashes, places, tier, pool, at)
            seen ^= fetched
        ends[at] = end
    for word in range(len(anyone)):
        for bit in range(64):
            if anyone[word] >> np.uint64(bit) & ONE:
                depths[word * 64 + bit] = ends[depths[word * 64 + bit]]
    return ends[0], seen


@njit
def find(table, rows, most, hashes, used, anyone, pool, depths):
    """To `depths` `[tiers, holders]`: length of the longest prefix of the chain `hashes` `[n, 2]` that each holder of
    `anyone` has in each tier or faster ones; tiers from `used` on have no holders. In the last tier it goes on as far
    as `pool` has each block there. Returns how far that is for a holder of nothing, and a number that means nothing.

    Within one tier holders only get fewer along a chain. Over several that holds from where a faster tier ends, if the
    next one goes on there: a holder that does not go on stays as it is.

    A tier's result is a list of steps: `sets[i]` have all blocks up to `starts[i]` and on. While it is looked for, step
    i lies behind `behind[i]`, and at `starts[i]` or before. All open steps are narrowed down at once, so that memory
    has several blocks to fetch at a time.
    """
    count, words = len(hashes), len(anyone)
    depths[:] = 0
    if count == 0:
        return 0, np.uint64(0)
    longest = 64 * words + 2  # steps: each but the first loses a holder, and one is being tried
    places = np.full(count, UNASKED, dtype=np.int64)
    starts, behind = np.zeros(longest, dtype=np.int64), np.zeros(longest, dtype=np.int64)
    sets = np.empty((longest, words), dtype=np.uint64)  # written before they are read, and large where workers are many
    sets[0, :] = 0
    steps = 1
    next_starts, next_behind = np.zeros(longest, dtype=np.int64), np.zeros(longest, dtype=np.int64)
    next_sets = np.empty((longest, words), dtype=np.uint64)
    asked, asked_hashes = np.empty(longest + FEW, dtype=np.int64), np.empty((longest + FEW, 2), dtype=np.uint64)
    fetched = np.uint64(0)
    faster_starts, faster_sets = np.zeros(longest, dtype=np.int64), np.empty((longest, words), dtype=np.uint64)
    going, held = np.zeros(words, dtype=np.uint64), np.empty(words, dtype=np.uint64)

    for tier in range(used):
        _going_on(table, rows, most, hashes, places, tier, anyone, starts, sets, steps, going, held)
        if not going.any():
            if tier:
                depths[tier] = depths[tier - 1]
            continue
        faster_starts, starts = starts, faster_starts
        faster_sets, sets = sets, faster_sets
        faster = steps
        for word in range(words):
            sets[1, word] = anyone[word]
        _who(rows, most, tier, places[0], going, faster_sets, 0, sets, 1, 0, held)
        last_place = _place_at(table, rows, hashes, places, count - 1)
        step = _step_at(faster_starts, faster, count - 1)
        steps = 1 + _who(rows, most, tier, last_place, going, faster_sets, step, sets, 0, 1, held)
        starts[0], starts[1], behind[1] = 0, count - 1, 0
        while True:
            unsure = unknown = 0
            for step in range(1, steps):
                unsure += starts[step] - behind[step] > 1
                unknown += starts[step] - behind[step] - 1
            if unsure == 0:
                break
            between = entries.AT_ONCE // unsure + 1 if unknown > FEW else FEW
            asking = 0
            for step in range(1, steps):
                stride = (starts[step] - behind[step] + between) // (between + 1)
                for at in range(behind[step] + stride, starts[step], stride):
                    if places[at] == UNASKED:
                        asked[asking] = at
                        asked_hashes[asking, 0], asked_hashes[asking, 1] = hashes[at, 0], hashes[at, 1]
                        asking += 1
            fetched ^= entries.fetch(table, rows, asked_hashes[:asking])
            for number in range(asking):
                _place_at(table, rows, hashes, places, asked[number])
            fetched ^= _fetch_wide(rows, most, entries.BITS + tier * words, words, places, asked[:asking])
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
                    if _who(
                        rows, most, tier, places[at], going, faster_sets, so_far, next_sets, found - 1, found, held
                    ):
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
    last = len(depths) - 1
    pooled, seen = _go_on_in_pool(table, rows, most, hashes, places, last, pool, starts, steps, anyone, depths[last])
    return pooled, fetched ^ seen


@inlined
def _sole(rows, entry, tiers, counted, pool):
    """Holder of an entry that one of `counted` has, in any tier, and the pool has not; else SHARED."""
    words, holder, wide = len(counted), np.int64(SHARED), entries.wide_of(rows, entry)
    if wide == NOBODY:
        for number in range(entries.FEW_HOLD):
            note = entries.note_at(rows, entry, number)
            if note == 0:
                break
            found = entries.holder_in(note)
            word, bit = entries.bit_of(found)
            if pool[word] & bit:
                return np.int64(SHARED)
            if counted[word] & bit:
                if holder != SHARED and holder != found:
                    return np.int64(SHARED)
                holder = found
        return holder
    column = (wide << PLACE) + entries.BITS
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
def count_sole(rows, first, end, tiers, counted, pool, counts):
    """Add to `counts` `[holders]` the entries from `first` to `end` that one has alone."""
    for entry in range(first, end):
        holder = _sole(rows, entry, tiers, counted, pool)
        if holder != SHARED:
            counts[holder] += 1


@kernel
def sole_holders(table, rows, named, most, tiers, words, hashes, counted, pool, found):
    """To `found` `[n, 2]`: each block's entry, or NOBODY, and its only holder, or SHARED."""
    fetched = np.uint64(0)
    for number in range(len(hashes)):
        if number % entries.AT_ONCE == 0:
            fetched ^= entries.fetch(table, rows, hashes[number : number + entries.AT_ONCE])
        place = entries.place_of(table, rows, hashes[number, 0], hashes[number, 1])
        entry = NOBODY if place == NOBODY else entries.entry_at(named, most, tiers, words, place)
        found[number, 0] = entry
        found[number, 1] = SHARED if entry == NOBODY else _sole(rows, entry, tiers, counted, pool)
    return fetched
