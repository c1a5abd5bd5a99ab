"""What vLLM tells of its cached blocks, as blocks of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, salt_of_root
from kvfleet.worker.vllm.kv_event_feed import Event, KvEventFeed
from kvfleet.worker.vllm.token_routes import TokenRoutes
from kvproto.block_hash import chain, root
from tests.support.vllm_server import TOPIC, VllmServer
from tests.support.waiting import LIMIT_S

BLOCK = 16
PROMPT = [3 + i * 7 % 1000 for i in range(100)]


async def test_its_blocks_have_our_names(vllm_server: VllmServer, routes: TokenRoutes) -> None:
    blocks = ForeignBlocks(BLOCK)

    def take(events: Sequence[Event]) -> None:
        blocks.apply(events)

    def clear() -> None:
        blocks.clear()

    feed = KvEventFeed(vllm_server.kv_events, vllm_server.kv_replay, TOPIC, True, take, clear)
    feed.open()
    reading = asyncio.create_task(feed.run())
    first = root("tiny", BLOCK, b"salt")

    async def ask(name: str, start: bytes) -> None:
        params = {"temperature": 0, "max_tokens": 1}
        body = {"token_ids": PROMPT, "stream": True, "sampling_params": params}
        _ = [part async for part in routes.generate(body | {"request_id": name, "cache_salt": salt_of_root(start)})]

    async def told(name: str, start: bytes) -> None:
        await ask(name, start)
        wanted = set(chain(start, PROMPT[:96], BLOCK))
        async with asyncio.timeout(LIMIT_S):
            for number in count():
                if wanted <= set(blocks.hashes()):
                    return
                await ask(f"{name}-{number}", bytes([number]) * 16)  # a batch tells of the one before that was lost
                await asyncio.sleep(0.1)

    await told("before", root("tiny", BLOCK, b"another"))  # with what other tests have left there
    left_out = blocks.left_out_total
    print("LEFTOUT", left_out, feed)
    await told("events", first)
    assert (feed.malformed_total, blocks.left_out_total) == (0, left_out)
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
