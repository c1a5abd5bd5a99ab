"""Loop: brings blocks from a vault to the host tier of a vLLM worker. On the worker's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvfleet.worker.blocks.chain_location import BlockName, ChainLocation, Finding
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.tiers import break_even
from kvfleet.worker.tiers.break_even import RestoredPart
from kvfleet.worker.tiers.host import HostTier, Landing
from kvfleet.worker.tiers.remote import RemoteTiers
from kvproto.block_hash import Root, unpack_ids
from kvproto.messages import Tier

log = logging.getLogger(__name__)

POLL_S = 0.002


async def found_of(location: ChainLocation) -> Finding:
    """What vaults and a peer have of a chain, as far as they have said so in time."""
    clock = asyncio.get_running_loop().time
    until = clock() + break_even.answer_limit_s(location)
    while not location.finding.ready and clock() < until:
        await asyncio.sleep(POLL_S)
    location.finding.ready = True  # later answers are not waited for
    return location.finding


async def landed(
    links: RemoteTiers,
    tier: Tier,
    names: Sequence[BlockName],
    targets: Sequence[memoryview],
    location: ChainLocation,
    limit_s: float,
    *,
    exact: bool,
    block_s: float = 0.0,
) -> Landing:
    """What came in time. It is closed. A late one goes on while blocks come well before they were computed, in
    `block_s` each."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    landing = Landing([None] * len(names), traceparent=location.traceparent)
    peer = location.peer if tier is Tier.PEER else ""
    links.fetch(tier, names, targets, landing, exact=exact, peer=peer, on_progress=partial(soon, loop, ended.set))
    began = loop.time()
    try:
        while True:
            try:
                async with asyncio.timeout(limit_s):
                    await ended.wait()
                break
            except TimeoutError:
                arrived = sum(header is not None for header in landing.headers)
                missing, elapsed = len(names) - arrived, loop.time() - began
                if not (limit_s := break_even.going_on_s(missing, arrived, elapsed, block_s=block_s)):
                    log.debug("a fetch of %d blocks was late", len(names))
                    break
    finally:
        landing.close()
    return landing


async def fetch_to_host(
    host: HostTier,
    links: RemoteTiers,
    root: Root,
    hashes: Sequence[bytes],
    part: RestoredPart,
    location: ChainLocation,
    compute_s: float,
    *,
    exact: bool,
) -> tuple[list[int], str]:
    """As many blocks as come in time, which `compute_s`, of computing them, says, and without a gap. Returns their
    slots, held, and where the last one came from."""
    slots = host.allocate(part.end - part.start)
    if not slots:
        return [], ""
    names, targets = location.names[part.start : part.start + len(slots)], [host.view(slot) for slot in slots]
    limit_s = break_even.LATE * part.seconds + break_even.SLACK * compute_s
    block_s = compute_s / (part.end - part.start)
    try:
        landing = await landed(links, part.tier, names, targets, location, limit_s, exact=exact, block_s=block_s)
    except asyncio.CancelledError:  # nobody waits for it any more
        host.pool.release(slots)
        raise
    count = landing.close()
    host.pool.release(slots[count:])
    headers = [header for header in landing.headers[:count] if header is not None]
    contents = [
        Content.of(root, hashes, at, unpack_ids(header.ids), full=True, lossy=header.lossy)
        for at, header in enumerate(headers, part.start)
    ]
    return host.fill(slots[:count], root, hashes, part.start, contents), landing.sources.get(count - 1, "")


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """From any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
