"""Block events as the index takes them: arrays of hashes instead of objects, a million operations a second. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvproto import codec
from kvproto.errors import CodecError
from kvproto.messages import Tier
from services.placement.index.prefix_index import Hashes, pack

TIERS: tuple[Tier, ...] = tuple(Tier)  # fastest first; the index numbers them so
_NUMBER = {tier.value: number for number, tier in enumerate(TIERS)}


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks stored in a tier, or removed from it, in their order: `[n, 2]` hashes."""

    tier: int
    removed: bool
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Changes:
    """One event. `digest` is the XOR of the first 8 bytes of all its hashes, as `block_hash.digest_term` has it."""

    epoch: str
    seq: int
    changes: tuple[Change, ...]
    digest: int


def read_changes(data: bytes) -> Changes:
    """What `codec.decode_events` reads, without the parents. Raises CodecError."""
    epoch, seq, rows = codec.open_events(data)
    found, digest = [], 0
    try:
        for tier, removed, runs in rows:
            if type(removed) is not bool:
                raise CodecError("wrong type", field="events.removed")
            hashes = runs[0][1] if len(runs) == 1 else [one for _, several in runs for one in several]
            packed = pack(hashes)
            if len(packed):
                digest ^= int(np.bitwise_xor.reduce(packed[:, 0]))
            found.append(Change(_NUMBER[tier], removed, packed))
    except (TypeError, ValueError, KeyError, IndexError):
        raise CodecError("wrong shape", field="events") from None
    return Changes(epoch, seq, tuple(found), digest)
