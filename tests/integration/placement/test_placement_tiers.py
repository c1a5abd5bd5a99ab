"""Vaults, preloading and draining over NATS: a scripted vault, small workers, a real replica and the real command."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from fake_fleet import MODEL, StartPlacement

from kvfleet.placement.index.kv_indexer import Follows
from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.block_hash import TenantRoots, chain, digest_term
from kvproto.buckets import Bucket
from kvproto.client import Client
from kvproto.connection import Connection, Message
from kvproto.errors import KvfleetError, WorkerLost
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import (
    AdminCommand,
    AdminReply,
    AdminRequest,
    BlockRun,
    Failed,
    GenerateRequest,
    Heartbeat,
    KvEvents,
    Load,
    MemberRecord,
    Placement,
    PlaceRequest,
    PreloadPlan,
    PreloadRequest,
    Rates,
    Role,
    Sampling,
    Snapshot,
    State,
    Tier,
    TierEvents,
    VictimReport,
    VictimRequest,
    WorkerRecord,
)
from kvproto.streams.generation import Generation
from kvproto.subjects import VAULT_INBOX, WORKER_INBOX, Subjects, inbox_prefix
from tests.support.waiting import LIMIT_S, until

KEY = b"secret"
PROMPT = tuple(range(1, 1601))
BLOCKS = tuple(chain(TenantRoots("", 16, (), KEY).of("public", PROMPT), PROMPT, 16))
ROOT = Path(__file__).parents[3]


class Holder:
    """A worker or vault as placement hears it: lease, heartbeats, events, snapshots; a worker obeys drain."""

    def __init__(self, url: str, subjects: Subjects, name: str, tier: Tier) -> None:
        self.name, self.tier = name, tier
        self.epoch = new_epoch()
        self.seq = self.digest = 0
        self.held: list[bytes] = []
        self.drained = 0
        self.refuses = False
        self.asked: list[GenerateRequest] = []
        self.load = Load(slots=8)
        self._url, self._subjects = url, subjects
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> Holder:
        space = VAULT_INBOX if self.tier is Tier.VAULT else WORKER_INBOX
        self.connection = await Connection.open(self._url, name=self.name, inbox_prefix=inbox_prefix(space, self.name))
        await self.connection.subscribe(self._subjects.blocks(self.name), self._on_snapshot)
        record: WorkerRecord | MemberRecord
        if self.tier is Tier.VAULT:
            record = MemberRecord(
                self.name, self.epoch, "", State.READY, Role.VAULT, "h", 1, codec.supported_versions()
            )
        else:
            await self.connection.subscribe(self._subjects.worker_admin(self.name), self._on_admin)
            await self.connection.subscribe(self._subjects.worker_generate_all(self.name), self._on_generate)
            record = WorkerRecord(
                self.name, self.epoch, "", State.READY, MODEL, "", "h", 1, codec.supported_versions(),
                block_bytes=1_000_000, data_plane=("tcp:127.0.0.1:1",), kv_format=b"f" * 16,
            )  # fmt: skip
        await self.connection.synced()
        self.lease = Lease(await Bucket.open(self.connection, self._subjects.members_bucket), record)
        await self.lease.register()
        self._beating = asyncio.create_task(self._beat())
        return self

    async def say(self, stored: tuple[bytes, ...] = (), *, lose: bool = False) -> None:
        self.seq += 1
        for one in stored:
            self.digest ^= digest_term(one)
        self.held += stored
        event = KvEvents(self.epoch, self.seq, (TierEvents(self.tier, False, (BlockRun(b"", stored),)),))
        if not lose:
            await self.connection.publish(self._subjects.events(self.name), codec.encode_events(event))

    async def _on_snapshot(self, message: Message) -> None:
        part = Snapshot(self.epoch, self.seq, self.tier, 0, 1, self.digest, b"".join(self.held))
        await self.connection.publish(message.reply, codec.encode(part))

    async def _on_admin(self, message: Message) -> None:
        ask = codec.decode(AdminRequest, message.data)
        self.drained += ask.command is AdminCommand.DRAIN
        answer = AdminReply(code="unavailable", message="not now") if self.refuses else AdminReply()
        await self.connection.publish(message.reply, codec.encode(answer))

    async def _on_generate(self, message: Message) -> None:
        """Refused for good: what matters is what it was asked."""
        ask = codec.decode(GenerateRequest, message.data)
        self.asked.append(ask)
        refusal = Failed(ask.request, ask.attempt, "context_length_exceeded", "no")
        await self.connection.publish(message.reply, codec.encode_frames([refusal]))

    async def _beat(self) -> None:
        rates = Rates(8000.0, restore_bytes_per_s={"vault": 2e9, "peer": 2e9})
        while True:
            state, seq, digest = self.lease.record.state, self.seq, self.digest
            beat = Heartbeat(self.name, self.epoch, state, self.load, rates, seq, digest)
            await self.connection.publish(self._subjects.heartbeat(self.name), codec.encode(beat))
            await self.lease.renew()
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
            self._beating = None
            await self.lease.release()
            await self.connection.close()


class Tiered:
    """Two workers, a vault, and a replica that follows them all."""

    def __init__(self, loop: PlacementLoop, url: str, subjects: Subjects, *holders: Holder) -> None:
        self.loop, self.url, self.subjects = loop, url, subjects
        self.w0, self.w1, self.vault = holders


@pytest_asyncio.fixture
async def fleet(nats_url: str, fleet_buckets: Subjects, start_placement: StartPlacement) -> AsyncIterator[Tiered]:
    loop = await start_placement("cost", KEY)
    named = (("w0", Tier.DEVICE), ("w1", Tier.DEVICE), ("v0", Tier.VAULT))
    holders = [Holder(nats_url, fleet_buckets, name, tier) for name, tier in named]
    try:
        for one in holders:
            await one.start()
        await until(lambda: all(loop.core.indexer.state_of(one.name) is Follows.EXACT for one in holders))
        yield Tiered(loop, nats_url, fleet_buckets, *holders)
    finally:
        for one in holders:
            await one.stop()


async def place(requester: Connection, subjects: Subjects, request: str) -> Placement:
    ask = PlaceRequest(request, MODEL, prompt_ids=PROMPT)
    reply = await requester.request(subjects.place("public", MODEL), codec.encode(ask), LIMIT_S)
    return codec.decode(Placement, reply.data)


async def test_a_vault_is_followed_through_a_lost_event_a_new_life_and_its_end(
    fleet: Tiered, requester: Connection
) -> None:
    index = fleet.loop.core.indexer
    await fleet.vault.say(BLOCKS[:60])
    await until(lambda: index.vaults() == (1, 60))
    assert (await place(requester, fleet.subjects, "r1")).expected_hit == {"vault": 960}
    await fleet.vault.say(BLOCKS[60:80], lose=True)
    await until(lambda: index.vaults() == (1, 80))
    assert fleet.loop.executor.snapshots_asked_total >= 1
    await fleet.vault.stop()
    await until(lambda: index.vaults() == (0, 0))
    assert fleet.loop.core.vaults == {}
    again = await Holder(fleet.url, fleet.subjects, "v0", Tier.VAULT).start()
    try:
        await again.say(BLOCKS[:10])
        await until(lambda: index.vaults() == (1, 10))
    finally:
        await again.stop()


async def test_a_vaults_record_that_runs_out_ends_it_and_a_later_life_replaces_one(fleet: Tiered) -> None:
    index = fleet.loop.core.indexer
    await fleet.vault.say(BLOCKS[:60])
    await until(lambda: index.vaults() == (1, 60))
    later = Holder(fleet.url, fleet.subjects, "v0", Tier.VAULT)
    assert fleet.vault._beating is not None
    fleet.vault._beating.cancel()
    await later.start()
    try:
        await until(lambda: index.vaults() == (1, 0))
        assert later._beating is not None
        later._beating.cancel()
        await until(lambda: fleet.loop.core.vaults == {})
    finally:
        later._beating = None
        await later.lease.release()
        await later.connection.close()


async def test_the_worker_is_told_whom_to_pull_from(fleet: Tiered, client: Client) -> None:
    await fleet.w0.say(BLOCKS)
    await until(lambda: len(fleet.loop.core.indexer.index) == 100)
    for worker in ("w1", "w0"):
        asked = Generation(
            MODEL, Sampling(4), prompt_ids=PROMPT, tenant="public", deadline_s=5.0, policy="direct", worker=worker
        )
        with pytest.raises(KvfleetError):
            async with client.generate(asked) as stream:
                async for _ in stream:
                    pass
    assert [(one.source, one.source_tokens) for one in fleet.w1.asked] == [("w0", 1600)]
    assert [(one.source, one.source_tokens) for one in fleet.w0.asked] == [("", 0)]


async def test_a_new_worker_is_told_what_is_in_demand(fleet: Tiered, requester: Connection) -> None:
    await fleet.w0.say(BLOCKS)
    await until(lambda: len(fleet.loop.core.indexer.index) == 100)
    for number in range(3):
        await place(requester, fleet.subjects, f"r{number}")
    asker = await Connection.open(fleet.url, name="worker-w9", inbox_prefix=inbox_prefix(WORKER_INBOX, "w9"))
    try:
        ask = PreloadRequest("w9", MODEL, "", 16, 40)
        subject = fleet.subjects.placement_preload()
        reply = await asker.request(subject, codec.encode(ask), LIMIT_S)
        (hot,) = codec.decode(PreloadPlan, reply.data).chains
        assert (hot.hashes, hot.source) == (b"".join(BLOCKS[:40]), "w0")
        assert fleet.loop.question_desk.preload_answers_total == 1
        for garbage in (b"", b"\xff" * 9, codec.encode(VictimRequest("m"))[:-1]):
            with pytest.raises(TimeoutError):
                await asker.request(subject, garbage, 0.1)
        await asker.publish(subject, codec.encode(ask), reply=fleet.subjects.worker_cancel("w0"))
        await until(lambda: fleet.loop.malformed_total == 3)
        await until(lambda: fleet.loop.ignored_total == 1)
    finally:
        await asker.close()


async def test_the_victim_is_asked_for_and_garbage_is_not_answered(fleet: Tiered, requester: Connection) -> None:
    await fleet.w0.say(BLOCKS)
    await fleet.w1.say(BLOCKS[:90])
    await fleet.vault.say(BLOCKS[95:])
    index = fleet.loop.core.indexer
    await until(lambda: index.vaults() == (1, 5) and index.index.held_by(index.holder_of("w1") or 0) == 90)
    subject = fleet.subjects.placement_victim()
    reply = await requester.request(subject, codec.encode(VictimRequest()), LIMIT_S)
    report = codec.decode(VictimReport, reply.data)
    assert {one.worker: one.unique_blocks for one in report.workers} == {"w0": 5, "w1": 0}
    with pytest.raises(TimeoutError):
        await requester.request(subject, b"\x00garbage", 0.1)
    assert fleet.loop.question_desk.victim_answers_total == 1


# ---------------------------------------------------------------------------------------------- kvfleet drain


async def drain(subjects: Subjects, url: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "kvfleet.cli.main", "drain", *arguments,
        "--nats-url", url, "--namespace", subjects.namespace,
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}", "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return process.returncode or 0, out.decode(), err.decode()


async def test_the_cheapest_worker_is_drained_and_a_dry_run_drains_nobody(fleet: Tiered) -> None:
    await fleet.w0.say(BLOCKS)
    fleet.w1.load = replace(fleet.w1.load, running=3)
    await until(lambda: len(fleet.loop.core.indexer.index) == 100)
    await until(lambda: fleet.loop.core.fleet.workers["w1"].load.running == 3)
    code, out, err = await drain(fleet.subjects, fleet.url, "--cheapest", "--dry-run", "--model", MODEL)
    assert (code, out) == (0, "w0\n"), err
    assert "* w0" in err
    assert "100" in err
    assert fleet.w0.drained == 0
    code, out, err = await drain(fleet.subjects, fleet.url, "w1")
    assert (code, out) == (0, "w1\n"), err
    assert "w1 is draining" in err
    assert (fleet.w0.drained, fleet.w1.drained) == (0, 1)


async def test_what_cannot_be_drained_is_said(fleet: Tiered) -> None:
    asked = [
        (("--cheapest", "w0"), 2, "name a worker"),
        ((), 2, "name a worker"),
        (("no such.worker",), 2, "is no worker's id"),
        (("w77",), 1, "no worker w77 is there"),
        (("--cheapest", "--model", "other"), 1, "no worker of other is ready"),
    ]
    answers = await asyncio.gather(*(drain(fleet.subjects, fleet.url, *arguments) for arguments, _, _ in asked))
    for (arguments, code, told), (found, out, err) in zip(asked, answers, strict=True):
        assert (found, out) == (code, ""), (arguments, err)
        assert told in err
    fleet.w0.refuses = True
    code, out, err = await drain(fleet.subjects, fleet.url, "w0")
    assert (code, out) == (1, "")
    assert "w0: not now" in err
    await fleet.w1.stop()
    await until(lambda: len(fleet.loop.core.fleet.workers) == 1)
    for arguments, told in (
        (("--cheapest",), "no model has two ready workers"),
        (("--cheapest", "--model", MODEL), "w0 is the only ready worker of demo"),
    ):
        code, out, err = await drain(fleet.subjects, fleet.url, *arguments)
        assert (code, out) == (1, "")
        assert told in err
    assert fleet.w0.drained == 1, "and then it refused"


async def test_without_placement_a_named_worker_is_drained_and_none_can_be_chosen(
    nats_url: str, fleet_buckets: Subjects
) -> None:
    worker = await Holder(nats_url, fleet_buckets, "w0", Tier.DEVICE).start()
    try:
        with pytest.raises(WorkerLost):
            await worker.connection.request(fleet_buckets.placement_victim(), codec.encode(VictimRequest()), 1.0)
        chosen, named, nowhere = await asyncio.gather(
            drain(fleet_buckets, nats_url, "--cheapest"),
            drain(fleet_buckets, nats_url, "w0"),
            drain(fleet_buckets, "nats://127.0.0.1:1", "w0"),
        )
        assert chosen[0] == nowhere[0] == 1
        assert "no placement answers" in chosen[2]
        assert named[:2] == (0, "w0\n")
        assert "is not known" in named[2]
        assert "127.0.0.1:1" in nowhere[2]
        assert worker.drained == 1
    finally:
        await worker.stop()
