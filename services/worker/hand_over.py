"""Loop: how a draining worker lets go of what it works on, so that nobody notices. Owned by the worker's event loop.

    those about to end do ──▶ somebody else is ready: all go ──▶ their readers say that it goes on ──▶ the process ends
                       │                ▲                  and pull the blocks from here
                       └─ nobody is ────┘ they go on here; when time runs out, their blocks go to vaults, and they go

A reader that can resume (a Client, an ingress) is told `Moved`, goes on elsewhere, and has its new worker bring the
blocks from this one; with its successor's first word it cancels the attempt here, and that is what is waited for. The
request of a bare producer travels as a `Capsule` to whichever placement takes it; the producer sees nothing of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvproto import codec
from kvproto.connection import Connection
from kvproto.errors import Draining, KvfleetError, WorkerLost
from kvproto.messages import Capsule, Continuation, Encoding, Failed, Frame, GenerateRequest, Moved
from kvproto.subjects import Subjects
from services.worker.broadcast import Broadcast
from services.worker.engine import Engine
from services.worker.engine_thread import EngineThread
from services.worker.frames import FrameBook, Record
from services.worker.outbox import Outbox
from services.worker.readers import Reader

log = logging.getLogger(__name__)

FINISH_S = 0.5  # what ends within this is not worth a move
LAST_S = 1.5  # of the time to drain, for moves when nobody was ready to take over
CAPSULE_S = 1.0  # for a placement to take one
LINGER_S = 0.25  # a capsule's successor has accepted, and may not have all blocks yet
POLL_S = 0.02

Key = tuple[str, int]


class HandOver:
    """`has_successor`: whether another worker of this model is ready."""

    def __init__(
        self,
        worker: str,
        connection: Connection,
        subjects: Subjects,
        engine: EngineThread,
        frames: FrameBook,
        outbox: Outbox,
        broadcast: Broadcast,
        has_successor: Callable[[], bool],
    ) -> None:
        self.moved_total = 0
        self._worker = worker
        self._connection = connection
        self._subjects = subjects
        self._engine = engine
        self._frames = frames
        self._outbox = outbox
        self._broadcast = broadcast
        self._has_successor = has_successor
        self._awaited: set[Key] = set()  # moved, and their blocks still wanted

    def let_go(self, request: str, attempt: int | None) -> None:
        """Its reader says that a moved request goes on elsewhere, or that nobody wants it."""
        self._awaited = {
            key for key in self._awaited if key[0] != request or (attempt is not None and key[1] != attempt)
        }

    async def run(self, limit_s: float) -> None:
        """Returns when nothing is left here that anybody needs, after `limit_s` at the latest."""
        loop = asyncio.get_running_loop()
        until = loop.time() + limit_s

        async def wait(condition: Callable[[], object], end: float) -> None:
            while condition() and loop.time() < end:
                await asyncio.sleep(POLL_S)

        await wait(lambda: self._frames.running_count, loop.time() + min(FINISH_S, limit_s / 4))
        alone = max(loop.time(), until - LAST_S)
        await wait(lambda: self._frames.running_count and not self._has_successor(), alone)
        if not self._frames.running_count:
            return
        await self._move(until)
        await wait(lambda: self._awaited, until)
        await wait(lambda: self._engine.is_lending, until)

    async def _move(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        to_vaults = not self._has_successor()
        keys = [(record.request, record.attempt) for record in self._frames.running]
        try:
            await self._engine.call(lambda engine: _hand_over(engine, keys, keep=to_vaults))
            while to_vaults and loop.time() < until - LAST_S / 2:
                if await self._engine.call(lambda engine: engine.is_settled):
                    break
                await asyncio.sleep(POLL_S)
        except KvfleetError as error:  # the engine is gone: what it told until now is all there is
            log.warning("blocks are not handed over: %s", error)
        self._broadcast.flush()  # who decides where they go on should know what is here
        moved = [record for record in self._frames.running if not record.watchers]
        watched = [record for record in self._frames.running if record.watchers]
        now = loop.time()
        self._awaited = {(record.request, record.attempt) for record in moved}
        self._outbox.send_frames([self._end(record, now) for record in moved])
        taken = await asyncio.gather(*(self._send(record) for record in watched))
        if any(taken):
            await asyncio.sleep(LINGER_S)
        log.info("moved %d requests, %d of them as capsules", len(moved) + len(watched), len(watched))

    def _end(self, record: Record, now: float) -> tuple[Record, Frame]:
        self.moved_total += 1
        return self._frames.end(record, Moved(record.request, record.attempt, record.output_tokens), now)

    async def _send(self, record: Record) -> bool:
        """Have a placement carry on a bare producer's request; without one the producer is told to ask again."""
        now = asyncio.get_running_loop().time()
        assert record.asked is not None
        carried = _cannot_resume(record.readers)
        asked = replace(record.asked, inbox=carried.inbox, encoding=carried.encoding)
        capsule = Capsule(record.tenant, self._worker, _carried(record, asked, self._worker, now))
        try:
            data = codec.encode(capsule)
            await self._connection.request(self._subjects.placement_capsules(), data, CAPSULE_S)
        except (KvfleetError, TimeoutError) as error:
            why = "no placement is there to move it" if isinstance(error, WorkerLost) else str(error)
            log.warning("request %s is not moved: %s", record.request, why)
            end = Draining(f"worker {self._worker} is going, and the request could not be moved: {why}")
            failed = Failed(
                record.request, record.attempt, end.code, end.message, end.retryable, None, record.output_tokens
            )
            self._outbox.send_frames([self._frames.end(record, failed, now)])
            return False
        _, moved = self._end(record, now)
        for watcher in record.watchers:
            self._outbox.send(watcher, codec.encode_frames([moved]))
        late = Draining(f"worker {self._worker} is going, and the request goes on for another reader")
        key = record.request, record.attempt
        failed = Failed(*key, late.code, late.message, late.retryable, None, record.output_tokens)
        for reader in record.readers:
            if reader != carried:
                self._outbox.send_to(reader, [moved if reader.encoding is Encoding.FRAMES else failed])
        return True


def _cannot_resume(readers: list[Reader]) -> Reader:
    """Whom a capsule is for: a bare producer. Readers of batches go on by themselves."""
    return next((reader for reader in readers if reader.encoding is not Encoding.FRAMES), readers[0])


def _hand_over(engine: Engine, keys: Iterable[Key], *, keep: bool) -> None:
    """On the engine's thread."""
    for request, attempt in keys:
        engine.hand_over(request, attempt, keep=keep)


def _carried(record: Record, asked: GenerateRequest, worker: str, now: float) -> GenerateRequest:
    """The request as another worker is to go on with it. Pure."""
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
    )
