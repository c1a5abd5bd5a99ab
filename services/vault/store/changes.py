"""What happened to a vault's blocks, as the fleet is told of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvproto.messages import BlockRun, Tier, TierEvents

BLOCKS_PER_EVENT = 16_000  # some 650 KB where no two follow one another: below what one NATS message takes


class StoredChange(NamedTuple):
    removed: bool
    parent: bytes
    hash: bytes


def net(changes: Iterable[StoredChange]) -> list[StoredChange]:
    """What is different after all of them: a block that came and went meanwhile is not told of. Removals first.

    Of one block, stored and removed take turns.
    """
    first: dict[bytes, bool] = {}
    last: dict[bytes, StoredChange] = {}
    for change in changes:
        first.setdefault(change.hash, change.removed)
        last.pop(change.hash, None)  # its place is that of its last change
        last[change.hash] = change
    different = [change for change in last.values() if change.removed == first[change.hash]]
    return sorted(different, key=lambda change: not change.removed)  # stable


def pieces(changes: Sequence[StoredChange], size: int = BLOCKS_PER_EVENT) -> Iterator[Sequence[StoredChange]]:
    return (changes[start : start + size] for start in range(0, len(changes), size))


def tier_events(changes: Iterable[StoredChange]) -> list[TierEvents]:
    """In their order; blocks that follow one another make one run."""
    events: list[TierEvents] = []
    runs: list[tuple[bytes, list[bytes]]] = []
    removed = False

    def close() -> None:
        if runs:
            told = tuple(BlockRun(parent, tuple(hashes)) for parent, hashes in runs)
            events.append(TierEvents(Tier.VAULT, removed, told))
            runs.clear()

    for change in changes:
        if change.removed != removed:
            close()
            removed = change.removed
        if removed:  # as workers write it: one run without a parent
            if runs:
                runs[0][1].append(change.hash)
            else:
                runs.append((b"", [change.hash]))
        elif runs and runs[-1][1][-1] == change.parent:
            runs[-1][1].append(change.hash)
        else:
            runs.append((change.parent, [change.hash]))
    close()
    return events
