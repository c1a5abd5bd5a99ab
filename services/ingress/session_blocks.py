"""Loop: where the blocks of a session are, and their end. Asks every living worker of its model; owns nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from kvproto import codec
from kvproto.client import Client
from kvproto.errors import KvfleetError
from kvproto.messages import AdminCommand, AdminRequest, Inspection, Tier

log = logging.getLogger(__name__)

AT_ONCE = 16  # a long history goes to each of them
FIND_TIMEOUT_S = 5.0
ERASE_TIMEOUT_S = 2.0  # how long somebody waits; a worker in a long step erases after it


class SessionBlocks:
    """Questions to workers about the blocks of one token sequence."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def find(self, tenant: str, model: str, ids: tuple[int, ...]) -> dict[str, Inspection]:
        """What each worker holds; those that do not answer are left out."""
        question = AdminRequest(AdminCommand.INSPECT, tenant, ids)
        return {
            worker: codec.decode(Inspection, answer)
            for worker, answer in (await self._ask_all(model, question, FIND_TIMEOUT_S)).items()
        }

    async def erase(self, tenant: str, model: str, ids: tuple[int, ...]) -> None:
        """Have every worker forget what only this sequence has, and have vaults forget it. Raises nothing: what a
        worker that is away had in memory goes with it."""
        await self._ask_all(model, AdminRequest(AdminCommand.ERASE, tenant, ids), ERASE_TIMEOUT_S)

    async def _ask_all(self, model: str, question: AdminRequest, timeout_s: float) -> dict[str, bytes]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def ask(worker: str) -> bytes | None:
            async with limit:
                try:
                    return await self._client.admin(worker, question, timeout_s)
                except (KvfleetError, TimeoutError) as error:
                    log.info("worker %s did not %s: %s", worker, question.command.value, error)
                    return None

        workers = self._workers_of(model)
        answers = await asyncio.gather(*map(ask, workers))
        return {worker: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}

    def _workers_of(self, model: str) -> list[str]:
        view = self._client.members.view
        return sorted(w for w, one in view.workers.items() if view.is_alive(w) and one.record.model == model)


def tokens_by_tier(found: Iterable[tuple[str, Inspection]]) -> dict[str, dict[str, int]]:
    """By worker: how many leading tokens are in each tier, or in a faster one."""
    return {worker: one.tiers or {Tier.DEVICE.value: one.cached_tokens} for worker, one in found}
