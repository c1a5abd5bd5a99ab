"""Loop: the tiers below and beside the own engine, as the worker's loop knows them. Owned by its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.network.tier_network import TierNetwork
from kvfleet.worker.tiers.looking_tiers import LookingTiers, blocks_of
from kvfleet.worker.tiers.offloader import Chain
from kvfleet.worker.tiers.remote import RemoteTiers
from kvproto.messages import HotChain, Tier

PRELOAD_POLL_S = 0.01
SETTLED_POLL_S = 0.02


@dataclass(eq=False, slots=True)
class EngineTiers(LookingTiers):
    """`network` None: no vaults and no peers."""

    thread: EngineThread
    network: TierNetwork | None
    block_size: int
    fleet_key: bytes

    @property
    def remote(self) -> RemoteTiers | None:
        return None if self.network is None else self.network.remote

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.thread.measured[1].prefill_tokens_per_s

    def wake(self) -> None:
        self.thread.wake()

    @property
    def lends(self) -> bool:
        return self.remote is not None

    @property
    def is_lending(self) -> bool:
        return bool(self.thread.engine.tiers.lent)

    def meet(self, worker: str) -> Awaitable[None] | None:
        return None if self.network is None else self.network.meet(worker)

    async def rates(self) -> Mapping[str, float]:
        return await self.thread.call(lambda engine: engine.tiers.rates())

    async def preload(self, chain: HotChain, limit_s: float) -> None:
        if (meeting := self.meet(chain.source)) is not None:
            await meeting
        hot, tier = _chain(chain), Tier.PEER if chain.source else Tier.VAULT
        await self.thread.call(
            lambda engine: engine.tiers.restorer.preload(hot.root, hot.hashes, tier, chain.source, limit_s)
        )
        while await self.thread.call(lambda engine: engine.tiers.restorer.brings(hot.hashes)):
            await asyncio.sleep(PRELOAD_POLL_S)

    async def offer(self, chains: Sequence[HotChain]) -> None:
        def offer(engine: Engine) -> None:
            for one in chains:
                engine.tiers.offloader.offer_chain(_chain(one))

        await self.thread.call(offer)
        await self.settled()

    async def leaves_soon(self) -> bool:
        kv = self.thread.engine.kv
        return kv.states is None or await self.thread.call(lambda _: kv.leave_soon())

    async def settled(self) -> None:
        while not await self.thread.call(lambda engine: engine.tiers.is_settled):
            await asyncio.sleep(SETTLED_POLL_S)


def _chain(hot: HotChain) -> Chain:
    root, hashes = blocks_of(hot)
    return Chain(root, hashes, len(hashes))
