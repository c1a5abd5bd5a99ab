"""Loop: what vLLM has of chains that nobody may name any more, or that are wrong, goes. Owned by the engine.

vLLM tells of its last blocks a moment after a sequence has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, ForeignHash
from kvfleet.worker.vllm.step_rates import StepRates
from kvfleet.worker.vllm.vllm_calls import VllmCalls
from kvproto.block_hash import Root
from kvproto.messages import TierEvents

EVENTS_S = (0.01, 0.02, 0.05)  # until it usually has told so
SETTLE_S = 0.3  # until vLLM has told of the last blocks of a sequence that ended


@dataclass(eq=False)
class ChainEvictions:
    """`on_changes` is told what vLLM's device no longer has; `aside` begins work that may fail."""

    blocks: ForeignBlocks
    server: VllmCalls
    step_rates: StepRates
    on_changes: Callable[[Sequence[TierEvents]], None]
    aside: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    erase: Callable[[Root, Sequence[int], int], Coroutine[Any, Any, int]]
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def settled(self) -> None:
        if self._running:
            await asyncio.wait(self._running)

    def forget(self, root: Root, ids: Sequence[int], known: int) -> None:
        """No erase could name what follows the `known` tokens."""
        self._later(self._forget(root, ids, known))

    def discard(self, block: bytes) -> None:
        """A block, and what continues it: at once, and again, as vLLM tells of its last blocks."""
        self._later(self._discard(block))

    async def evict(self, names: Sequence[ForeignHash]) -> None:
        """Raises EngineFailure."""
        await self.server.erase(names)
        self.on_changes(self.blocks.forget(names))  # vLLM tells so too, a little later

    async def _forget(self, root: Root, ids: Sequence[int], known: int) -> None:
        await asyncio.sleep(self._settle_s)
        await self.erase(root, ids, known)

    async def _discard(self, block: bytes) -> None:
        for wait_s in (0.0, *EVENTS_S, self._settle_s):
            await asyncio.sleep(wait_s)
            await self.evict(self.blocks.continuations(block))

    @property
    def _settle_s(self) -> float:
        return SETTLE_S + 2 * self.step_rates.rates.step_s

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.aside(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
