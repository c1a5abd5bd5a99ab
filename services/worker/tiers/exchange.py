"""What a worker exchanges with vaults and peers: the settings of it, and thread-safe counts."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from kvfleet.worker.tiers.block_codec import BlockShape
from kvproto.dataplane.block import BlockCodec
from kvproto.dataplane.client import DataPlaneClient
from kvproto.messages import Tier, TierLoad
from kvservice.distribution import Distribution

LOOK_LIMIT_S = 0.02
TIERS = (Tier.VAULT, Tier.PEER)
SNR_DB = (35.0, 38.0, 40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 48.0, 50.0, 60.0, 200.0)  # from the gate to no loss


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    worker: str
    host: str
    kv_format: bytes  # of the worker's pool, as is the shape
    shape: BlockShape
    codec: BlockCodec = BlockCodec.RAW  # of what it writes to vaults
    max_queued_bytes: int = 256 * 1024 * 1024  # for one vault
    look_limit_s: float = LOOK_LIMIT_S


@dataclass(eq=False, slots=True)
class RemoteCounts:
    snr_db: Distribution = field(default_factory=lambda: Distribution(SNR_DB))  # of blocks that were quantised
    quantised_raw_bytes: int = 0
    quantised_bytes: int = 0
    kept_raw: int = 0  # that would have lost too much, or held what is no number
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _offloaded: int = 0
    _failures: dict[Tier, Counter[str]] = field(default_factory=lambda: {tier: Counter() for tier in TIERS})
    _open: list[tuple[Tier, DataPlaneClient]] = field(default_factory=list)
    _received: Counter[Tier] = field(default_factory=Counter)  # over connections that have ended
    _sent: Counter[Tier] = field(default_factory=Counter)

    def offloaded(self, blocks: int) -> None:
        """Blocks that a vault did not have and has now."""
        with self._lock:
            self._offloaded += blocks

    def quantised(self, snr_db: float, raw_bytes: int, nbytes: int) -> None:
        with self._lock:
            self.snr_db.observe(snr_db)
            self.quantised_raw_bytes += raw_bytes
            self.quantised_bytes += nbytes

    def stayed_raw(self) -> None:
        with self._lock:
            self.kept_raw += 1

    def connected(self, tier: Tier, connection: DataPlaneClient) -> None:
        with self._lock:
            self._count_ended()
            self._open.append((tier, connection))

    def transfers(self) -> dict[Tier, tuple[int, int]]:
        """Bytes received and sent."""
        with self._lock:
            self._count_ended()
            received, sent = self._received.copy(), self._sent.copy()
            for tier, connection in self._open:
                received[tier] += connection.link.bytes_in
                sent[tier] += connection.link.bytes_out
            return {tier: (received[tier], sent[tier]) for tier in TIERS}

    def _count_ended(self) -> None:
        ended = [one for one in self._open if one[1].closed]
        self._open = [one for one in self._open if one not in ended]
        for tier, connection in ended:
            self._received[tier] += connection.link.bytes_in
            self._sent[tier] += connection.link.bytes_out

    def failed(self, tier: Tier, reason: str, count: int = 1) -> None:
        with self._lock:
            self._failures[tier][reason] += count

    @property
    def not_offloaded(self) -> int:
        """Blocks that were to be written to a vault, and were not."""
        with self._lock:
            reasons = self._failures[Tier.VAULT].items()
            return sum(count for reason, count in reasons if reason.startswith(("put_", "offload_")))

    def loads(self) -> dict[str, TierLoad]:
        with self._lock:
            return {
                tier.value: TierLoad(
                    offloaded_blocks_total=self._offloaded if tier is Tier.VAULT else 0,
                    failures_total=dict(self._failures[tier]),
                )
                for tier in TIERS
            }
