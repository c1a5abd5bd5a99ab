"""What the engine's side of tiers and the network's side of them say to each other. Plain values and one seam.

The engine's thread decides and never waits; transfer threads carry out. Bytes of a restore land in device blocks that
only the restore holds, and only while its `Landing` is open, so the engine can give up at any time and have its blocks
back at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvfleet.worker.blocks.chain_location import BlockName, Finding
from kvfleet.worker.tiers.speed import LinkSpeed
from kvproto.dataplane.block import BlockHeader
from kvproto.messages import Tier, TierLoad

__all__ = ["BlockName", "Finding", "Landing", "LinkSpeed", "Remote"]


@dataclass(slots=True)
class Landing:
    """One fetch's meeting point of engine and transfer threads.

    `headers[i]` is set when block i has landed. A landing that is closed takes nothing any more. `ended` is set once
    the fetch will bring no more, closed or not; `failure` is its reason where it brought less than asked for.
    """

    headers: list[BlockHeader | None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    ended: bool = False
    failure: str = ""  # timeout, gone, checksum, format, missing, ... : a metric's label
    sources: dict[int, str] = field(default_factory=dict)  # ids of the vaults or peers that blocks came from
    traceparent: str = ""  # of a traced request

    def land(self, at: int, header: BlockHeader, write: Callable[[], None]) -> bool:
        """Called by a transfer thread: `write` the block to its place, unless nobody wants it any more."""
        with self.lock:
            if self.closed:
                return False
            write()
            self.headers[at] = header
            return True

    def close(self) -> int:
        """Called by the engine: how many blocks have landed without a gap; from now on nothing lands."""
        with self.lock:
            self.closed = True
        return next((at for at, header in enumerate(self.headers) if header is None), len(self.headers))


class Remote(Protocol):
    """Vaults and peers as the engine's thread sees them. Thread-safe; no call waits for a network or a disk.

    Callbacks run on transfer threads: they hand over to the engine's thread and return.
    """

    def look(
        self,
        names: Sequence[BlockName],
        *,
        exact: bool,
        peer: str,
        on_ready: Callable[[], None],
        limit_s: float | None = None,
        traceparent: str = "",
    ) -> Finding:
        """Ask all vaults concerned, and `peer` if it is not "", what they have of a chain's rest. The finding is
        ready, with what is known by then, after at most `limit_s`, by default LOOK_LIMIT_S."""

    def fetch(
        self,
        tier: Tier,
        names: Sequence[BlockName],
        targets: Sequence[memoryview],
        landing: Landing,
        *,
        exact: bool,
        peer: str,
        on_progress: Callable[[], None],
    ) -> None:
        """Bring blocks to `targets` (raw pool bytes, writable), in order as far as that is possible. `on_progress` is
        called when the fetch has ended, at least. What fails is data in `landing`, never an exception."""

    def offload(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        """Write-behind to the vault that keeps this block, unless it has it. `payload` must stay as it is until
        `on_done`, which is called in any case. False, and nothing happens, if the queue is full or there is no
        vault."""

    @property
    def losses(self) -> int:
        """Grows whenever vaults may not have what they were given: a vault came, went or began anew, or blocks did not
        get through to one."""

    def erase(self, names: Sequence[BlockName]) -> None:
        """Have vaults forget these blocks, those excepted that others continue; also what waits to be offloaded."""

    def speed(self, tier: Tier) -> LinkSpeed | None:
        """Of VAULT or PEER; None until measured, and while there is nobody to ask."""

    def introduce(self, source: str, addresses: Sequence[str]) -> None:
        """A worker of another region, called `<region>.<id>`: it can be named as `peer` from now on, and its link is
        being measured."""

    def speed_of(self, source: str) -> LinkSpeed | None:
        """Of one that was introduced; None until measured."""

    def distrust(self, source: str) -> None:
        """A block that came from this vault or peer was wrong although its checksum was right."""

    def loads(self) -> dict[str, TierLoad]:
        """By tier: restores, bytes, seconds, failures, offloads."""
