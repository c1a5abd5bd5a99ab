"""A worker of unlimited speed: speaks the wire, computes nothing, sends frames that it encoded beforehand.

    python -m benchmarks.ingress._frame_source NATS_URL STREAMS TOKENS

Waits for STREAMS requests, accepts them, then sends TOKENS tokens to each, one message per step with all of them, as
fast as NATS takes them; then waits for the next STREAMS requests.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

from kvfleet.worker.backend import worker_record
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.settings import WorkerSettings
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message
from kvproto.members import Lease
from kvproto.messages import (
    Accepted,
    AdminReply,
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    Heartbeat,
    Progress,
    ResendRequest,
    Started,
    State,
    Tokens,
)
from kvproto.subjects import WORKER_INBOX, Subjects, inbox_prefix

STEPS_IN_FLIGHT = 32
PIECES = (" the", " king", "ly", " and", ",", " thou", " art", ".\n")


class FrameSource:
    def __init__(self, connection: Connection, streams: int, tokens: int) -> None:
        self._connection = connection
        self._streams = streams
        self._tokens = tokens
        self._waiting: list[GenerateRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()
        settings = WorkerSettings(id="source")
        self.bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
        self.record = worker_record(settings, "source", self.bundle, settings.slots)

    async def on_admin(self, message: Message) -> None:
        await self._connection.publish(message.reply, codec.encode(AdminReply(data=codec.encode(self.bundle))))

    async def on_resend(self, message: Message) -> None:
        """All is on its way."""
        asked = codec.decode(ResendRequest, message.data)
        progress = Progress(asked.request, asked.attempt, 0)
        await self._connection.publish(asked.inbox, codec.encode_frames([progress]))

    async def on_generate(self, message: Message) -> None:
        request = codec.decode(GenerateRequest, message.data)
        accepted = Accepted(request.request, request.attempt, "source", self.record.epoch)
        await self._connection.publish(message.reply, codec.encode_frames([accepted]))
        self._waiting.append(request)
        if len(self._waiting) == self._streams:
            batch, self._waiting = self._waiting, []
            task = asyncio.create_task(self._send(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: list[GenerateRequest]) -> None:
        inbox = batch[0].inbox
        started: list[Frame] = [Started(r.request, r.attempt, "source", len(r.prompt_ids), {}) for r in batch]
        steps = [codec.encode_frames(started)]
        for index in range(self._tokens):
            text = (PIECES[index % len(PIECES)],)
            steps.append(codec.encode_frames([Tokens(r.request, r.attempt, 0, index, (300,), text) for r in batch]))
        reason = FinishReason.LENGTH
        ends: list[Frame] = [Finished(r.request, r.attempt, reason, len(r.prompt_ids), self._tokens) for r in batch]
        steps.append(codec.encode_frames(ends))
        await asyncio.sleep(0.2)
        for number, data in enumerate(steps):
            await self._connection.publish(inbox, data)
            if number % STEPS_IN_FLIGHT == 0:
                await self._connection.synced()

    async def beat(self, subjects: Subjects) -> None:
        beat = codec.encode(Heartbeat("source", self.record.epoch, State.READY))
        while True:
            await self._connection.publish(subjects.heartbeat("source"), beat)
            await asyncio.sleep(0.5)


async def main(url: str, streams: int, tokens: int) -> None:
    subjects = Subjects()
    prefix = inbox_prefix(WORKER_INBOX, "source")
    connection = await Connection.open(url, name="worker-source", inbox_prefix=prefix)
    source = FrameSource(connection, streams, tokens)
    await connection.subscribe(subjects.worker_generate_all("source"), source.on_generate)
    await connection.subscribe(subjects.worker_admin("source"), source.on_admin)
    for subject in (subjects.worker_resend("source"), subjects.worker_resend_all("source")):
        await connection.subscribe(subject, source.on_resend)
    lease = Lease(await Bucket.open(connection, subjects.members_bucket), source.record)
    await lease.register()
    await lease.set(replace(source.record, state=State.READY))
    await asyncio.gather(lease.run(lambda error: sys.exit(str(error))), source.beat(subjects))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
