"""Loop: brings blocks from a vault to the host tier of a vLLM worker. On the worker's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from kvfleet.worker.blocks.chain_location import ChainLocation
from kvfleet.worker.blocks.content_index import Content
from kvfleet.worker.tiers.break_even import RestoredPart
from kvfleet.worker.tiers.host import HostTier, Landing
from kvfleet.worker.tiers.remote import RemoteTiers
from kvproto.block_hash import Root, unpack_ids

log = logging.getLogger(__name__)


async def fetch_to_host(
    host: HostTier,
    links: RemoteTiers,
    root: Root,
    hashes: Sequence[bytes],
    part: RestoredPart,
    location: ChainLocation,
    limit_s: float,
    *,
    exact: bool,
) -> tuple[list[int], str]:
    """As many blocks as come in time and without a gap. Returns their slots, held, and where the last one came from."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    slots = host.allocate(part.end - part.start)
    if not slots:
        return [], ""
    landing = Landing([None] * len(slots), traceparent=location.traceparent)
    links.fetch(
        part.tier,
        location.names[part.start : part.start + len(slots)],
        [host.view(slot) for slot in slots],
        landing,
        exact=exact,
        peer="",
        on_progress=partial(soon, loop, ended.set),
    )
    try:
        await asyncio.wait_for(ended.wait(), limit_s)
    except TimeoutError:
        log.debug("a fetch of %d blocks was late", len(slots))
    except asyncio.CancelledError:  # nobody waits for it any more
        landing.close()
        host.pool.release(slots)
        raise
    landed = landing.close()
    host.pool.release(slots[landed:])
    headers = [header for header in landing.headers[:landed] if header is not None]
    contents = [
        Content.of(root, hashes, at, unpack_ids(header.ids), full=True, lossy=header.lossy)
        for at, header in enumerate(headers, part.start)
    ]
    return host.fill(slots[:landed], root, hashes, part.start, contents), landing.sources.get(landed - 1, "")


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """From any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)
