"""The random number of a draw: a hash, so that it knows no state and no company. Pure."""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number of one draw, in [0, 1), a multiple of 2**-53."""
    raw = struct.pack("<QII", seed & (2**64 - 1), choice & (2**32 - 1), index & (2**32 - 1))
    return (int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 11) * 2.0**-53
