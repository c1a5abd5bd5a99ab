"""Loop: blocks of prompts that another worker prefills and hands over to this one. Owned by the worker's event loop.

    told of a prompt ──▶ what does the other have of it? ──more──▶ brought to the device ──┐
                              ▲                └──nothing new──▶ a moment later ───────────┤
                              └────────────────────────────────────────────────────────────┘ until all is here

So blocks go over while prefill goes on, and little is left to fetch when the request itself comes. That ends the
fetching, as does a cancel, or a prefiller that makes no progress. Nothing depends on it: what did not come is fetched
or computed then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from kvfleet.worker.port.engine_port import Names
from kvfleet.worker.serve.worker_parts import WorkerParts
from kvproto.block_hash import ForkedRoot, Root
from kvproto.errors import KvfleetError
from kvproto.messages import GenerateRequest, HotChain

log = logging.getLogger(__name__)

POLL_S = 0.05
ANSWER_S = 1.0  # a worker that prefills answers between two steps
CHAIN_S = 5.0  # for what is there to come
IDLE_S = 30.0  # the prompt waits there, or its reader has left
MOST_AHEAD = 256

Spawn = Callable[[Coroutine[object, object, None], str], asyncio.Task[None]]


@dataclass(eq=False)
class FetchAhead:
    parts: WorkerParts
    spawn: Spawn
    blocks_total: int = 0  # that were there to fetch
    _tasks: dict[tuple[str, str, int], asyncio.Task[None]] = field(default_factory=dict)  # tenant, request, attempt

    def begin(self, request: GenerateRequest, tenant: str, root: Root, names: Names) -> None:
        key = tenant, request.request, request.attempt
        if key in self._tasks or len(self._tasks) >= MOST_AHEAD or not names:
            return
        task = self._tasks[key] = self.spawn(self._fetch(request.source, root, names), "fetching-ahead")
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def end(self, request: str, attempt: int | None = None, tenant: str | None = None) -> None:
        """The request is here, or will not come. What is on its way still comes."""
        for (of, name, number), task in list(self._tasks.items()):
            if name == request and attempt in (None, number) and tenant in (None, of):
                task.cancel()

    async def _fetch(self, source: str, root: Root, names: Names) -> None:
        try:
            await self._follow(source, root, names)
        except KvfleetError as error:  # the engine is gone
            log.debug("nothing more is fetched ahead: %s", error)

    async def _follow(self, source: str, root: Root, names: Names) -> None:
        tiers, clock = self.parts.tiers, asyncio.get_running_loop().time
        here, moved_at = 0, clock()
        while here < len(names) and clock() - moved_at < IDLE_S:
            if (meeting := tiers.meet(source)) is not None:  # its address may not have come in time before
                await meeting
            there = here + await tiers.at_peer(names[here:], source, ANSWER_S)
            if there == here:
                await asyncio.sleep(POLL_S)
                continue
            await tiers.preload(_chain(root, names[:there], source), CHAIN_S)
            self.blocks_total += there - here
            here, moved_at = there, clock()


def _chain(root: Root, names: Names, source: str) -> HotChain:
    hashes = b"".join(name.hash for name in names)
    if isinstance(root, ForkedRoot):
        return HotChain(hashes, root.own, root.public, root.blocks, source)
    return HotChain(hashes, root, source=source)
