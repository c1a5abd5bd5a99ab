"""Loop: prefixes in demand, which placement names, hottest first. Owned by the worker's event loop.

A new worker brings them to its device before it says that it is ready: like restores, one chain after the other. One
that goes leaves those that only it has to vaults. Both take a bounded time; what cannot be had keeps neither.
"""

from __future__ import annotations

import asyncio
import logging

from kvfleet.worker.serve.worker_parts import WorkerParts
from kvproto import codec
from kvproto.block_hash import HASH_BYTES
from kvproto.errors import KvfleetError
from kvproto.messages import PreloadPlan, PreloadRequest, Tier

log = logging.getLogger(__name__)

PRELOADED_SHARE = 2  # at most one in so many of the device's blocks
ASK_S = 1.0
CHAIN_S = 5.0  # for one chain to come
POLL_S = 0.01
LEAST_S = 0.3  # with less time left, placement is not asked what to leave
ANNOUNCED_S = 0.1  # by then other workers that drain at the same time have said so
MOST_CHAINS = 512


async def preload(parts: WorkerParts) -> None:
    """Raises EngineFailure."""
    blocks, limit_s = parts.record.blocks // PRELOADED_SHARE, parts.settings.preload_s
    if not blocks or limit_s <= 0:
        return
    try:
        plan = await _ask(parts, blocks)
    except (KvfleetError, TimeoutError) as error:
        log.info("nothing is preloaded: %s", error or "placement does not answer")
        return
    before = await _addressed(parts)
    end = asyncio.get_running_loop().time() + limit_s
    for hot in plan.chains:
        left = end - asyncio.get_running_loop().time()
        if left <= 0:
            break
        await parts.tiers.preload(hot, min(left, CHAIN_S))
    came = await _addressed(parts) - before
    log.info("preloaded %d blocks of %d prefixes that %s named", came, len(plan.chains), plan.placement)


async def leave_behind(parts: WorkerParts, limit_s: float) -> None:
    """Returns when vaults have them, after `limit_s` at the latest. Never raises. Where all workers go at once, nothing
    is left."""
    if limit_s < LEAST_S:
        return
    try:
        async with asyncio.timeout(limit_s):
            while parts.somebody_is_ready(()) is None:
                await asyncio.sleep(POLL_S)
            if not parts.somebody_is_ready(()):
                return
            await asyncio.sleep(ANNOUNCED_S)
            rates = await parts.tiers.rates()
            if parts.somebody_is_ready(()) and Tier.VAULT.value in rates:
                await _leave(parts)
    except TimeoutError:
        log.warning("not all blocks in demand are in vaults: the time to drain is over")
    except KvfleetError as error:
        log.warning("blocks in demand are not left behind: %s", error)


async def _ask(parts: WorkerParts, blocks: int, *, leaving: bool = False) -> PreloadPlan:
    me = parts.record
    ask = PreloadRequest(me.id, me.model, me.model_revision, me.block_size, blocks, leaving=leaving)
    answer = await parts.connection.request(parts.subjects.placement_preload(), codec.encode(ask), ASK_S)
    return codec.decode(PreloadPlan, answer.data)


async def _leave(parts: WorkerParts) -> None:
    blocks = await _addressed(parts)
    plan = await _ask(parts, max(blocks, 1), leaving=True)
    chains = [hot for hot in plan.chains[:MOST_CHAINS] if hot.source == parts.record.id]
    if not chains:
        return
    await parts.tiers.offer(chains)
    offered = sum(len(hot.hashes) // HASH_BYTES for hot in chains)
    log.info("%d blocks of %d prefixes in demand were left to vaults", offered, len(chains))


async def _addressed(parts: WorkerParts) -> int:
    held, _ = await parts.engine.holdings()
    return len(held[Tier.DEVICE])
