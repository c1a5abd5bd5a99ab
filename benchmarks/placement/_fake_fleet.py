"""Many workers in one process and on one NATS connection: all that a fleet hears of a worker, and no engine.

    python -m benchmarks.placement._fake_fleet NATS_URL SOURCE FIRST WORKERS BLOCKS

Each has a record in the members bucket that is renewed every second, heartbeats twice a second with the digest and the
number of its last event, a watch of vaults and one of keys, three connections to each vault, block events (16 blocks
stored, the 16 oldest removed) at a rate that `bench.fleet.<SOURCE>` sets, snapshots, and milestones of what
`bench.placed.<worker>` tells it that it was given. What needs no answer is published without waiting for one, records
too: a fleet of a thousand must cost less than what it loads.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import reduce
from itertools import cycle
from operator import xor

import msgpack
import uvloop

from benchmarks.harness.processes import cpu_seconds
from benchmarks.placement import _fleet_prompts as prompts
from benchmarks.placement._fake_data_plane import FakeDataPlane
from kvproto import codec
from kvproto.block_hash import digest_term
from kvproto.connection import Connection, Message
from kvproto.ids import new_epoch
from kvproto.messages import (
    BlockRun,
    Heartbeat,
    KvEvents,
    Load,
    Milestone,
    Milestones,
    Passed,
    Rates,
    Snapshot,
    State,
    Tier,
    TierEvents,
    WorkerRecord,
)
from kvproto.subjects import WORKER_INBOX, Subjects, inbox_prefix, member_key

TICK_S, RECORD_S, BEAT_S, MILESTONES_S = 0.005, 1.0, 0.5, 0.02
RUN = 16  # blocks stored and removed by an event
HASHES_PER_PART = 48 * 1024
SERVED_S = 0.2  # from the acceptance of a request to its end


class FakeWorker:
    def __init__(self, number: int, blocks: int) -> None:
        self.name = prompts.name_of(number)
        self.epoch = new_epoch()
        self.seq = 1
        self.milestones: list[Milestone] = []
        self.milestones_at = 0.0
        self._number = number
        shared = [prompts.prompt_hashes(prompt)[:depth] for prompt, depth in prompts.held_prompts(number, blocks)]
        own = prompts.own_hashes(number)
        half = len(own) // 2
        self._kept = [one for hashes in (*shared, own[:half]) for one in hashes]
        self._growth = own[half:]
        rest = os.urandom(16 * max(RUN, blocks - len(self._kept) - half))
        self._old = deque(rest[at : at + 16 * RUN] for at in range(0, len(rest) - 16 * RUN + 1, 16 * RUN))
        self._kept = list(dict.fromkeys(self._kept))  # prompts may begin alike, and a block is stored once
        self.digest = reduce(xor, (digest_term(one) for held in self._old for one in _split(held)), 0)
        self.digest ^= reduce(xor, map(digest_term, self._kept), 0)

    def record(self) -> bytes:
        return codec.encode(
            WorkerRecord(
                self.name, self.epoch, "l1", State.READY, prompts.MODEL, "", "localhost", 1,
                codec.supported_versions(), model_revision=prompts.REVISION, block_size=prompts.BLOCK_SIZE,
                blocks=16_384, slots=64, block_bytes=2_097_152,
            )
        )  # fmt: skip

    def heartbeat(self) -> bytes:
        load = Load(running=self._number % 7, slots=64, queued_prefill_tokens=200 * (self._number % 11))
        rates = Rates(8_000.0 + 50 * (self._number % 64), 20.0, 1_000.0, {"host": 8e9})
        beat = Heartbeat(self.name, self.epoch, State.READY, load, rates, self.seq, self.digest)
        return codec.encode(replace(beat, tier_digest=self.digest))  # all on the device: both are the same

    def event(self) -> bytes:
        """Sixteen new blocks take the place of the oldest ones."""
        stored, removed = os.urandom(16 * RUN), self._old.popleft()
        self._old.append(stored)
        return self._changed(_split(removed), _split(stored))

    def grow(self) -> bytes:
        stored, self._growth = self._growth, []
        self._kept += stored
        return self._changed([], stored)

    def snapshot(self) -> list[bytes]:
        held = b"".join([*self._kept, *self._old])
        step = 16 * HASHES_PER_PART
        parts = [held[at : at + step] for at in range(0, len(held), step)]
        return [
            codec.encode(Snapshot(self.epoch, self.seq, Tier.DEVICE, part, len(parts), self.digest, raw, self.digest))
            for part, raw in enumerate(parts)
        ]

    def _changed(self, removed: list[bytes], stored: list[bytes]) -> bytes:
        self.seq += 1
        for one in (*removed, *stored):
            self.digest ^= digest_term(one)
        changes = [TierEvents(Tier.DEVICE, True, (BlockRun(b"", tuple(removed)),))] if removed else []
        changes.append(TierEvents(Tier.DEVICE, False, (BlockRun(b"\0" * 16, tuple(stored)),)))
        return codec.encode_events(KvEvents(self.epoch, self.seq, tuple(changes)))


def _split(raw: bytes) -> list[bytes]:
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


class Source:
    """The process. Everything runs on one event loop, from one ticking task."""

    def __init__(self, connection: Connection, source: str, workers: list[FakeWorker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self._connection = connection
        self._subjects = Subjects()
        self._source = source
        self._rate = 0.0  # events/s of all workers together
        self._owed = 0.0
        self._events = self._snapshots = self._milestones = 0
        self._served: deque[tuple[float, FakeWorker, Milestone, Milestone]] = deque()
        self._talking: set[str] = set()  # those with milestones to tell
        self._data_plane = FakeDataPlane(connection, list(self.workers))

    async def start(self) -> None:
        subscribe, subjects = self._connection.subscribe, self._subjects
        await subscribe(subjects.blocks("x").replace(".x", ".*"), self._on_blocks)
        await subscribe(subjects.worker_admin("x").replace(".x.", ".*."), self._on_admin)
        await subscribe("bench.placed.*", self._on_placed)
        await subscribe(f"bench.fleet.{self._source}", self._on_control)
        for worker in self.workers.values():
            await self._renew(worker)
        await self._connection.synced()
        await self._data_plane.start()

    async def run(self) -> None:
        turn = cycle(self.workers.values())
        names = list(self.workers)
        renewed = beaten = 0.0
        before = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed, before = min(now - before, 0.25), now
            renewed = await self._some(names, renewed, passed / RECORD_S, self._renew)
            beaten = await self._some(names, beaten, passed / BEAT_S, self._beat)
            self._owed += passed * self._rate
            while self._owed >= 1:
                self._owed -= 1
                worker = next(turn)
                await self._tell(worker, worker.event())
            await self._tell_milestones(now)

    async def _some(
        self, names: list[str], at: float, share: float, do: Callable[[FakeWorker], Awaitable[None]]
    ) -> float:
        """Let those do it whose turn comes in this share of a round; returns how many turns there have been."""
        end = at + share * len(names)
        for number in range(int(at), int(end)):
            await do(self.workers[names[number % len(names)]])
        return end

    async def _renew(self, worker: FakeWorker) -> None:
        subject = f"$KV.{self._subjects.members_bucket}.{member_key('worker', worker.name)}"
        await self._connection.publish(subject, worker.record())

    async def _beat(self, worker: FakeWorker) -> None:
        await self._connection.publish(self._subjects.heartbeat(worker.name), worker.heartbeat())

    async def _tell(self, worker: FakeWorker, event: bytes) -> None:
        self._events += 1
        await self._connection.publish(self._subjects.events(worker.name), event)

    async def _tell_milestones(self, now: float) -> None:
        while self._served and self._served[0][0] <= now:
            _, worker, *ended = self._served.popleft()
            worker.milestones += ended
            self._talking.add(worker.name)
        for name in list(self._talking):
            worker = self.workers[name]
            if now - worker.milestones_at >= MILESTONES_S:
                worker.milestones_at = now
                items, worker.milestones = tuple(worker.milestones), []
                self._milestones += len(items)
                self._talking.discard(name)
                data = codec.encode(Milestones(name, worker.epoch, items))
                await self._connection.publish(self._subjects.milestones(name), data)

    # ------------------------------------------------------------------ what it is asked

    async def _on_blocks(self, message: Message) -> None:
        worker = self.workers.get(message.subject.rsplit(".", 1)[-1])
        if worker is not None:
            self._snapshots += 1
            for part in worker.snapshot():
                await self._connection.publish(message.reply, part)

    async def _on_admin(self, message: Message) -> None:
        if message.reply and message.subject.split(".")[-2] in self.workers:
            await self._connection.publish(message.reply, b"alive")

    async def _on_placed(self, message: Message) -> None:
        """It has been given a request: it takes it, starts it, and is done with it soon."""
        worker = self.workers.get(message.subject.rsplit(".", 1)[-1])
        if worker is None:
            return
        request, tokens, found = msgpack.unpackb(message.data)
        who = prompts.TENANT, request, 0
        started = Milestone(*who, Passed.STARTED, 0.001, tokens, found)
        worker.milestones += [Milestone(*who, Passed.ACCEPTED), started]
        self._talking.add(worker.name)
        first = Milestone(*who, Passed.FIRST_TOKEN, SERVED_S)
        ended = Milestone(*who, Passed.ENDED, SERVED_S, output_tokens=1)
        self._served.append((time.monotonic() + SERVED_S, worker, first, ended))

    async def _on_control(self, message: Message) -> None:
        asked = json.loads(message.data)
        self._rate = asked.get("rate", self._rate)
        if asked.get("grow"):
            for worker in self.workers.values():
                await self._tell(worker, worker.grow())
        answer = {
            "events": self._events,
            "snapshots": self._snapshots,
            "milestones": self._milestones,
            "records_heard": self._data_plane.heard,
            "vault_connections": self._data_plane.connected,
            "cpu_s": cpu_seconds(os.getpid()),
        }
        await self._connection.publish(message.reply, json.dumps(answer).encode())


async def main(url: str, source: str, first: int, count: int, blocks: int) -> None:
    connection = await Connection.open(url, name=f"fleet-{source}", inbox_prefix=inbox_prefix(WORKER_INBOX, source))
    workers = [FakeWorker(number, blocks) for number in range(first, first + count)]
    fleet = Source(connection, source, workers)
    await fleet.start()
    print("ready", flush=True)
    await fleet.run()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])))
