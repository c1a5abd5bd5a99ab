"""Loop: finds the blocks of a session at the living workers of its model, and erases them at all. Those that do not
answer, and those of other regions where it ran, erase them in the background; owns those tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvfleet.ingress.sessions.session import Session
from kvproto import codec
from kvproto.client import Client
from kvproto.errors import KvfleetError
from kvproto.ids import tenant_of
from kvproto.messages import AdminCommand, AdminRequest, Inspection, SessionHead, Tier

log = logging.getLogger(__name__)

AT_ONCE = 16  # workers asked: each is sent a long history
BEGIN_TOKENS = 1024  # all workers are asked about so many, besides a public prefix
FIND_TIMEOUT_S = 5.0
ERASE_TIMEOUT_S = 2.0  # a request waits for so long; a worker in a long step erases after it
BACKGROUND_TIMEOUT_S = 5.0  # of one try in the background, where no request waits
BACKGROUND_RETRY_S = 5.0
HOME_RETRY_S = 1.0
BACKGROUND_LIMIT_S = 60.0  # of all tries in one region
MAX_LATER = 64  # background erasures of a region at once; each may hold a long history
HOME = "home"  # this region, among those tasks
CLOSE_S = 2.0


@dataclass(eq=False, slots=True)
class SessionBlocks:
    """`region_workers` names a model's workers in another region."""

    client: Client
    region_workers: Callable[[str, str], list[str]]
    _erasing: set[asyncio.Task[None]] = field(default_factory=set)

    async def find(self, tenant: str, model: str, ids: tuple[int, ...]) -> dict[str, Inspection]:
        """What each worker holds; those that do not answer are left out. A long history is sent only to those that hold
        its beginning: blocks are found along their chain, so the others hold nothing that follows."""
        workers = self._workers_of(model)
        # A public prefix decides where a chain starts, so the question includes it.
        records = [self.client.members.view.workers[worker].record for worker in workers]
        prefixes = (prefix.tokens for record in records for prefix in record.public_prefixes)
        begin = BEGIN_TOKENS + max(prefixes, default=0)
        found = await self._inspect(workers, tenant, model, ids[:begin])
        if len(ids) <= begin:
            return found
        holders = [
            worker for worker, one in found.items() if max(one.cached_tokens, *one.tiers.values(), 0) * 2 > begin
        ]
        return found | await self._inspect(holders, tenant, model, ids)

    async def _inspect(
        self, workers: list[str], tenant: str, model: str, ids: tuple[int, ...]
    ) -> dict[str, Inspection]:
        question = AdminRequest(AdminCommand.INSPECT, tenant, ids, model=model)
        answers = await self._ask_all(workers, question, FIND_TIMEOUT_S)
        return {worker: codec.decode(Inspection, answer) for worker, answer in answers.items()}

    async def erase(self, session: Session) -> None:
        """Have every worker and vault forget what only this session had, its strays too. Raises nothing: who does not
        answer is told again in the background."""
        assert session.head is not None
        tenant = tenant_of(session.key)
        question = AdminRequest(
            AdminCommand.ERASE, tenant, session.ids, strays=session.strays, model=session.head.model
        )
        await self._erase(question, session.head.regions)

    async def erase_ids(self, tenant: str, model: str, ids: tuple[int, ...], regions: Iterable[str]) -> None:
        """As `erase`, of a sequence that is no session's."""
        await self._erase(AdminRequest(AdminCommand.ERASE, tenant, ids, model=model), regions)

    async def _erase(self, question: AdminRequest, regions: Iterable[str]) -> None:
        left = self._lives_of(question.model)
        await self._tell(question, left, ERASE_TIMEOUT_S)
        self._erase_later(question, left, regions)

    def forget(self, key: str, head: SessionHead, ids: tuple[int, ...], keep: int) -> None:
        """Have workers forget, in the background, what only this sequence has behind `keep` tokens."""
        question = AdminRequest(AdminCommand.ERASE, tenant_of(key), ids, keep=keep, model=head.model)
        self._erase_later(question, self._lives_of(head.model), head.regions)

    def _erase_later(self, question: AdminRequest, left: dict[str, str], regions: Iterable[str]) -> None:
        if left:
            self._later(HOME, self._erase_here(question, left))
        for region in regions:
            self._later(region, self._erase_in(region, question))

    def _later(self, region: str, erasing: Coroutine[Any, Any, None]) -> None:
        name = f"erase-in-{region}"
        if sum(task.get_name() == name for task in self._erasing) >= MAX_LATER:
            log.warning("region %s is not told what to forget: too much is on its way", region)
            erasing.close()
            return
        task = asyncio.create_task(erasing, name=name)
        self._erasing.add(task)
        task.add_done_callback(self._erasing.discard)

    async def close(self) -> None:
        if self._erasing:
            _, late = await asyncio.wait(self._erasing, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _tell(self, question: AdminRequest, left: dict[str, str], timeout_s: float) -> None:
        """Takes those out of `left` that were told, and lives that are over: their memory is."""
        view = self.client.members.view
        for worker, epoch in [*left.items()]:
            known = view.workers.get(worker)
            if known is None or known.record.epoch != epoch:
                del left[worker]
        for worker in await self._ask_all([one for one in left if view.is_alive(one)], question, timeout_s):
            del left[worker]

    async def _erase_here(self, question: AdminRequest, left: dict[str, str]) -> None:
        """Ends when all of these lives were told, or are over. One that is held up keeps its blocks, and comes back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACKGROUND_LIMIT_S):
                while True:
                    await self._tell(question, left, BACKGROUND_TIMEOUT_S)
                    if not left:
                        return
                    await asyncio.sleep(HOME_RETRY_S)
        log.warning("a session's blocks may still be at %s: they do not answer", ", ".join(left))

    async def _erase_in(self, region: str, question: AdminRequest) -> None:
        """Ends when all known workers there, one at least, have answered; they are told again for a minute, and keep
        their blocks until eviction afterwards."""
        told: set[str] = set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BACKGROUND_LIMIT_S):
                while True:
                    workers = self.region_workers(region, question.model)
                    late = [worker for worker in workers if worker not in told]
                    told |= (await self._ask_all(late, question, BACKGROUND_TIMEOUT_S)).keys()
                    if workers and told.issuperset(workers):
                        return
                    await asyncio.sleep(BACKGROUND_RETRY_S)
        log.warning("a session's blocks may still be in region %s: not all workers there could be told", region)

    async def _ask_all(self, workers: list[str], question: AdminRequest, timeout_s: float) -> dict[str, bytes]:
        limit = asyncio.Semaphore(AT_ONCE)

        async def ask(worker: str) -> bytes | None:
            async with limit:
                try:
                    return await self.client.admin(worker, question, timeout_s)
                except (KvfleetError, TimeoutError) as error:
                    log.info("worker %s did not %s: %s", worker, question.command.value, error)
                    return None

        answers = await asyncio.gather(*map(ask, workers))
        return {worker: answer for worker, answer in zip(workers, answers, strict=True) if answer is not None}

    def _workers_of(self, model: str) -> list[str]:
        view = self.client.members.view
        return [worker for worker in self._lives_of(model) if view.is_alive(worker)]

    def _lives_of(self, model: str) -> dict[str, str]:
        """Epochs of the workers that are here or were lately. Of an adapter, all of the model that it is of: it may
        have been unloaded where its blocks are."""
        records = {worker: one.record for worker, one in sorted(self.client.members.view.workers.items())}
        of = {record.model for record in records.values() if record.serves(model)}
        return {worker: record.epoch for worker, record in records.items() if record.model in of}


def tokens_by_tier(found: Iterable[tuple[str, Inspection]]) -> dict[str, dict[str, int]]:
    """By worker: how many leading tokens are in each tier or a faster one."""
    return {worker: one.tiers or {Tier.DEVICE.value: one.cached_tokens} for worker, one in found}
