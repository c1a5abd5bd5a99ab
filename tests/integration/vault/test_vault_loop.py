"""What a vault tells the fleet, whatever happens to its blocks meanwhile: events, snapshots and store say the same."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from vault_rig import Fleet, replayed, split

from kvfleet.placement.index.changes import read_changes
from kvfleet.placement.index.kv_indexer import Follows, KvIndexer
from kvfleet.placement.index.prefix_index import pack
from kvfleet.vault.loop import VaultLoop
from kvfleet.vault.store.block_table import BLOCKS_PER_EVENT, bytes_for
from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from kvproto import codec
from kvproto.block_hash import digest_term, in_tier
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.dataplane.server import DataPlaneServer
from kvproto.dataplane.serving import BlockStore
from kvproto.members import Lease
from kvproto.messages import KvEvents, Role, Snapshot, State, Tier
from kvservice.membership import member_record
from tests.support.kv_blocks import ROOT, Block, chain, hashes, state_of
from tests.support.waiting import LIMIT_S, until

ONE = bytes_for(chain(1)[0].header)


def put(store: BlockStore, one: Block) -> bool:
    buffer = store.reserve(one.header)
    if buffer is None:
        return False
    buffer[:] = one.payload
    return store.commit(one.header, buffer)


class Rig:
    """A vault's loop in the test's own; blocks are put into its store by threads of the test."""

    def __init__(self, fleet: Fleet, connection: Connection, loop: VaultLoop) -> None:
        self.fleet = fleet
        self.connection = connection
        self.loop = loop
        self.store = loop.store

    def put(self, one: Block) -> bool:
        return put(self.store, one)


@pytest_asyncio.fixture
async def rig(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Rig]:
    connection = await Connection.open(fleet.nats_url, name="vault-v0", inbox_prefix="_vlt.v0")
    bucket = await Bucket.open(connection, fleet.subjects.members_bucket)
    store = VaultStore(24 * ONE)
    server = DataPlaneServer(store, fleet.ring, "v0", unix_path=tmp_path / "run" / "v0.sock")
    fatal: list[str] = []
    loop = VaultLoop(
        connection, fleet.subjects, Lease(bucket, member_record(Role.VAULT, "v0")), store, server, fatal.append,
        states=VaultStore(4 * ONE),
    )  # fmt: skip
    await loop.start()
    yield Rig(fleet, connection, loop)
    await loop.stop()
    await connection.close()
    assert fatal == []
    store.check_integrity()


def digest_of(events: list[KvEvents]) -> int:
    digest = 0
    for event in events:
        for change in event.changes:
            for run in change.runs:
                for one in run.hashes:
                    digest ^= in_tier(digest_term(one), change.tier.number)
    return digest


def whole(parts: list[Snapshot]) -> list[list[Snapshot]]:
    """Snapshots put together: parts of one question follow one another."""
    found: list[list[Snapshot]] = []
    for part in parts:
        if part.part == 0:
            found.append([])
        found[-1].append(part)
    return found


async def test_snapshots_amid_puts_erasures_and_evictions_are_what_the_events_say(rig: Rig) -> None:
    """Three threads change what is held as fast as they can; no change is lost, told twice, or in a wrong event."""
    stop = threading.Event()
    forest = [chain(12, first_id=1000 * number) for number in range(8)]

    def change(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            blocks = chance.choice(forest)
            if chance.random() < 0.2:
                rig.store.erase(ROOT, hashes(blocks[chance.randrange(12) :]))
            else:
                for one in blocks:
                    rig.put(one)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        await rig.fleet.ask_snapshot("v0")
        await asyncio.sleep(0.02)
    stop.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await rig.fleet.ask_snapshot("v0")
    await until(lambda: rig.loop.snapshots_total == 61 and len(rig.fleet.parts) == 61)
    await until(lambda: rig.fleet.events and rig.fleet.events[-1].seq == rig.loop.log.seq)
    events, snapshots = rig.fleet.events, whole(rig.fleet.parts)
    assert len(snapshots) == 61
    assert len({parts[0].seq for parts in snapshots}) > 20
    assert len(events) < 200, "many changes in one event"
    for parts in snapshots:
        before = events[: parts[0].seq]
        held = {one for part in parts for one in split(part.hashes)}
        assert held == replayed(before)
        assert parts[0].tier_digest == digest_of(before)
    assert replayed(events) == held == {one.hash for one in rig.store.holdings()[1]}
    assert (rig.loop.log.seq, rig.loop.log.digest) == (events[-1].seq, digest_of(events))


async def test_states_are_told_by_the_blocks_behind_which_they_stand(rig: Rig) -> None:
    """As events and in snapshots, from a store of their own."""
    assert rig.loop.states is not None
    blocks, store = chain(6), VaultPools(rig.store, rig.loop.states)
    for one in (*blocks, *(state_of(blocks[at]) for at in (0, 2, 5))):
        assert put(store, one)
    await until(lambda: sum(len(run.hashes) for e in rig.fleet.events for c in e.changes for run in c.runs) == 9)
    assert store.erase(ROOT, hashes([*blocks[4:], *map(state_of, blocks[4:])])) == 3
    await until(lambda: any(change.removed for event in rig.fleet.events for change in event.changes))
    await rig.fleet.snapshot("v0")
    told = {part.tier: split(part.hashes) for part in rig.fleet.parts}
    assert sorted(told[Tier.STATE]) == sorted(hashes([blocks[0], blocks[2]]))
    assert sorted(told[Tier.VAULT]) == sorted(hashes(blocks[:4]))
    for tier, held in told.items():
        changes = [change for event in rig.fleet.events for change in event.changes if change.tier is tier]
        assert replayed([KvEvents("", 1, tuple(changes))]) == set(held)
    assert rig.fleet.parts[0].tier_digest == digest_of(rig.fleet.events) == rig.loop.heartbeat().tier_digest


@pytest.mark.usefixtures("compiled_kernels")
async def test_placement_notices_a_lost_event_by_the_heartbeat_and_pulls(rig: Rig) -> None:
    now = asyncio.get_running_loop().time
    indexer, blocks = KvIndexer(4096, 4), chain(20)
    epoch = rig.loop.record.epoch
    indexer.join("v0", epoch, vault=True)

    def pooled() -> int:
        return int(indexer.depths(pack(hashes(blocks)), ("any",))[-1, 0])

    for one in blocks[:10]:
        rig.put(one)
    await until(lambda: sum(len(run.hashes) for e in rig.fleet.events for c in e.changes for run in c.runs) == 10)
    for event in rig.fleet.events:
        indexer.on_changes("v0", read_changes(codec.encode_events(event)), now())
    assert indexer.state_of("v0") is Follows.EXACT
    assert pooled() == 10
    for one in blocks[10:]:
        rig.put(one)
    rig.store.erase(ROOT, hashes(blocks[15:]))  # nobody is told the indexer of these events
    await until(lambda: rig.loop.heartbeat().held == 15)
    await asyncio.sleep(0.2)
    seen = len(rig.fleet.beats)
    async with asyncio.timeout(LIMIT_S):
        while indexer.state_of("v0") is not Follows.BEHIND:
            for beat in rig.fleet.beats[seen:]:
                indexer.on_heartbeat(beat, now())
            seen = len(rig.fleet.beats)
            await asyncio.sleep(0.05)
    (pull,) = indexer.tick(now())
    assert (pull.worker, pull.epoch) == ("v0", epoch)
    await rig.fleet.ask_snapshot("v0")
    await until(lambda: rig.fleet.parts)
    for part in rig.fleet.parts:
        indexer.on_snapshot("v0", part, now())
    indexer.on_heartbeat(rig.loop.heartbeat(), now())
    assert indexer.state_of("v0") is Follows.EXACT
    assert pooled() == 15
    indexer.check_integrity()


async def test_more_changes_than_an_event_takes_are_several(rig: Rig) -> None:
    count = 2 * BLOCKS_PER_EVENT + 5
    (one,) = chain(1)
    with rig.store._lock:
        for number in range(count):
            names = {"hash": number.to_bytes(16, "big"), "parent": (number // 7).to_bytes(16, "little")}
            rig.store.table.add_on_disk(replace(one.header, **names))
    await until(lambda: sum(len(run.hashes) for e in rig.fleet.events for c in e.changes for run in c.runs) == count)
    assert len(rig.fleet.events) >= 3
    assert await rig.fleet.snapshot("v0") == replayed(rig.fleet.events)


async def test_questions_that_make_no_sense_are_counted_and_change_nothing(rig: Rig) -> None:
    subject = rig.fleet.subjects.blocks("v0")
    await rig.fleet.connection.publish(subject, b"\xff\xfe", reply="_plc.listener.s")
    await rig.fleet.connection.publish(subject, b"\xff\xfe", reply="kvf.worker.w0.admin")
    await rig.fleet.connection.publish(subject, b"")
    await until(lambda: rig.loop.malformed_total)
    assert await rig.fleet.snapshot("v0") == set()
    assert (rig.loop.malformed_total, rig.loop.snapshots_total) == (1, 1)
    assert rig.fleet.parts[0].seq == 0


async def test_a_vault_whose_record_was_deleted_registers_again_and_keeps_its_blocks(rig: Rig) -> None:
    for one in chain(5):
        rig.put(one)
    bucket = await Bucket.open(rig.fleet.connection, rig.fleet.subjects.members_bucket)
    await bucket.delete("vault.v0")
    async with asyncio.timeout(LIMIT_S):
        while (record := await rig.fleet.record("v0")) is None:
            await asyncio.sleep(0.05)
    assert record.epoch == rig.loop.record.epoch
    assert record.state is State.READY
    assert record.data_plane == rig.loop.server.addresses
    assert await rig.fleet.snapshot("v0") == set(hashes(chain(5)))
