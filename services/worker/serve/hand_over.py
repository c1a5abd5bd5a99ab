"""Loop: how a draining worker hands its requests over without their readers noticing. Owned by the worker's event loop.

    those about to end do ──▶ somebody else is ready: all go ──▶ their readers say that it goes on ──▶ the process ends
                       │                ▲                  and pull the blocks from here
                       └─ nobody is ────┘ they go on here; when time runs out, their blocks go to vaults, and they go

A worker for prompts alone hands each request over in the same way, as soon as it has its first token; where no worker
decodes, the request goes on here.

A reader that can resume (a Client, an ingress) gets `Moved` and goes on at a new worker, which fetches the blocks
from here; at the first frame from there the reader cancels the attempt here, which ends the wait. A bare producer's
request goes as a `Capsule` to a placement, which places it anew and cancels it here when its successor has started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvfleet.worker.serve.worker_parts import WorkerParts
from kvfleet.worker.streams.records import AttemptRecord, Reader
from kvproto import codec
from kvproto.errors import Cancelled, Draining, KvfleetError, WorkerLost
from kvproto.messages import Capsule, Continuation, Frame, GenerateRequest, Moved
from kvservice.tracing import work_for

log = logging.getLogger(__name__)

FINISH_S = 0.5  # requests that end within this are not moved
STAND_S = 2.0  # for each sequence of a hybrid model to come to the end of a block, where its state is kept
LAST_S = 1.5  # of the time to drain, for moves when no worker was ready to take over
CAPSULE_S = 1.0  # for a placement to take one
LEAST_S = 0.1  # for a capsule when time has run out
POLL_S = 0.02
PREFILLED_S = 5.0  # for a request to leave after its prefill: its blocks may go to vaults
FETCHED_S = 10.0  # by then a moved request's blocks were fetched, or its reader is gone


@dataclass(eq=False)
class HandOver:
    parts: WorkerParts
    moved_total: int = 0
    _moved: list[AttemptRecord] = field(default_factory=list)  # a record has readers until all have cancelled it here
    _prefilled: set[tuple[str, int]] = field(default_factory=set)  # on their way out

    async def run(self, limit_s: float) -> None:
        """Returns when nothing here is needed any more, after `limit_s` at the latest."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s

        async def wait(condition: Callable[[], object], end: float) -> None:
            while condition() and loop.time() < end:
                await asyncio.sleep(POLL_S)

        await self._stand()
        await wait(lambda: self.parts.frames.running, loop.time() + min(FINISH_S, limit_s / 4))
        standing = loop.time() + min(STAND_S, limit_s / 4)
        while self.parts.frames.running and loop.time() < standing and not await self._stand():
            await asyncio.sleep(POLL_S)
        alone = max(loop.time(), until - LAST_S)
        await wait(lambda: self.parts.frames.running and not self._somebody_is_ready(), alone)
        if not self.parts.frames.running:
            return
        await self._move(self.parts.frames.running, until, keep=not self._somebody_is_ready())
        await wait(lambda: any(record.readers for record in self._moved), until)
        await wait(lambda: self.parts.tiers.is_lending, until)

    async def _stand(self) -> bool:
        """Whether all that runs is where it can be gone on from; what a dead engine has is not waited for."""
        try:
            return await self.parts.tiers.leaves_soon()
        except KvfleetError:
            return True

    def claims(self, record: AttemptRecord) -> bool:
        """Whether it is to leave now, by the plan that it came with: said once, so that it leaves once. A beam search
        would begin anew elsewhere."""
        asked = record.asked
        if asked is None or not asked.then or not record.has_spoken or record.key in self._prefilled:
            return False
        if asked.sampling.beams is not None or self.parts.somebody_decodes((asked.model,)) is False:
            return False
        self._prefilled.add(record.key)
        return True

    async def after_prefill(self, record: AttemptRecord) -> None:
        """Of a record that was claimed."""
        clock = asyncio.get_running_loop().time
        self._moved = [one for one in self._moved if one.readers and clock() - one.finished_at < FETCHED_S]
        try:
            await self._move([record], clock() + PREFILLED_S, keep=not self.parts.tiers.lends)
        finally:
            self._prefilled.discard(record.key)

    def _somebody_is_ready(self) -> bool | None:
        """For all that runs here: an adapter's requests go on only where it is loaded."""
        asked = {record.asked.model for record in self.parts.frames.running if record.asked is not None}
        return self.parts.somebody_is_ready(asked)

    async def _move(self, leaving: list[AttemptRecord], until: float, *, keep: bool) -> None:
        """With `keep` their blocks go to vaults: nobody is there to fetch them, or they cannot be fetched here."""
        clock = asyncio.get_running_loop().time
        settled_by = max(until - LAST_S / 2, (clock() + until) / 2)  # readers are told even if a step hangs
        keys = [record.key for record in leaving]
        for record in leaving:
            if record.trace is not None:
                record.trace.moving_since = time.time_ns()
        try:
            async with asyncio.timeout_at(settled_by):
                await self.parts.engine.let_go(keys, keep=keep)
                if keep:
                    await self.parts.tiers.settled()
        except TimeoutError:
            log.warning("the engine has not let go of all blocks in time")
        except KvfleetError as error:  # the engine is gone
            log.warning("blocks are not handed over: %s", error)
        self.parts.broadcast.flush()  # placement should know what is here before it decides
        leaving = [record for record in leaving if record.terminal is None and not record.is_offered]
        watched = [record for record in leaving if _needs_placement(record)]
        moved = [record for record in leaving if not _needs_placement(record)]
        now = clock()
        self.parts.outbox.send_frames([self._end(record, now) for record in moved])
        await asyncio.gather(*(self._send(record, until) for record in watched))
        log.info("moved %d requests, %d of them as capsules", len(moved) + len(watched), len(watched))

    def _end(self, record: AttemptRecord, now: float) -> tuple[AttemptRecord, Frame]:
        """`Moved`, or Cancelled if its last reader left after the engine had let go of it."""
        if record.is_left:
            return self.parts.frames.end(record, record.failed(Cancelled("the request was cancelled")), now)
        self.moved_total += 1
        self._moved.append(record)
        to = record.asked.then or None if record.asked is not None and record.has_spoken else None
        return self.parts.frames.end(record, Moved(*record.key, record.output_tokens, to), now)

    async def _send(self, record: AttemptRecord, until: float) -> None:
        """Have a placement move a bare producer's request; if none does, the producer is told to ask again."""
        work_for(None if record.trace is None else record.trace.span)
        clock = asyncio.get_running_loop().time
        carried = _plain(record)
        if record.terminal is not None or record.asked is None or carried is None:
            return  # it ended, a moment ago
        asked = replace(record.asked, inbox=carried.inbox, encoding=carried.encoding)
        capsule = Capsule(record.tenant, self.parts.record.id, _carried(record, asked, self.parts.record.id, clock()))
        record.is_offered = True  # the engine may not have let go of it yet
        limit_s = min(CAPSULE_S, max(until - clock(), LEAST_S))
        refusal: Draining | None = None
        request, about = record.request, {"request": record.request}
        placements = self.parts.subjects.placement_capsules()
        try:
            await self.parts.connection.request(placements, codec.encode(capsule), limit_s)
        except (KvfleetError, TimeoutError) as error:
            why = "no placement is there to move it" if isinstance(error, WorkerLost) else str(error)
            log.warning("request %s is not moved: %s", request, why, extra=about)
            refusal = Draining(f"worker {self.parts.record.id} is going, and the request could not be moved: {why}")
        if record.terminal is not None:
            log.info("request %s ended here while it was offered to placement", request, extra=about)
        elif record.is_left:
            log.info("request %s was cancelled while it was offered to placement", request, extra=about)
            self.parts.outbox.send_frames([self._end(record, clock())])
        elif refusal is not None:
            self.parts.outbox.send_frames([self.parts.frames.end(record, record.failed(refusal), clock())])
        else:
            self._tell_moved(record, carried, clock())

    def _tell_moved(self, record: AttemptRecord, carried: Reader, now: float) -> None:
        """A placement has it: tell all readers but the producer."""
        _, moved = self._end(record, now)
        for watcher in record.watchers:
            self.parts.outbox.send(watcher, codec.encode_frames([moved]))
        late = record.failed(
            Draining(f"worker {self.parts.record.id} is going, and the request goes on for another reader")
        )
        for reader in record.readers:
            if reader != carried:
                self.parts.outbox.send_to(reader, [moved if reader.reads_batches else late])
        # Plain readers that were told to ask again send no cancel.
        record.readers = [one for one in record.readers if one == carried or one.reads_batches]


def _plain(record: AttemptRecord) -> Reader | None:
    """The bare producer, which cannot resume by itself."""
    return next((reader for reader in record.readers if not reader.reads_batches), None)


def _needs_placement(record: AttemptRecord) -> bool:
    return bool(record.watchers) and _plain(record) is not None and not record.is_left


def _carried(record: AttemptRecord, asked: GenerateRequest, worker: str, now: float) -> GenerateRequest:
    choices = []
    for number, track in enumerate(record.tracks):
        before = asked.continuation(number)
        chars = before.text_sent + sum(map(len, track.text))
        ended = track.ended.reason if track.ended is not None else None
        choices.append(Continuation(before.output_ids + tuple(track.ids), chars, ended))
    first = choices[0]
    one = len(choices) == 1
    return replace(
        asked,
        output_ids=first.output_ids if one else (),
        text_sent=first.text_sent if one else 0,
        continuations=() if one else tuple(choices),
        deadline_ms=None if asked.deadline_ms is None else max(0, int((record.deadline - now) * 1000)),
        source=worker,
        source_tokens=0,
        handed_over=True,
        scored=record.scored,
    )
