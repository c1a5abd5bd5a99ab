"""Block events as the index takes them: arrays of hashes instead of objects, a million operations a second. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfleet.placement.index import reading
from kvfleet.placement.index.prefix_index import Hashes, pack
from kvproto import codec
from kvproto.block_hash import in_tier
from kvproto.errors import CodecError
from kvproto.messages import Tier

TIERS = (Tier.DEVICE, Tier.HOST, Tier.VAULT)  # fastest first; the index numbers them so
STATE = Tier.STATE.number  # no tier of the index
_NUMBER = {tier.value: tier.number for tier in (*TIERS, Tier.STATE)}
_FIELDS = reading.HEADER + reading.MOST_CHANGES * reading.CHANGE
_U64 = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(frozen=True, slots=True)
class HolderChange:
    """Blocks stored in a tier, or removed from it, in their order: `[n, 2]` hashes. STATE: those with a snapshot."""

    tier: int
    removed: bool
    hashes: Hashes


@dataclass(frozen=True, slots=True)
class Changes:
    """One event. `digest` is the XOR of the first 8 bytes of its hashes; `tier_digest` mixes each one's tier in."""

    epoch: str
    seq: int
    changes: tuple[HolderChange, ...]
    digest: int
    tier_digest: int = 0


def read_changes(data: bytes) -> Changes:
    """Read what `codec.encode_events` writes, without the parents. Raises CodecError."""
    return (_read_usual(data) if len(data) <= codec.MAX_MESSAGE_BYTES else None) or _read_any(data)


def _read_usual(data: bytes) -> Changes | None:
    """Read the form that our workers write; None for any other."""
    fields = np.empty(_FIELDS, dtype=np.int64)
    hashes: Hashes = np.empty((len(data) // reading.BYTES_OF_HASH, 2), dtype=np.uint64)
    count = reading.read(np.frombuffer(data, dtype=np.uint8), codec.MIN_VERSION, fields, hashes)
    if count == reading.ANOTHER_FORM:
        return None
    epoch_start, epoch_end, seq, *rest = fields[: reading.HEADER + count * reading.CHANGE].tolist()
    changes, digest, tier_digest = [], 0, 0
    try:
        for at in range(0, len(rest), reading.CHANGE):
            tier_start, tier_end, removed, first, end, term = rest[at : at + reading.CHANGE]
            tier = _NUMBER[data[tier_start:tier_end].decode()]
            changes.append(HolderChange(tier, bool(removed), hashes[first:end]))
            digest ^= term
            tier_digest ^= in_tier(term & _U64, tier)
        return Changes(data[epoch_start:epoch_end].decode(), seq, tuple(changes), digest & _U64, tier_digest)
    except (KeyError, UnicodeDecodeError):
        return None  # the other reader raises the proper error


def _read_any(data: bytes) -> Changes:
    epoch, seq, rows = codec.open_events(data)
    found, digest, tier_digest = [], 0, 0
    try:
        for tier, removed, runs in rows:
            if type(removed) is not bool:
                raise CodecError("wrong type", field="events.removed")
            packed = pack([one for _, several in runs for one in several])
            found.append(HolderChange(_NUMBER[tier], removed, packed))
            digest ^= digest_of(packed)
            tier_digest ^= in_tier(digest_of(packed), _NUMBER[tier])
    except (TypeError, ValueError, KeyError, IndexError):
        raise CodecError("wrong shape", field="events") from None
    return Changes(epoch, seq, tuple(found), digest, tier_digest)


def digest_of(hashes: Hashes) -> int:
    return int(np.bitwise_xor.reduce(hashes[:, 0])) if len(hashes) else 0
