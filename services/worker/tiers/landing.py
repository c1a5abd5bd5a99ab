"""Where a fetch's blocks land. The engine's thread decides and never waits; transfer threads carry out.

Bytes of a restore land in device blocks that only the restore holds, and only while its `Landing` is open, so the
engine can give up at any time and have its blocks back at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto.dataplane.block import BlockHeader


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
