"""What a listener tells of a request that carries a trace context. Plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One Get or Has, served or failed. Times are of `time.time_ns()`; `client` is the asker's identity."""

    kind: str  # "get", "has"
    traceparent: str
    client: str
    began_ns: int
    ended_ns: int
    blocks: int  # asked for
    hits: int
    nbytes: int  # of blocks sent
    from_disk: int  # of the hits, those that memory did not have
    error: str = ""


OnTraced = Callable[[TracedRequest], None]
