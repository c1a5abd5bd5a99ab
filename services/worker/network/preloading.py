"""Loop: a new worker brings prefixes that placement names to its device before it says that it is ready.

They are fetched like restores, one chain after the other, for a bounded time. A failure does not keep it from ready.
"""

from __future__ import annotations

import asyncio
import logging

from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.network.tier_network import Meet
from kvproto import codec
from kvproto.block_hash import HASH_BYTES, ForkedRoot, Root
from kvproto.connection import Connection
from kvproto.errors import KvfleetError
from kvproto.messages import HotChain, PreloadPlan, PreloadRequest, Tier, WorkerRecord
from kvproto.subjects import Subjects

log = logging.getLogger(__name__)

ASK_S = 1.0
POLL_S = 0.01
CHAIN_S = 5.0  # for one chain


async def preload(
    connection: Connection,
    subjects: Subjects,
    thread: EngineThread,
    me: WorkerRecord,
    blocks: int,
    limit_s: float,
    meet: Meet = lambda worker: None,
) -> int:
    """Bring at most `blocks` within `limit_s`. Returns how many came. Raises EngineFailure."""
    if not blocks or limit_s <= 0:
        return 0
    ask = PreloadRequest(me.id, me.model, me.model_revision, me.block_size, blocks)
    try:
        answer = await connection.request(subjects.placement_preload(), codec.encode(ask), timeout_s=ASK_S)
        plan = codec.decode(PreloadPlan, answer.data)
    except (KvfleetError, TimeoutError) as error:
        log.info("nothing is preloaded: %s", error or "placement does not answer")
        return 0
    before = await thread.call(lambda engine: engine.pool.index.addressed)
    end = asyncio.get_running_loop().time() + limit_s
    for chain in plan.chains:
        left = end - asyncio.get_running_loop().time()
        if left <= 0:
            break
        if (meeting := meet(chain.source)) is not None:
            await meeting
        await _bring(thread, chain, min(left, CHAIN_S))
    came = await thread.call(lambda engine: engine.pool.index.addressed) - before
    log.info("preloaded %d blocks of %d prefixes that %s named", came, len(plan.chains), plan.placement)
    return came


def read_chain(chain: HotChain) -> tuple[Root, list[bytes], int]:
    root: Root = chain.root
    if chain.public_blocks:
        root = ForkedRoot(chain.public_root, chain.root, chain.public_blocks)
    raw = chain.hashes
    hashes = [raw[at : at + HASH_BYTES] for at in range(0, len(raw) - len(raw) % HASH_BYTES, HASH_BYTES)]
    return root, hashes, len(hashes)


async def _bring(thread: EngineThread, chain: HotChain, limit_s: float) -> None:
    root, hashes, _ = read_chain(chain)
    tier = Tier.PEER if chain.source else Tier.VAULT
    await thread.call(lambda engine: engine.tiers.restorer.preload(root, hashes, tier, chain.source, limit_s))
    while await thread.call(lambda engine: engine.tiers.restorer.preloading):
        await asyncio.sleep(POLL_S)
