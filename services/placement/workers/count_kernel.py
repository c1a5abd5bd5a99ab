"""How many of some chains have each block: an open-addressing table, for Numba. Pure but for what it fills.

A hash's low half is its place. `blocks` is `[places, 2]`, `counts` `[places]`, a power of two, 0 in free places.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

from kvfleet.placement.index.entry_kernels import kernel


@kernel
def _place_of(blocks, counts, low, high):
    """Where the block is, or would be."""
    mask = np.uint64(len(counts) - 1)
    place = low & mask
    while counts[place] and (blocks[place, 0] != low or blocks[place, 1] != high):
        place = (place + np.uint64(1)) & mask
    return place


@kernel
def add(blocks, counts, hashes):
    """Returns how many are new."""
    new = 0
    for number in range(len(hashes)):
        low, high = hashes[number, 0], hashes[number, 1]
        place = _place_of(blocks, counts, low, high)
        if not counts[place]:
            blocks[place, 0], blocks[place, 1] = low, high
            new += 1
        counts[place] += 1
    return new


@njit
def take(blocks, counts, hashes):
    """Returns which of them are in no other chain, `[n]`. All of them must be there."""
    last = np.zeros(len(hashes), dtype=np.bool_)
    mask, one = np.uint64(len(counts) - 1), np.uint64(1)
    for number in range(len(hashes)):
        place = _place_of(blocks, counts, hashes[number, 0], hashes[number, 1])
        counts[place] -= 1
        if counts[place]:
            continue
        last[number] = True
        other = (place + one) & mask  # those put further on because of it move up (Knuth, TAOCP 3, 6.4 R)
        while counts[other]:
            wanted = blocks[other, 0] & mask
            if ((other - wanted) & mask) >= ((other - place) & mask):
                blocks[place, 0], blocks[place, 1] = blocks[other, 0], blocks[other, 1]
                counts[place], counts[other] = counts[other], 0
                place = other
            other = (other + one) & mask
    return last
