"""Remote tiers in memory: what a vault and a peer would have, with every fault that they may have."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvfleet.worker.blocks.chain_location import BlockName, Finding
from kvfleet.worker.tiers.host import Landing
from kvfleet.worker.tiers.link_speed import LinkSpeed
from kvproto.dataplane.block import BlockCodec, BlockHeader
from kvproto.messages import Tier, TierLoad


@dataclass
class Faults:
    """Chances, per call or block."""

    lost: float = 0.0  # a block that was found is not there any more
    stall: float = 0.0
    stall_s: float = 0.005
    unready: float = 0.0  # a look that is never answered
    refuses: float = 0.0
    lossy: float = 0.0


class MemoryRemote:
    def __init__(self, block_bytes: int, seed: int = 0, faults: Faults | None = None) -> None:
        self.kept: dict[Tier, dict[bytes, tuple[BlockName, bytes, bool]]] = {Tier.VAULT: {}, Tier.PEER: {}}
        self.block_bytes = block_bytes
        self.bytes_per_s = 1e9
        self.fetched = 0
        self.losses = 0
        self.distrusted: list[str] = []
        self._chance = random.Random(seed)
        self._faults = faults or Faults()
        self._pool = ThreadPoolExecutor(2)
        self._lock = threading.Lock()

    def close(self) -> None:
        self._pool.shutdown()

    def _happens(self, chance: float) -> bool:
        with self._lock:
            return self._chance.random() < chance

    def look(
        self,
        names: Sequence[BlockName],
        *,
        exact: bool,
        peer: str,
        on_ready: Callable[[], None],
        limit_s: float | None = None,
        traceparent: str = "",
        vaults: bool = True,
    ) -> Finding:
        finding = Finding()
        if self._happens(self._faults.unready):
            return finding

        def answer() -> None:
            finding.vault = self._depth(Tier.VAULT, names, exact) if vaults else 0
            finding.peer = self._depth(Tier.PEER, names, exact) if peer else 0
            finding.vault_states = self._states(Tier.VAULT, names, exact) if vaults else ()
            finding.peer_states = self._states(Tier.PEER, names, exact) if peer else ()
            finding.ready = True
            on_ready()

        self._pool.submit(answer)
        return finding

    def _depth(self, tier: Tier, names: Sequence[BlockName], exact: bool) -> int:
        kept = self.kept[tier]
        for at, name in enumerate(names):
            found = kept.get(name.hash)
            if found is None or found[0].root != name.root or (exact and found[2]):
                return at
        return len(names)

    def _states(self, tier: Tier, names: Sequence[BlockName], exact: bool) -> tuple[int, ...]:
        return tuple(at for at, name in enumerate(names, 1) if self._depth(tier, [name.state()], exact))

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
        def bring() -> None:
            for at, (name, target) in enumerate(zip(names, targets, strict=True)):
                if self._happens(self._faults.stall):
                    time.sleep(self._faults.stall_s)
                found = self.kept[tier].get(name.hash)
                if found is None or self._happens(self._faults.lost):
                    landing.failure = "missing"
                    break
                name, payload, lossy = found
                assert len(payload) == len(target)
                header = BlockHeader(*name[:4], bytes(16), BlockCodec.RAW, len(payload), len(payload), lossy)

                def write(target: memoryview = target, payload: bytes = payload) -> None:
                    target[:] = payload

                if not landing.land(at, header, write):
                    break
                landing.sources[at] = f"{tier.value}1"
                self.fetched += 1
            landing.ended = True
            on_progress()

        self._pool.submit(bring)

    def offload(self, name: BlockName, payload: memoryview, *, lossy: bool, on_done: Callable[[], None]) -> bool:
        if self._happens(self._faults.refuses):
            return False

        def put() -> None:
            if self._happens(self._faults.stall):
                time.sleep(0.01)
            quantised = lossy or self._happens(self._faults.lossy)
            self.kept[Tier.VAULT].setdefault(name.hash, (name, bytes(payload), quantised))
            on_done()

        self._pool.submit(put)
        return True

    def erase(self, names: Sequence[BlockName]) -> None:
        for name in (*names, *(name.state() for name in names)):
            self.kept[Tier.VAULT].pop(name.hash, None)

    def speed(self, tier: Tier) -> LinkSpeed | None:
        return LinkSpeed(0.0001, self.bytes_per_s)

    def distrust(self, source: str) -> None:
        self.distrusted.append(source)

    def loads(self) -> dict[str, TierLoad]:
        return {}


class Unaddressed:
    """A device's memory that the host can only copy from and to, as a GPU's is."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def view(self, block: int) -> None:
        return None
