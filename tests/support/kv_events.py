"""Block events as messages: the plain reader, against which placement's quick one (`read_changes`) is tested."""

from __future__ import annotations

from kvproto.codec import open_events
from kvproto.errors import CodecError
from kvproto.messages import BlockRun, KvEvents, Tier, TierEvents
from kvproto.schema import enum_reader

_TIER = enum_reader(Tier)


def decode_events(data: bytes) -> KvEvents:
    """Inverse of `codec.encode_events`. Raises CodecError."""
    epoch, seq, changes = open_events(data)
    try:
        out = []
        for tier, removed, runs in changes:
            if type(removed) is not bool:
                raise CodecError("wrong type", field="events.removed")
            read = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in runs)
            for run in read:
                if type(run.parent) is not bytes or any(type(h) is not bytes or len(h) != 16 for h in run.hashes):
                    raise CodecError("hashes are 16 bytes", field="events.hashes")
            out.append(TierEvents(_TIER(tier, "events.tier"), removed, read))
    except (TypeError, ValueError, KeyError):
        raise CodecError("wrong shape", field="events") from None
    return KvEvents(epoch, seq, tuple(out))
