"""A worker watches vaults alone, and looks other workers up when a request names them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvfleet.worker.network.tier_network import MOST_PEERS, Peers, TierNetwork
from kvfleet.worker.settings import WorkerSettings
from kvfleet.worker.tiers.source import SourceAddress
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.dataplane.keys import ensure_key
from kvproto.members import Lease, Members
from kvproto.messages import MemberRecord, Role, State, WorkerRecord
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S

ME = WorkerRecord("me", "e1", "", State.READY, "demo", "", "h", 1, codec.supported_versions(), kv_format=b"f" * 16)


def a_peer(name: str) -> WorkerRecord:
    return replace(ME, id=name, data_plane=(f"tcp:{name}:1",))


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(nats_url, name="worker-me", inbox_prefix="_wrk.me")
    yield connection
    await connection.close()


@pytest.fixture
async def bucket(connection: Connection, fleet_buckets: Subjects) -> Bucket:
    return await Bucket.open(connection, fleet_buckets.members_bucket)


async def test_the_records_of_workers_are_not_sent_to_who_watches_vaults(
    connection: Connection, bucket: Bucket, fleet_buckets: Subjects
) -> None:
    members = Members(connection, fleet_buckets, hears=False, role=Role.VAULT)
    heard: list[str] = []
    apply = members._apply
    members._apply = lambda entry: (heard.append(entry.key), apply(entry))[1]  # type: ignore[method-assign]
    await Lease(bucket, a_peer("w1")).renew()
    await members.start()
    workers = [Lease(bucket, a_peer(f"w{number}")) for number in range(20)]
    for lease in workers:
        await lease.renew()
    await Lease(bucket, MemberRecord("v0", "e1", "", State.READY, Role.VAULT, "h", 1, (1, 1))).renew()
    async with asyncio.timeout(LIMIT_S):
        while (Role.VAULT, "v0") not in members.view.members:
            await asyncio.sleep(0.01)
    assert heard == ["vault.v0"]
    await members.stop()


async def test_a_worker_watches_them_alone(
    connection: Connection, bucket: Bucket, fleet_buckets: Subjects, tmp_path: Path
) -> None:
    await Lease(bucket, a_peer("w1")).renew()
    await Lease(bucket, MemberRecord("v0", "e1", "", State.READY, Role.VAULT, "h", 1, (1, 1))).renew()
    network = TierNetwork(WorkerSettings(id="me"), "me", "h", tmp_path)
    await ensure_key(await Bucket.open(connection, fleet_buckets.keys_bucket))
    await network.follow(connection, fleet_buckets, ME)
    assert network._vaults is not None
    async with asyncio.timeout(LIMIT_S):
        while (Role.VAULT, "v0") not in network._vaults.view.members:
            await asyncio.sleep(0.01)
    assert not network._vaults.view.workers
    await network.stop()


async def met(peers: Peers, worker: str) -> bool:
    """Whether it had to be asked for. A busy machine may take longer than a request waits."""
    meeting = peers.meet(worker)
    if meeting is None:
        return False
    await meeting
    for _ in range(50):
        again = peers.meet(worker)
        if again is None:
            break
        await again
    return True


async def test_a_peer_is_looked_up_once_when_it_is_named(bucket: Bucket) -> None:
    told: list[list[SourceAddress]] = []
    peers = Peers(bucket, ME, told.append)
    await Lease(bucket, a_peer("w1")).renew()
    await Lease(bucket, replace(a_peer("w2"), kv_format=b"g" * 16)).renew()
    assert await met(peers, "w1")
    assert not await met(peers, "w1")
    assert told == [[SourceAddress("w1", "e1", "h", ("tcp:w1:1",))]]
    for name in ("w2", "nobody"):  # of another layout; of none
        assert await met(peers, name)
    for name in ("", "me", "eu.w1", "*"):
        assert not await met(peers, name)
    assert len(told) == 1


async def test_peers_that_are_remembered_are_bounded(bucket: Bucket) -> None:
    told: list[list[SourceAddress]] = []
    peers = Peers(bucket, ME, told.append)
    for number in range(MOST_PEERS + 3):
        await Lease(bucket, a_peer(f"w{number}")).renew()
        assert await met(peers, f"w{number}")
    assert [one.id for one in told[-1]] == [f"w{number}" for number in range(3, MOST_PEERS + 3)]
