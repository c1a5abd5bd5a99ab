"""The tiers of a worker that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfleet.worker.port.engine_port import Hashed, TierPort
from kvfleet.worker.port.sequence_spec import Locate
from kvproto.block_hash import Root
from kvproto.messages import GenerateRequest, HotChain


class NoTiers(TierPort):
    @property
    def is_lending(self) -> bool:
        return False

    def meet(self, worker: str) -> None:
        return None

    def would_look(self, request: GenerateRequest, tokens: int) -> bool:
        return False

    def hash(self, request: GenerateRequest, root: Root, ids: tuple[int, ...]) -> Hashed:
        return {}

    def locate(
        self, request: GenerateRequest, root: Root, ids: tuple[int, ...], hashed: Hashed, traceparent: str
    ) -> Locate:
        return lambda choice: None

    async def in_vaults(self, root: Root, ids: Sequence[int]) -> int:
        return 0

    async def rates(self) -> Mapping[str, float]:
        return {}

    async def preload(self, chain: HotChain, limit_s: float) -> None: ...

    async def offer(self, chains: Sequence[HotChain]) -> None: ...

    async def settled(self) -> None: ...
