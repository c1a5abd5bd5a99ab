"""Loop: answers Clients' requests on `kvf.place`, while the answer is of use.

Messages are read as they come, and one is decided per turn of the event loop: so requests wait here, where their age is
known, and not in a socket. The one with the least time left goes first. A late one costs a look at two of its fields
and gets no answer: its asker has placed it by the ring.

    listening ──25 ms of work wait──▶ standing back ──4 requests wait──▶ listening

Reading a request costs a tenth of deciding it. So a desk that is behind leaves the queue group: other replicas get the
requests, and without any the server tells askers at once that nobody listens.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from kvfleet.placement.events import Action, Answer, Fail
from kvfleet.placement.io import intake
from kvfleet.placement.io.executor import Executor
from kvfleet.placement.io.replica import QUEUE, Replica, let_go
from kvfleet.placement.io.timing import Lateness
from kvfleet.placement.record.decision_trace import DecisionTraces
from kvproto import codec
from kvproto.connection import Message, Subscription
from kvproto.errors import CodecError
from kvproto.subjects import is_of_the_fleet

log = logging.getLogger(__name__)

MAX_WAITING = 8192
MAX_PRIORITY = 100
LATE_IN_A_ROW = 64  # before others have a turn
BEHIND_S = 0.025  # of work that waits, half of what a Client waits; but never more than 256 requests, nor fewer than 12
MOST, FEWEST, FEW = 256, 12, 4
NEWEST = 0.05  # weight of a decision in how long one takes
LOOK_S = 0.001


@dataclass(eq=False)
class PlaceDesk:
    """Requests from outside the fleet have no more than `max_priority`."""

    replica: Replica
    executor: Executor
    traces: DecisionTraces
    fleet_key: bytes
    max_priority: int
    late_total: int = 0  # not decided
    stood_back_total: int = 0  # times
    decisions_total: int = 0
    decision_seconds_total: float = 0.0  # own time of them
    _listening: list[Subscription] = field(default_factory=list)
    _is_behind: bool = False
    _stopped: bool = False
    _lateness: Lateness = field(default_factory=Lateness)
    _usual_s: float = 0.0  # a decision
    # A heap of (until when, number, message, whether it is from another region).
    waiting: list[tuple[float, int, Message, bool]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _came: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_place(self, message: Message, *, from_other_region: bool = False) -> None:
        if len(self.waiting) >= MAX_WAITING:
            self.late_total += 1
            return
        now = self.replica.now()
        heapq.heappush(self.waiting, (self._due(message, now), next(self._numbers), message, from_other_region))
        self._came.set()

    async def start(self) -> None:
        subjects, listen = self.replica.subjects, self.replica.listen
        self._listening.append(await listen(subjects.place_all(), self.on_place, QUEUE))
        if subjects.region:
            on_place = partial(self.on_place, from_other_region=True)
            self._listening.append(await listen(subjects.region_place_all(), on_place, QUEUE))

    async def stop(self) -> None:
        """What was sent is still read, and decided if `run` goes on. Never raises."""
        self._stopped = True
        await self._let_go()

    async def _stand_back(self) -> None:
        self.stood_back_total += 1
        await self._let_go()
        while len(self.waiting) > FEW:
            await asyncio.sleep(LOOK_S)
        if not self._stopped:
            await self.start()
        self._is_behind = False

    async def _let_go(self) -> None:
        listening, self._listening = self._listening, []
        for one in listening:
            await let_go(one.drain())

    async def run(self) -> None:
        """For as long as the loop lives."""
        late_in_a_row = 0
        while True:
            while not self.waiting:
                self._came.clear()
                await self._came.wait()
            if len(self.waiting) * max(self._usual_s, BEHIND_S / MOST) > BEHIND_S and not self._is_behind:
                self._is_behind = True
                self.replica.spawn(self._stand_back())
            due, _, message, from_other_region = heapq.heappop(self.waiting)
            now = self.replica.now()
            if due < now:
                self.late_total += 1
                late_in_a_row += 1
                if late_in_a_row < LATE_IN_A_ROW:
                    continue
            else:
                await self.replica.guarded(partial(self._answer, from_other_region=from_other_region))(message)
                took_s = self.replica.now() - now
                self._usual_s += NEWEST * (min(took_s, BEHIND_S / FEWEST) - self._usual_s)
            late_in_a_row = 0
            await asyncio.sleep(0)

    def _due(self, message: Message, arrived: float) -> float:
        try:
            fields = codec.open_map(message.data)
        except CodecError:
            fields = {}
        asker = message.reply.rpartition(".")[0]
        return self._lateness.due(asker, fields.get("deadline_ms"), fields.get("expires_unix_ms"), arrived)

    async def _answer(self, message: Message, *, from_other_region: bool) -> None:
        began = time.perf_counter()
        if not intake.is_inbox(message.reply, tenant=intake.tenant_in(message.subject)):
            self.replica.ignored_total += 1
            return
        most = MAX_PRIORITY if is_of_the_fleet(message.reply, self.fleet_key) else self.max_priority
        read = intake.read_place(message.subject, message.reply, message.data, max_priority=most)
        if isinstance(read, Fail):
            self.replica.malformed_total += 1
            await self.executor.carry_out([read])
            return
        if from_other_region:
            read = replace(read, from_other_region=True)
        handle, headers = self.executor.handle, message.headers
        actions = handle(read) if headers is None else self.traces.place(read, headers, handle)
        self.decisions_total += 1
        self.decision_seconds_total += time.perf_counter() - began
        if log.isEnabledFor(logging.DEBUG):
            say_placed(read.ask.request, actions)
        await self.executor.carry_out(actions)


def say_placed(request: str | None, actions: list[Action]) -> None:
    for action in actions:
        if isinstance(action, Answer):
            one = action.placement
            about = {"request": request, "worker": one.worker, "attempt": one.attempt}
            log.debug("request %s: attempt %d goes to %s: %s", request, one.attempt, one.worker, one.why, extra=about)
        elif isinstance(action, Fail):
            log.debug("request %s: refused: %s", request, action.failed.message, extra={"request": request})
