"""Loop: answers questions that take longer than a decision may, a piece at a time, so that decisions come in between.

    kvf.placement.preload   what should a new worker have?   ──▶ a PreloadPlan
    kvf.placement.victim    who is the cheapest to lose?     ──▶ a VictimReport
    kvf.placement.explain   what was decided last?           ──▶ Explanations, one for each piece

One of each at a time; the first two in a queue group, as replicas share requests evenly and each knows only of its own
decisions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from kvproto import codec
from kvproto.connection import Connection, Message
from kvproto.errors import CodecError, KvfleetError
from kvproto.explanations import MAX_NEWEST
from kvproto.messages import ExplainRequest, Explanation, PreloadPlan, PreloadRequest, VictimReport, VictimRequest
from services.placement import intake
from services.placement.core import PlacementCore

log = logging.getLogger(__name__)

OF_A_MESSAGE = 0.75  # of the largest that NATS carries

Question = TypeVar("Question", PreloadRequest, VictimRequest)


class LongQuestions:
    """Owned by the placement loop, which subscribes and guards the callbacks; the core is only read."""

    def __init__(self, connection: Connection, core: PlacementCore) -> None:
        self.refused_total = 0  # because the bytes or a field were wrong
        self.ignored_total = 0  # without an inbox to answer to
        self.preload_answers_total = 0
        self.victim_answers_total = 0
        self._connection = connection
        self._core = core

    async def on_preload(self, message: Message) -> None:
        ask = self._read(PreloadRequest, message, of_worker=True)
        if ask is None:
            return
        preload = self._core.preload(ask, int(self._connection.max_payload * OF_A_MESSAGE), _now())
        await _work_off(preload.step)
        if await self._answer(message.reply, PreloadPlan(self._core.placement, preload.plan())):
            self.preload_answers_total += 1

    async def on_victim(self, message: Message) -> None:
        ask = self._read(VictimRequest, message)
        if ask is None:
            return
        survey = self._core.survey(ask.model, _now())
        await _work_off(survey.step)
        if await self._answer(message.reply, VictimReport(self._core.placement, survey.costs())):
            self.victim_answers_total += 1

    async def on_newest(self, ask: ExplainRequest, reply: str) -> None:
        """Each piece is sent as it is written: none is too long for NATS, however many there are."""
        newest, more = self._core.ledger.newest(min(ask.newest, MAX_NEWEST), ask.tenant, ask.model), True
        while more:
            decisions, more = newest.part()
            if (decisions or not more) and not await self._answer(
                reply, Explanation(self._core.placement, decisions, more)
            ):
                return
            await asyncio.sleep(0)

    def _read(self, kind: type[Question], message: Message, *, of_worker: bool = False) -> Question | None:
        if not intake.is_inbox(message.reply, of_worker=of_worker):
            self.ignored_total += 1
            return None
        try:
            return codec.decode(kind, message.data)
        except CodecError as error:
            self.refused_total += 1
            log.debug("placement: a question on %s is unreadable: %s", message.subject, error)
            return None

    async def _answer(self, reply: str, answer: PreloadPlan | VictimReport | Explanation) -> bool:
        try:
            await self._connection.publish(reply, codec.encode(answer))
        except KvfleetError as error:
            log.warning("placement: %s not sent: %s", type(answer).__name__, error)
            return False
        return True


async def _work_off(step: Callable[[], bool]) -> None:
    while not step():
        await asyncio.sleep(0)


def _now() -> float:
    return asyncio.get_running_loop().time()
