"""Where a fetch's blocks land, while the engine wants them. Apart from `fetching`, as the engine needs no sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvproto.dataplane.block import BlockHeader


@dataclass(slots=True)
class Landing:
    """One fetch's meeting point of engine and transfer threads. The engine closes it to have its blocks back at once:
    from then on nothing is written to them."""

    headers: list[BlockHeader | None]  # each is set when its block has landed
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    ended: bool = False  # the fetch brings no more
    failure: str = ""  # why it brought less than all of them: a metric's label
    sources: dict[int, str] = field(default_factory=dict)  # ids of the vaults or peers that blocks came from
    traceparent: str = ""  # of a traced request

    def land(self, at: int, header: BlockHeader, write: Callable[[], None]) -> bool:
        """Called by a transfer thread: `write` the block to its place, unless the landing is closed."""
        with self.lock:
            if self.closed:
                return False
            write()
            self.headers[at] = header
            return True

    def close(self) -> int:
        """Called by the engine. Returns how many blocks have landed without a gap."""
        with self.lock:
            self.closed = True
        return next((at for at, header in enumerate(self.headers) if header is None), len(self.headers))
