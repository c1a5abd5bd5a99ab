"""BLAKE2b with 16 bytes of digest, chained over blocks of at most 112 bytes, for Numba. Pure but for what it fills.

RFC 7693, section 3.2, and its names. One compression for each block: 16 bytes of parent, then the block.
"""

# mypy: ignore-errors
# Numba types these functions, by other rules than a checker's.
from __future__ import annotations

import numpy as np
from numba import njit

IV = np.array(
    [
        0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
        0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179,
    ],
    dtype=np.uint64,
)  # fmt: skip
SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ],
    dtype=np.uint8,
)
PARAMETERS = np.uint64(0x01010000 ^ 16)  # no key, fan-out and depth 1, 16 bytes of digest


@njit
def _rotated(word, count):
    return (word >> np.uint64(count)) | (word << np.uint64(64 - count))


@njit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = _rotated(d ^ a, 32)
    c = c + d
    b = _rotated(b ^ c, 24)
    a = a + b + y
    d = _rotated(d ^ a, 16)
    c = c + d
    b = _rotated(b ^ c, 63)
    return a, b, c, d


@njit
def chain(parent, blocks, out):
    """Fills `out` `[n, 2]` with the hashes of `blocks` `[n, words]`; `parent` `[2]` is the first one's."""
    words = blocks.shape[1]
    m = np.zeros(16, dtype=np.uint64)
    length = np.uint64(16 + 8 * words)
    low, high = parent[0], parent[1]
    for at in range(len(blocks)):
        m[0], m[1] = low, high
        for word in range(words):
            m[2 + word] = blocks[at, word]
        v0, v1, v2, v3 = IV[0] ^ PARAMETERS, IV[1], IV[2], IV[3]
        v4, v5, v6, v7 = IV[4], IV[5], IV[6], IV[7]
        v8, v9, v10, v11 = IV[0], IV[1], IV[2], IV[3]
        v12, v13, v14, v15 = IV[4] ^ length, IV[5], ~IV[6], IV[7]
        for turn in range(12):
            s = SIGMA[turn]
            v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[s[0]], m[s[1]])
            v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[s[2]], m[s[3]])
            v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[s[4]], m[s[5]])
            v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[s[6]], m[s[7]])
            v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[s[8]], m[s[9]])
            v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[s[10]], m[s[11]])
            v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[s[12]], m[s[13]])
            v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[s[14]], m[s[15]])
        low = IV[0] ^ PARAMETERS ^ v0 ^ v8
        high = IV[1] ^ v1 ^ v9
        out[at, 0], out[at, 1] = low, high
