"""What a vault's store counts, and the reasons it gives. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

REFUSALS = (
    "not_genuine",  # the hash is not that of these tokens
    "malformed",  # sizes that cannot be
    "too_large",  # for the whole memory
    "no_room",  # all is being sent or received
    "held",  # already here, no worse
    "erased",  # while its bytes arrived
)
MISSES = (
    "absent",
    "wrong_root",  # here, but another root's
    "lossy",  # here, but an exact one was asked for
    "no_room",  # on disk, and no memory to read it to
    "unreadable",  # on disk, and damaged there or gone just now
)


@dataclass(slots=True)
class StoreCounters:
    """Written under the store's lock, read by those who show them."""

    stored_total: int = 0
    stored_bytes_total: int = 0
    replaced_total: int = 0  # lossy blocks by exact ones
    abandoned_total: int = 0  # reserved, and their bytes did not come or were wrong
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REFUSALS, 0))
    hits_total: int = 0
    hit_bytes_total: int = 0
    disk_hits_total: int = 0  # of the hits
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    damaged_total: int = 0  # blocks whose bytes memory did not keep
    erased_total: int = 0
    evictions_total: int = 0  # from memory
    dropped_total: int = 0  # of them, those that should have been on disk and were not
    spilled_total: int = 0  # written to disk
    disk_evictions_total: int = 0
