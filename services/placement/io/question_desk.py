"""Loop: answers questions about what this replica has seen and decided (the loop lists them); it changes nothing.

Lists of the newest decisions, preload plans and victim reports take longer than a decision may: they are answered a
piece at a time, so that decisions come in between. A few lists may wait; one too many gets no answer, nor does one
whose asker has gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from kvfleet.placement.advice.questions import preload, survey
from kvfleet.placement.core import PlacementCore
from kvfleet.placement.io import intake
from kvfleet.placement.io.replica import Replica
from kvproto import codec
from kvproto.client import EXPLAIN_TIMEOUT_S, MAX_NEWEST
from kvproto.connection import Message
from kvproto.errors import KvfleetError
from kvproto.messages import (
    ExplainRequest,
    Explanation,
    PlacementStats,
    PreloadPlan,
    PreloadRequest,
    VictimReport,
    VictimRequest,
)

log = logging.getLogger(__name__)

OF_A_MESSAGE = 0.75  # of the largest that NATS carries
MAX_WAITING = 8  # lists of the newest: the longest takes some 14 ms

Asked = TypeVar("Asked", ExplainRequest, PreloadRequest, VictimRequest)
Part = TypeVar("Part")


@dataclass(eq=False)
class QuestionDesk:
    replica: Replica
    core: PlacementCore
    preload_answers_total: int = 0
    victim_answers_total: int = 0
    dropped_total: int = 0  # lists of the newest that are not answered
    _waiting: deque[tuple[ExplainRequest, str, float]] = field(default_factory=deque)  # reply, when its asker has gone
    _is_listing: bool = False

    async def on_stats(self, message: Message) -> None:
        if not intake.is_inbox(message.reply):
            self.replica.ignored_total += 1
            return
        await self._answer(message.reply, self.core.stats())

    async def on_explain(self, message: Message) -> None:
        if (ask := self._read(ExplainRequest, message)) is None:
            return
        if ask.newest:
            self._on_newest(ask, message.reply)
            return
        decisions = self.core.ledger.explain(ask.request, ask.tenant)
        await self._answer(message.reply, Explanation(self.core.placement, decisions))

    async def on_preload(self, message: Message) -> None:
        if (ask := self._read(PreloadRequest, message, of_worker=True)) is None:
            return
        core, max_bytes = self.core, int(self.replica.connection.max_payload * OF_A_MESSAGE)
        plan = preload(ask, core.decider.heat, core.fleet, core.indexer, max_bytes, self.replica.now())
        chains = await _last(plan)
        if await self._answer(message.reply, PreloadPlan(self.core.placement, chains)):
            self.preload_answers_total += 1

    async def on_victim(self, message: Message) -> None:
        if (ask := self._read(VictimRequest, message)) is None:
            return
        core = self.core
        costs = await _last(survey(ask.model, core.decider.heat, core.fleet, core.indexer, self.replica.now()))
        if await self._answer(message.reply, VictimReport(self.core.placement, costs)):
            self.victim_answers_total += 1

    def _on_newest(self, ask: ExplainRequest, reply: str) -> None:
        """A task of its own answers: other questions do not wait for it."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped_total += 1
            return
        self._waiting.append((ask, reply, self.replica.now() + EXPLAIN_TIMEOUT_S))
        if not self._is_listing:
            self._is_listing = True
            self.replica.spawn(self._list())

    async def _list(self) -> None:
        try:
            while self._waiting:
                await self._tell_newest(*self._waiting.popleft())
        finally:
            self._is_listing = False

    async def _tell_newest(self, ask: ExplainRequest, reply: str, until: float) -> None:
        newest = self.core.ledger.newest(min(ask.newest, MAX_NEWEST), ask.tenant, ask.model)
        while self.replica.now() < until:
            decisions, more = next(newest)
            part = Explanation(self.core.placement, decisions, more)
            if (decisions or not more) and not await self._answer(reply, part):
                return
            if not more:
                return
            await asyncio.sleep(0)
        self.dropped_total += 1

    def _read(self, kind: type[Asked], message: Message, *, of_worker: bool = False) -> Asked | None:
        if not intake.is_inbox(message.reply, of_worker=of_worker):
            self.replica.ignored_total += 1
            return None
        return self.replica.read(kind, message)

    async def _answer(self, reply: str, answer: Explanation | PlacementStats | PreloadPlan | VictimReport) -> bool:
        try:
            await self.replica.connection.publish(reply, codec.encode(answer))
        except KvfleetError as error:
            self.replica.unsent_total += 1
            log.warning("placement: %s not sent: %s", type(answer).__name__, error)
            return False
        return True


async def _last(pieces: Iterator[tuple[Part, ...]]) -> tuple[Part, ...]:
    answer: tuple[Part, ...] = ()
    for piece in pieces:
        answer = piece
        await asyncio.sleep(0)
    return answer
