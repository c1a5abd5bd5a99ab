"""Many workers of unlimited speed in one process: they accept, and send frames that were encoded beforehand.

    python -m benchmarks.ingress._token_source NATS_URL SOURCE FIRST WORKERS STREAMS TOKENS

Waits until its workers have been given STREAMS requests in all, then sends TOKENS tokens to each: for every step and
every pair of worker and ingress one message with all sequences that the two share, as a worker does. Then it waits for
the next STREAMS requests. It is on one connection, and sends as fast as NATS takes it.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace

import uvloop

from kvfleet.worker.backend import worker_record
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.settings import WorkerSettings
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message
from kvproto.members import LEASE_PERIOD_S
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
    WorkerRecord,
)
from kvproto.subjects import WORKER_INBOX, Subjects, inbox_prefix, member_key

MESSAGES_IN_FLIGHT = 512
PIECES = (" the", " king", "ly", " and", ",", " thou", " art", ".\n")
BEAT_S = 0.5
SETTLE_S = 0.3  # from the last request to the first token


def name_of(worker: int) -> str:
    return f"t-{worker:04}"


class TokenSource:
    def __init__(self, connection: Connection, first: int, workers: int, streams: int, tokens: int) -> None:
        self._connection = connection
        self._subjects = Subjects()
        self._streams, self._tokens = streams, tokens
        self._waiting: list[tuple[str, GenerateRequest]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.bundle = read_bundle(DEMO_FOLDER, "demo", load_format="auto", dtype="auto", block_size=16)
        self._records: dict[str, WorkerRecord] = {}
        for number in range(first, first + workers):
            name = name_of(number)
            record = worker_record(WorkerSettings(id=name), name, self.bundle, 256)
            self._records[name] = replace(record, state=State.READY)

    async def start(self) -> None:
        subjects = self._subjects
        for name in self._records:
            await self._connection.subscribe(subjects.worker_generate_all(name), self._on_generate)
            await self._connection.subscribe(subjects.worker_admin(name), self._on_admin)
            for subject in (subjects.worker_resend(name), subjects.worker_resend_all(name)):
                await self._connection.subscribe(subject, self._on_resend)
        await Bucket.open(self._connection, subjects.members_bucket)
        await self._renew()

    async def live(self) -> None:
        """Records and heartbeats, for ever."""
        while True:
            await self._renew()
            for _ in range(round(LEASE_PERIOD_S / BEAT_S)):
                for name, record in self._records.items():
                    beat = codec.encode(Heartbeat(name, record.epoch, State.READY))
                    await self._connection.publish(self._subjects.heartbeat(name), beat)
                await asyncio.sleep(BEAT_S)

    async def _renew(self) -> None:
        for name, record in self._records.items():
            subject = f"$KV.{self._subjects.members_bucket}.{member_key('worker', name)}"
            await self._connection.publish(subject, codec.encode(record))

    async def _on_admin(self, message: Message) -> None:
        await self._connection.publish(message.reply, codec.encode(AdminReply(data=codec.encode(self.bundle))))

    async def _on_resend(self, message: Message) -> None:
        """All is on its way."""
        asked = codec.decode(ResendRequest, message.data)
        progress = Progress(asked.request, asked.attempt, 0)
        await self._connection.publish(asked.inbox, codec.encode_frames([progress]))

    async def _on_generate(self, message: Message) -> None:
        name = message.subject.split(".")[2]
        request = codec.decode(GenerateRequest, message.data)
        accepted = Accepted(request.request, request.attempt, name, self._records[name].epoch)
        await self._connection.publish(message.reply, codec.encode_frames([accepted]))
        self._waiting.append((name, request))
        if len(self._waiting) == self._streams:
            batch, self._waiting = self._waiting, []
            task = asyncio.create_task(self._send(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, batch: list[tuple[str, GenerateRequest]]) -> None:
        together: dict[tuple[str, str], list[GenerateRequest]] = {}
        for name, request in batch:
            together.setdefault((name, request.inbox), []).append(request)
        ways = []
        for (name, inbox), requests in together.items():
            ways.append((inbox, self._frames(name, requests)))
            await asyncio.sleep(0)  # the server asks now and then whether we are there
        await asyncio.sleep(SETTLE_S)
        sent = 0
        for step in range(self._tokens + 2):
            for inbox, frames in ways:
                await self._connection.publish(inbox, frames[step])
                sent += 1
                if sent % MESSAGES_IN_FLIGHT == 0:
                    await self._connection.synced()

    def _frames(self, worker: str, requests: list[GenerateRequest]) -> list[bytes]:
        started: list[Frame] = [Started(r.request, r.attempt, worker, len(r.prompt_ids), {}) for r in requests]
        frames = [codec.encode_frames(started)]
        for index in range(self._tokens):
            text = (PIECES[index % len(PIECES)],)
            frames.append(codec.encode_frames([Tokens(r.request, r.attempt, 0, index, (300,), text) for r in requests]))
        ends: list[Frame] = [
            Finished(r.request, r.attempt, FinishReason.LENGTH, len(r.prompt_ids), self._tokens) for r in requests
        ]
        return [*frames, codec.encode_frames(ends)]


async def main(url: str, source: str, first: int, workers: int, streams: int, tokens: int) -> None:
    connection = await Connection.open(url, name=f"tokens-{source}", inbox_prefix=inbox_prefix(WORKER_INBOX, source))
    tokens_of = TokenSource(connection, first, workers, streams, tokens)
    await tokens_of.start()
    print("ready", flush=True)
    await tokens_of.live()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])))
