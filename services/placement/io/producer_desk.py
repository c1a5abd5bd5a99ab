"""Loop: requests of bare producers, workers' answers to offers of them, and what others let go of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvfleet.placement.events import Action, Event, Fail, GenerateAsked, NobodyListens, WorkerAnswered
from kvfleet.placement.io import intake
from kvfleet.placement.io.executor import INBOX_HEADER, TAKEN, Executor
from kvfleet.placement.io.place_desk import say_placed
from kvfleet.placement.io.replica import Replica
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvproto.connection import Message, is_json, is_no_responders
from kvproto.errors import CodecError, InvalidRequest
from kvproto.ids import new_request_id
from kvproto.subjects import is_inbox

log = logging.getLogger(__name__)

REFUSED = b"refused"


@dataclass(eq=False, slots=True)
class ProducerDesk:
    replica: Replica
    executor: Executor
    traces: DecisionTraces

    async def on_generate(self, message: Message) -> None:
        if not intake.is_inbox(message.reply, of_producer=True, tenant=intake.tenant_in(message.subject)):
            self.replica.ignored_total += 1
            return
        read = _read_generate(message, message.reply)
        if isinstance(read, Fail):
            self.replica.malformed_total += 1
            await self.executor.carry_out([read])
            return
        actions = self.traces.forward(read, message.headers, self.executor.handle)
        if log.isEnabledFor(logging.DEBUG):
            say_placed(read.request, actions)
        await self.executor.carry_out(actions)

    async def on_generate_from_region(self, message: Message) -> None:
        """Another region passes a producer's request on. A request that fails here at once stays with that region."""
        inbox = (message.headers or {}).get(INBOX_HEADER, "")
        tenant = intake.tenant_in(message.subject)
        if not intake.is_inbox(inbox, of_producer=True, tenant=tenant) or not is_inbox(message.reply):
            self.replica.ignored_total += 1
            return
        read = _read_generate(message, inbox)
        actions: list[Action] = [read] if isinstance(read, Fail) else []
        if not isinstance(read, Fail):
            event = replace(read, from_other_region=True)
            actions = self.traces.forward(event, message.headers, self.executor.handle)
        refusals = [action for action in actions if isinstance(action, Fail) and action.inbox == inbox]
        await self.replica.connection.publish(message.reply, REFUSED if refusals else TAKEN)
        await self.executor.carry_out(action for action in actions if action not in refusals)

    async def on_answer(self, message: Message) -> None:
        key, _, attempt = message.subject.removeprefix(self.replica.answers).partition(".")
        if is_no_responders(message):
            if attempt.isascii() and attempt.isdecimal() and len(attempt) < 10:
                await self.executor.carry_out(self.executor.handle(NobodyListens(key, int(attempt))))
            return
        request = key.partition("~")[0]
        try:
            frames = intake.read_answer(message.data)
        except CodecError as error:
            self.replica.malformed_total += 1
            about = {"request": request}
            log.warning("placement: an answer for request %s is unreadable: %s", key, error, extra=about)
            return
        for frame in frames:
            if frame.request == request:
                await self.executor.carry_out(self.executor.handle(WorkerAnswered(frame, key)))

    async def on_capsule(self, message: Message) -> None:
        await self._take_over(message, intake.read_capsule)

    async def on_watches(self, message: Message) -> None:
        await self._take_over(message, intake.read_watches)

    async def _take_over(self, message: Message, read: Callable[[str, bytes], Event]) -> None:
        try:
            event = read(message.reply, message.data)
        except InvalidRequest as error:
            self.replica.malformed_total += 1
            log.warning("placement: a message on %s is refused: %s", message.subject, error)
            return
        await self.executor.carry_out(self.executor.handle(event))


def _read_generate(message: Message, inbox: str) -> GenerateAsked | Fail:
    return intake.read_generate(
        message.subject,
        inbox,
        message.data,
        as_json=is_json(message),
        new_request=new_request_id(),
        new_seed=int.from_bytes(os.urandom(8), "little"),
        unix_ms=int(time.time() * 1000),
    )
