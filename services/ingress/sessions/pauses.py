"""Conversations between two turns: when each is likely to go on, said to the worker that has its blocks.

    a turn ends ──its calls, or what the client said──▶ ReturnExpected to its worker, which placements hear, too
    a turn comes with a tool's result ──by the call's id──▶ how long that tool took this tenant

Owned by the ingress's event loop. All of it is advice: an ingress that restarts measures anew, and a turn that comes
back to another ingress is not measured.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvchat.message_builder import ID_CHARS, MessageBuilder
from kvchat.message_format import MessageReading
from kvchat.messages import ChatMessage
from kvfleet.ingress.runs.jobs import HeldTurn
from kvfleet.ingress.runs.transcript import Transcript
from kvproto import codec
from kvproto.client import Client
from kvproto.errors import KvfleetError
from kvproto.messages import AssistantCall, FinishReason, ReturnExpected
from kvproto.regions import split
from kvservice.return_times import ReturnTimes, said_span

log = logging.getLogger(__name__)

MOST_OPEN = 65_536  # calls whose results have not come


class OpenCalls(NamedTuple):
    ended_at: float
    tools: tuple[str, ...]


@dataclass(eq=False, slots=True)
class ConversationPauses:
    client: Client
    times: ReturnTimes = field(default_factory=ReturnTimes)
    told_total: int = 0  # to workers
    measured_total: int = 0
    _open: OrderedDict[tuple[str, str], OpenCalls] = field(default_factory=OrderedDict)  # by tenant and a call's id

    def came(self, tenant: str, messages: Sequence[ChatMessage]) -> None:
        """A turn has come: results of tools at its end say how long those took."""
        now, turns = self.client.now(), set[OpenCalls]()
        for message in reversed(messages):
            if message.role == "assistant":
                break
            known = self._open.pop((tenant, (message.tool_call_id or "")[-ID_CHARS:]), None)
            if known is not None:
                turns.add(known)
        for turn in turns:
            self.measured_total += 1
            self.times.observe(tenant, turn.tools, now - turn.ended_at)

    async def ended(
        self, tenant: str, session: str, transcript: Transcript, calls: Sequence[AssistantCall], said_s: float | None
    ) -> None:
        """Never raises."""
        finished = transcript.finished
        assert finished is not None
        tools = tuple(dict.fromkeys(call.name for call in calls))
        if tools:
            turn = OpenCalls(self.client.now(), tools)
            self._open.update({(tenant, call.id[-ID_CHARS:]): turn for call in calls})
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        span = said_span(said_s) if said_s is not None else self.times.expect(tenant, tools)
        region, worker = split(transcript.worker)
        known = self.client.members.view.workers.get(worker)
        if span is None or region or known is None or not known.record.pauses:
            return
        expected = ReturnExpected(tenant, finished.request, finished.attempt, session, *span)
        try:
            subject = self.client.subjects.worker_returns(worker)
            await self.client.connection.publish(subject, codec.encode(expected))
            self.told_total += 1
        except KvfleetError as error:
            log.debug("worker %s was not told when a conversation may go on: %s", worker, error)


@dataclass(eq=False, slots=True)
class PausingTurn(HeldTurn):
    """A turn after whose end its conversation may pause."""

    turn: HeldTurn
    pauses: ConversationPauses
    tenant: str
    session: str
    reading: MessageReading | None
    said_s: float | None  # by the client

    async def open(self) -> None:
        await self.turn.open()

    async def commit(self, transcript: Transcript) -> None:
        await self.turn.commit(transcript)
        await self.pauses.ended(self.tenant, self.session, transcript, self._calls(transcript), self.said_s)

    async def abandon(self, transcript: Transcript) -> None:
        await self.turn.abandon(transcript)

    def _calls(self, transcript: Transcript) -> Sequence[AssistantCall]:
        """Of the first choice, with which a conversation goes on."""
        first, finished = transcript.choices[0], transcript.finished
        if self.reading is None or not self.reading.callable or finished is None:
            return ()
        builder = MessageBuilder(self.reading(), finished.request, 0)
        builder.read(first.text)
        return builder.end(first.reason or FinishReason.STOP).tool_calls
