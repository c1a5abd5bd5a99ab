"""Keys in their bucket: made once, rotated, followed over outages; who cannot read them cannot open the data plane."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvproto.buckets import Bucket, ensure_buckets
from kvproto.connection import Connection
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.errors import HandshakeRefused
from kvproto.dataplane.keys import FIRST_ID, KeyRing, ensure_key, follow_keys, rotate_key
from kvproto.dataplane.server import DataPlaneServer
from kvproto.errors import Unavailable
from kvproto.subjects import ADMIN_INBOX, INGRESS_INBOX, VAULT_INBOX, WORKER_INBOX, Subjects
from kvproto.testing.fixtures import ConfiguredNats, ProcessFactory
from tests.integration.dataplane.conftest import soon
from tests.integration.dataplane.stores import IDENTITY, MemoryStore
from tests.support.waiting import LIMIT_S, until

DEPLOY = Path(__file__).parents[3] / "deploy" / "nats"
KVFLEET = str(Path(sys.executable).with_name("kvfleet"))


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(nats_url, name="keys", inbox_prefix="_adm.keys")
    yield connection
    await connection.close()


@pytest.fixture
async def bucket(connection: Connection, fleet_buckets: Subjects) -> Bucket:
    return await Bucket.open(connection, fleet_buckets.keys_bucket)


async def ring_of(connection: Connection, subjects: Subjects) -> KeyRing:
    """As it is now."""
    ring = KeyRing()
    await (await follow_keys(connection, subjects, ring)).stop()
    return ring


async def test_of_many_who_make_the_first_key_one_does(
    connection: Connection, fleet_buckets: Subjects, bucket: Bucket
) -> None:
    assert (await ring_of(connection, fleet_buckets)).newest_first() == []
    await asyncio.gather(*(ensure_key(bucket) for _ in range(8)))
    (first,) = (await ring_of(connection, fleet_buckets)).newest_first()
    assert (first.id, len(first.secret)) == (FIRST_ID, 32)
    await ensure_key(bucket)
    assert (await ring_of(connection, fleet_buckets)).newest_first() == [first]


async def test_a_first_key_can_be_made_where_one_was_deleted(
    connection: Connection, fleet_buckets: Subjects, bucket: Bucket
) -> None:
    await ensure_key(bucket)
    (first,) = (await ring_of(connection, fleet_buckets)).newest_first()
    await bucket.delete(f"dataplane.{FIRST_ID}")
    await ensure_key(bucket)
    (second,) = (await ring_of(connection, fleet_buckets)).newest_first()
    assert second.secret != first.secret


async def test_a_key_is_out_after_two_rotations(
    connection: Connection, fleet_buckets: Subjects, bucket: Bucket
) -> None:
    await ensure_key(bucket)
    ring = KeyRing()
    watch = await follow_keys(connection, fleet_buckets, ring)
    try:
        second = await rotate_key(bucket)
        await until(lambda: [key.id for key in ring.newest_first()] == [second, FIRST_ID])
        third = await rotate_key(bucket)
        await until(lambda: [key.id for key in ring.newest_first()] == [third, second])
        assert len({key.secret for key in ring.newest_first()}) == 2
    finally:
        await watch.stop()


async def test_what_is_no_key_is_passed_over(
    connection: Connection, fleet_buckets: Subjects, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    await bucket.update("dataplane.good", bytes(32), 0)
    await bucket.update("dataplane.short", b"too short", 0)
    await bucket.update("something.else", bytes(32), 0)
    assert [key.id for key in (await ring_of(connection, fleet_buckets)).newest_first()] == ["good"]
    assert "short has 9 bytes" in caplog.text
    assert "too short" not in caplog.text


async def test_a_missing_bucket_is_said_in_time(connection: Connection) -> None:
    with pytest.raises(Unavailable, match="absent_keys could not be read"):
        await follow_keys(connection, Subjects("absent"), KeyRing(), timeout_s=0.5)
    assert connection.on_reconnect == []


async def test_keys_are_followed_over_an_outage(nats_process: ProcessFactory) -> None:
    """A ring keeps its keys while the server is away, and hears of those made meanwhile by others."""
    server, subjects = nats_process(), Subjects()
    connection = await Connection.open(server.url, name="follower", inbox_prefix="_wrk.f")
    await create_buckets(Login(server.url), subjects.namespace)
    ring = KeyRing()
    watch = await follow_keys(connection, subjects, ring)
    first = ring.current()
    server.stop()  # not killed: what it was told a moment ago might not be on its disk
    await until(lambda: not connection.is_connected)
    assert ring.current() == first
    server.start()
    await create_buckets(Login(server.url), subjects.namespace, rotate=True)
    await until(lambda: ring.current() != first)
    assert ring.get(first.id) == first.secret
    await watch.stop()
    await connection.close()


def test_init_makes_a_key_and_rotates_it(nats_url: str, fleet_buckets: Subjects) -> None:
    def init(*flags: str) -> list[str]:
        command = [KVFLEET, "init", f"--nats-url={nats_url}", f"--namespace={fleet_buckets.namespace}", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)

        async def keys() -> list[Any]:
            connection = await Connection.open(nats_url, name="keys", inbox_prefix="_adm.keys")
            try:
                return (await ring_of(connection, fleet_buckets)).newest_first()
            finally:
                await connection.close()

        found = asyncio.run(keys())
        assert not any(key.secret.hex() in done.stdout + done.stderr for key in found)
        return [key.id for key in found]

    assert init() == [FIRST_ID]
    rotated = init("--rotate-data-plane-key")
    assert rotated[1:] == [FIRST_ID]
    assert init() == rotated


async def test_only_workers_and_vaults_can_open_the_data_plane(
    nats_with_config: ConfiguredNats, socket_path: Path
) -> None:
    """Under the configuration of deploy/nats: a worker meets a vault; an ingress or a producer has no key, and neither
    a guessed one nor a server of its own gets it anywhere."""
    users = ("ADMIN", "INGRESS", "PLACEMENT", "WORKER", "VAULT", "SYS", "PRODUCER_public")
    server = nats_with_config(DEPLOY / "nats-server.conf", {f"KVF_{user}_PASSWORD": f"of-{user}" for user in users})
    subjects = Subjects()
    opened: list[Connection] = []

    async def connect(user: str, inbox: str) -> Connection:
        name = "producer-public" if user == "PRODUCER_public" else user.lower()
        opened.append(
            await Connection.open(server.url, name=name, inbox_prefix=f"{inbox}.t", user=name, password=f"of-{user}")
        )
        return opened[-1]

    admin = await connect("ADMIN", ADMIN_INBOX)
    await ensure_buckets(admin, subjects)
    await ensure_key(await Bucket.open(admin, subjects.keys_bucket))
    vault_ring, worker_ring = KeyRing(), KeyRing()
    watches = [
        await follow_keys(await connect("VAULT", VAULT_INBOX), subjects, vault_ring),
        await follow_keys(await connect("WORKER", WORKER_INBOX), subjects, worker_ring),
    ]
    strangers = [await connect("INGRESS", INGRESS_INBOX), await connect("PRODUCER_public", "_prd.public")]
    refusals = await asyncio.gather(
        *(follow_keys(stranger, subjects, KeyRing(), timeout_s=1.0) for stranger in strangers), return_exceptions=True
    )
    assert [type(refusal) for refusal in refusals] == [Unavailable] * 2

    guessed = KeyRing({FIRST_ID: secrets.token_bytes(32)})
    vault = DataPlaneServer(MemoryStore(), vault_ring, IDENTITY, tcp=("127.0.0.1", 0), unix_path=socket_path)
    fake = DataPlaneServer(MemoryStore(), guessed, IDENTITY, tcp=("127.0.0.1", 0))
    vault.start()
    fake.start()
    try:
        for same_host in (True, False):
            to_vault = {"identity": "x", "expect": IDENTITY, "same_host": same_host}
            client = DataPlaneClient.connect(vault.addresses, worker_ring, **to_vault)  # type: ignore[arg-type]
            assert client.echo(1000, soon()) > 0
            client.close()
            with pytest.raises(HandshakeRefused):
                DataPlaneClient.connect(vault.addresses, guessed, **to_vault)  # type: ignore[arg-type]
            with pytest.raises(Unavailable):
                DataPlaneClient.connect(vault.addresses, KeyRing(), **to_vault)  # type: ignore[arg-type]
        with pytest.raises(HandshakeRefused):
            DataPlaneClient.connect(fake.addresses, worker_ring, identity="w", expect=IDENTITY, same_host=False)
        assert vault.counters.connections == 2
        assert fake.counters.connections == 0
    finally:
        vault.close()
        fake.close()
        for watch in watches:
            await watch.stop()
        for connection in opened:
            await connection.close()
