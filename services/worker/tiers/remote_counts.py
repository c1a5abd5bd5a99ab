"""What vaults and peers were used for, by tier. Thread-safe; owns its numbers."""

from __future__ import annotations

import threading
from collections import Counter

from kvproto.messages import Tier, TierLoad

TIERS = (Tier.VAULT, Tier.PEER)


class RemoteCounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restores: Counter[Tier] = Counter()
        self._bytes: Counter[Tier] = Counter()
        self._seconds = dict.fromkeys(TIERS, 0.0)
        self._offloaded = 0
        self._failures: dict[Tier, Counter[str]] = {tier: Counter() for tier in TIERS}

    def restored(self, tier: Tier, nbytes: int, seconds: float) -> None:
        """A fetch ended that brought so much: raw bytes."""
        with self._lock:
            self._restores[tier] += 1
            self._bytes[tier] += nbytes
            self._seconds[tier] += seconds

    def offloaded(self, blocks: int) -> None:
        """Blocks that a vault did not have and has now."""
        with self._lock:
            self._offloaded += blocks

    def failed(self, tier: Tier, reason: str, count: int = 1) -> None:
        with self._lock:
            self._failures[tier][reason] += count

    @property
    def not_offloaded(self) -> int:
        """Blocks that were given to be written to a vault, and were not."""
        with self._lock:
            reasons = self._failures[Tier.VAULT].items()
            return sum(count for reason, count in reasons if reason.startswith(("put_", "offload_")))

    def loads(self) -> dict[str, TierLoad]:
        with self._lock:
            return {
                tier.value: TierLoad(
                    restores_total=self._restores[tier],
                    restored_bytes_total=self._bytes[tier],
                    restore_seconds_total=self._seconds[tier],
                    offloaded_blocks_total=self._offloaded if tier is Tier.VAULT else 0,
                    failures_total=dict(self._failures[tier]),
                )
                for tier in TIERS
            }
