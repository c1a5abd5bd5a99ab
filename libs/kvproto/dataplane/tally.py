"""What a listener counts. The `Tally` is shared by its threads; readers take a frozen `DataPlaneCounters`."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DataPlaneCounters:
    """Since the start, apart from `open_connections`, which are those authenticated now."""

    connections: int = 0  # authenticated
    open_connections: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)  # handshakes, by reason
    bytes_in: int = 0
    bytes_out: int = 0
    blocks_served: int = 0
    blocks_stored: int = 0
    checksum_failures: int = 0
    malformed: int = 0  # connections ended for what came over them after authentication
    timeouts: int = 0  # connections ended in the middle of a request
    store_failures: int = 0  # exceptions of the store


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        """By the names of `DataPlaneCounters`."""
        with self._lock:
            self._counts.update(counts)

    def refuse(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def read(self) -> DataPlaneCounters:
        with self._lock:
            return DataPlaneCounters(**self._counts, refused=dict(self._refused))
