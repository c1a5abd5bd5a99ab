"""What vaults and peers were used for, by tier. Thread-safe; owns its numbers."""

from __future__ import annotations

import threading
from collections import Counter

from kvproto.dataplane.client import DataPlaneClient
from kvproto.messages import Tier, TierLoad
from kvservice.distribution import Distribution

TIERS = (Tier.VAULT, Tier.PEER)
SNR_DB = (35.0, 38.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 48.0, 50.0, 60.0, 200.0)  # from the gate to no loss


class RemoteCounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._restores: Counter[Tier] = Counter()
        self._bytes: Counter[Tier] = Counter()
        self._seconds = dict.fromkeys(TIERS, 0.0)
        self._offloaded = 0
        self._failures: dict[Tier, Counter[str]] = {tier: Counter() for tier in TIERS}
        self._open: list[tuple[Tier, DataPlaneClient]] = []
        self._received: Counter[Tier] = Counter()  # over connections that have ended
        self._sent: Counter[Tier] = Counter()
        self.snr_db = Distribution(SNR_DB)  # of blocks that were quantised
        self.quantised_raw_bytes = 0
        self.quantised_bytes = 0
        self.kept_raw = 0  # that were to be quantised, and would have lost too much

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

    def quantised(self, snr_db: float, raw_bytes: int, nbytes: int) -> None:
        """A block was encoded as it was meant to be."""
        with self._lock:
            self.snr_db.observe(snr_db)
            self.quantised_raw_bytes += raw_bytes
            self.quantised_bytes += nbytes

    def stayed_raw(self) -> None:
        """A block was to be quantised and its noise would have been above the gate, or it holds what is no number."""
        with self._lock:
            self.kept_raw += 1

    def connected(self, tier: Tier, connection: DataPlaneClient) -> None:
        """This worker made a connection."""
        with self._lock:
            self._count_ended()
            self._open.append((tier, connection))

    def transfers(self) -> dict[Tier, tuple[int, int]]:
        """Bytes received and sent over connections that this worker made, whatever they said."""
        with self._lock:
            self._count_ended()
            received, sent = self._received.copy(), self._sent.copy()
            for tier, connection in self._open:
                received[tier] += connection.link.bytes_in
                sent[tier] += connection.link.bytes_out
            return {tier: (received[tier], sent[tier]) for tier in TIERS}

    def _count_ended(self) -> None:
        open_ones = []
        for tier, connection in self._open:
            if connection.closed:
                self._received[tier] += connection.link.bytes_in
                self._sent[tier] += connection.link.bytes_out
            else:
                open_ones.append((tier, connection))
        self._open = open_ones

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
