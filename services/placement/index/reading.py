"""Reads block events from messages, for Numba: hashes to arrays, without an object each. Pure. It knows only the form
that `codec.encode_events` writes; any other, broken ones too, is ANOTHER_FORM.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np

from kvfleet.placement.index.entry_kernels import kernel

ANOTHER_FORM = -1
MOST_CHANGES = 16
EPOCH_START, EPOCH_END, SEQ, HEADER = range(4)  # the first fields; then those of each change:
TIER_START, TIER_END, REMOVED, FIRST, END, DIGEST, CHANGE = range(7)  # the name of the tier, which hashes, their XOR
BYTES_OF_HASH = 18  # with msgpack's type and length


@kernel
def _unsigned(data, at, width):
    """Big-endian."""
    value = np.int64(0)
    for number in range(at, at + width):
        value = value << 8 | np.int64(data[number])
    return value


@kernel
def _word(data, at):
    """Little-endian."""
    value = np.uint64(0)
    for number in range(8):
        value |= np.uint64(data[at + number]) << np.uint64(8 * number)
    return value


@kernel
def _length(data, at, short, mask, width_1, width_2, width_4):
    """Length of the value at `at`, and where its content begins; both -1: another type. `short` is the type whose
    marker holds the length, the widths are markers of those where it follows, 0 for none."""
    if at < 0 or at >= len(data) or data[at] == 0:
        return -1, -1
    marker = data[at]
    if short and marker & (0xFF ^ mask) == short:
        return np.int64(marker & mask), at + 1
    width = 1 if marker == width_1 else 2 if marker == width_2 else 4 if marker == width_4 else 0
    if width == 0 or at + 1 + width > len(data):
        return -1, -1
    return _unsigned(data, at + 1, width), at + 1 + width


@kernel
def _array(data, at):
    return _length(data, at, 0x90, 0x0F, 0, 0xDC, 0xDD)


@kernel
def _bytes(data, at, short, mask, width_1, width_2):
    """Start and end of text or bytes; both -1: another type."""
    length, start = _length(data, at, short, mask, width_1, width_2, 0)
    if length < 0 or start + length > len(data):
        return -1, -1
    return start, start + length


@kernel
def _count(data, at):
    """A number from 0 on, and where it ends; both -1: another type."""
    if at < 0 or at >= len(data):
        return -1, -1
    marker = data[at]
    if marker < 0x80:
        return np.int64(marker), at + 1
    width = 1 << (np.int64(marker) - 0xCC) if 0xCC <= marker <= 0xCF else 0
    if width == 0 or at + 1 + width > len(data):
        return -1, -1
    return _unsigned(data, at + 1, width), at + 1 + width  # negative: too large for 63 bits


@kernel
def read(data, version, fields, hashes):
    """Fill `fields` and `hashes` `[len(data) // 18, 2]` from a message; returns its number of changes, or ANOTHER_FORM.
    After another type `at` stays -1."""
    if len(data) == 0 or data[0] != version:
        return ANOTHER_FORM
    several, at = _array(data, 1)
    fields[EPOCH_START], at = _bytes(data, at, 0xA0, 0x1F, 0xD9, 0xDA)
    fields[EPOCH_END] = at
    fields[SEQ], at = _count(data, at)
    changes, at = _array(data, at)
    if several != 3 or at < 0 or fields[SEQ] < 0 or changes > MOST_CHANGES:
        return ANOTHER_FORM
    found = 0
    for change in range(changes):
        field = HEADER + change * CHANGE
        several, at = _array(data, at)
        fields[field + TIER_START], at = _bytes(data, at, 0xA0, 0x1F, 0xD9, 0xDA)
        fields[field + TIER_END] = at
        if several != 3 or not 0 <= at < len(data) or not 0xC2 <= data[at] <= 0xC3:
            return ANOTHER_FORM
        fields[field + REMOVED] = data[at] == 0xC3
        runs, at = _array(data, at + 1)
        fields[field + FIRST], digest = found, np.uint64(0)
        for _ in range(runs):
            several, at = _array(data, at)
            _, at = _bytes(data, at, 0, 0, 0xC4, 0xC5)
            count, at = _array(data, at)
            if several != 2 or at < 0 or at + count * BYTES_OF_HASH > len(data):
                return ANOTHER_FORM
            for _ in range(count):
                if data[at] != 0xC4 or data[at + 1] != 16:
                    return ANOTHER_FORM
                low = _word(data, at + 2)
                hashes[found, 0], hashes[found, 1] = low, _word(data, at + 10)
                digest ^= low
                found += 1
                at += BYTES_OF_HASH
        fields[field + END], fields[field + DIGEST] = found, np.int64(digest)
    return changes if at == len(data) else ANOTHER_FORM
