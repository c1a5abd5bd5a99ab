"""Loop: what a worker that goes leaves behind: the blocks in demand that nobody else has, for vaults to keep.

    handed over ──▶ placement names the prefixes that only this worker has, hottest first ──▶ device ─▶ host ─▶ vaults

For what is left of the time to drain, at most. Only if somebody stays: where all go at once nobody will ask for them.
"""

from __future__ import annotations

import asyncio
import logging

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.network.preloading import read_chain
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.tiers.offloader import Chain
from kvproto import codec
from kvproto.errors import KvfleetError
from kvproto.messages import PreloadPlan, PreloadRequest, Tier

log = logging.getLogger(__name__)

ANNOUNCED_S = 0.1  # after which those who go at the same time have said so
LEAST_S = 0.3  # less than that is not worth the question
ASK_S = 1.0
POLL_S = 0.02
MOST_CHAINS = 512


async def leave_demand_behind(parts: WorkerParts, limit_s: float) -> None:
    """Returns when vaults have what they take of it, after `limit_s` at the latest. Never raises."""
    has_successor = parts.neighbours.has_successor
    if limit_s < LEAST_S:
        return
    try:
        async with asyncio.timeout(limit_s):
            while has_successor() is None:
                await asyncio.sleep(POLL_S)
            if not has_successor():
                return
            await asyncio.sleep(ANNOUNCED_S)
            if has_successor() and await parts.engine.call(_has_vaults):
                await _leave_behind(parts)
    except TimeoutError:
        log.warning("not all blocks in demand are in vaults: the time to drain is over")
    except KvfleetError as error:
        log.warning("blocks in demand are not left behind: %s", error)


async def _leave_behind(parts: WorkerParts) -> None:
    me, engine = parts.record, parts.engine
    blocks = await engine.call(lambda engine: engine.pool.addressed)
    ask = PreloadRequest(me.id, me.model, me.model_revision, me.block_size, max(blocks, 1), leaving=True)
    answer = await parts.connection.request(parts.subjects.placement_preload(), codec.encode(ask), ASK_S)
    plan = codec.decode(PreloadPlan, answer.data)
    chains = [Chain(*read_chain(one)) for one in plan.chains[:MOST_CHAINS] if one.source == me.id]
    if not chains:
        return
    await engine.call(lambda engine: _offer(engine, chains))
    while not await engine.call(lambda engine: engine.is_settled):
        await asyncio.sleep(POLL_S)
    offered = sum(chain.end for chain in chains)
    log.info("%d blocks of %d prefixes in demand were left to vaults", offered, len(chains))


def _has_vaults(engine: Engine) -> bool:
    remote = engine.tiers.remote if engine.tiers is not None else None
    return remote is not None and remote.speed(Tier.VAULT) is not None


def _offer(engine: Engine, chains: list[Chain]) -> None:
    """On the engine's thread."""
    if engine.tiers is not None and engine.tiers.offloader is not None:
        for chain in chains:
            engine.tiers.offloader.offer_chain(chain)
