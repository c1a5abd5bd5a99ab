"""What this worker serves to its peers: blocks of its device and host, lent for as long as they are sent. Thread-safe.

Called on the connections' threads of the worker's own listener. The engine's side lends: it keeps blocks where they
are while they are lent, so there are only so many lendings at a time. Nothing is taken from peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfleet.worker.tiers.base import BlockName
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.dataplane.serving import BlockStore

LENDINGS = 4  # each of a listener's batch at most
LENDING_TIMEOUT_S = 0.5  # of a peer's connection for a lending to become free; then it is told that nothing is there


@dataclass(frozen=True, slots=True)
class LentBlock:
    """`payload` is raw, as in the pool."""

    name: BlockName
    payload: memoryview
    lossy: bool


class Lent(Protocol):
    """`blocks` are in the order asked for, None where one is not there. Their bytes stay as they are until `release`,
    which is called once, on any thread."""

    @property
    def blocks(self) -> Sequence[LentBlock | None]: ...

    def release(self) -> None: ...


class Lender(Protocol):
    """The engine's side. Called on connections' threads; both wait for the engine's thread for a short time at most,
    and then nothing is there."""

    def lend(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> Lent:
        """`exact`: lossy blocks are not there."""

    def holds(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]: ...


class PeerStore(BlockStore):
    """What the worker's DataPlaneServer serves."""

    def __init__(self, lender: Lender, kv_format: bytes) -> None:
        self._lender = lender
        self._format = kv_format
        self._free = threading.BoundedSemaphore(LENDINGS)

    def get(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> SealedLending:
        if not self._free.acquire(timeout=LENDING_TIMEOUT_S):
            return SealedLending([None] * len(hashes), _nothing)
        lent: Lent | None = None
        try:
            lent = self._lender.lend(root, hashes, exact)
            sealed = [None if block is None else self._sealed(block) for block in lent.blocks]
        except BaseException:
            if lent is not None:
                lent.release()
            self._free.release()
            raise
        return SealedLending(sealed, lambda: self._return(lent))

    def _return(self, lent: Lent) -> None:
        try:
            lent.release()
        finally:
            self._free.release()

    def _sealed(self, block: LentBlock) -> tuple[BlockHeader, memoryview]:
        payload = block.payload.cast("B")
        header = BlockHeader(*block.name[:4], self._format, BlockCodec.RAW, len(payload), len(payload), block.lossy)
        return header.sealed(payload), payload

    def has(self, root: bytes, hashes: Sequence[bytes], exact: bool) -> list[bool]:
        return self._lender.holds(root, hashes, exact)

    def reserve(self, header: BlockHeader) -> memoryview | None:
        return None

    def commit(self, header: BlockHeader, buffer: memoryview) -> bool:
        return False

    def abandon(self, header: BlockHeader, buffer: memoryview) -> None:
        pass

    def erase(self, root: bytes, hashes: Sequence[bytes]) -> int:
        return 0


class SealedLending:
    """What the listener sends; `release` gives it back."""

    def __init__(self, blocks: Sequence[tuple[BlockHeader, memoryview] | None], give_back: Callable[[], None]) -> None:
        self.blocks = blocks
        self._give_back = give_back

    def release(self) -> None:
        self._give_back()


def _nothing() -> None:
    pass
