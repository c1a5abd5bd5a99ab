"""A vault without NATS for a while, and one that others reach by TLS."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from vault_rig import Fleet, get, payloads, put

from kvproto.buckets import ensure_buckets
from kvproto.connection import Connection
from kvproto.dataplane.client import DataPlaneClient, PutStatus
from kvproto.dataplane.errors import HandshakeRefused
from kvproto.subjects import Subjects
from kvproto.testing.fixtures import ProcessFactory
from tests.support.kv_blocks import chain, hashes
from tests.support.waiting import LIMIT_S, until


async def test_a_nats_that_is_killed_costs_no_block(
    nats_process: ProcessFactory, namespace: str, tmp_path: Path
) -> None:
    """Blocks are served all the while; afterwards the lease is held under the old epoch and everything is told."""
    nats, subjects = nats_process(), Subjects(namespace)
    admin = await Connection.open(nats.url, name="admin", inbox_prefix="_adm.test")
    await ensure_buckets(admin, subjects)
    await admin.close()
    fleet = await Fleet.open(nats.url, subjects, tmp_path)
    try:
        vault = await fleet.start()
        client = vault.connect()
        blocks = chain(60)
        put(client, blocks[:20])
        await until(lambda: len(fleet.held(vault.record.epoch)) == 20)
        nats.kill()
        await until(lambda: not fleet.connection.is_connected)
        assert put(client, blocks[20:40]) == [PutStatus.STORED] * 20
        assert get(vault.connect(), hashes(blocks[:40])) == payloads(blocks[:40])
        await asyncio.sleep(3.5)  # longer than its record lives
        nats.start()
        await until(lambda: fleet.connection.is_connected)
        fleet.beats.clear()
        await until(lambda: fleet.beats)
        assert await fleet.snapshot("v0") == set(hashes(blocks[:40]))
        put(client, blocks[40:])
        async with asyncio.timeout(LIMIT_S):
            while (record := await fleet.record("v0")) is None:
                await asyncio.sleep(0.1)
        assert record.epoch == vault.record.epoch
        await until(lambda: fleet.events[-1].seq == fleet.beats[-1].event_seq)
        assert await fleet.snapshot("v0") == set(hashes(blocks))
        assert vault.stop() == 0, vault.errors()
    finally:
        await fleet.close()


async def test_others_reach_it_by_tls(fleet: Fleet, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = tmp_path / "vault.pem", tmp_path / "vault.key"
    make = (
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=vault -out {cert}"
    )
    subprocess.run(
        [*make.split(), "-keyout", str(key), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    flags = (f"--data-plane-cert={cert}", f"--data-plane-key={key}", "--data-plane-advertise=localhost")
    vault = await fleet.start("v0", *flags)
    tcp = vault.record.data_plane[1]
    assert tcp.startswith("tcp:localhost:")

    def connect(tls: ssl.SSLContext | None) -> DataPlaneClient:
        return DataPlaneClient.connect(
            [tcp], fleet.ring, identity="w0", expect="v0", same_host=False, tls=tls, timeout_s=3.0
        )

    client = await asyncio.to_thread(connect, ssl.create_default_context(cafile=str(cert)))
    assert put(client, chain(5)) == [PutStatus.STORED] * 5
    assert get(client, hashes(chain(5))) == payloads(chain(5))
    client.close()
    with pytest.raises(HandshakeRefused):
        await asyncio.to_thread(connect, ssl.create_default_context())
    assert get(vault.connect(), hashes(chain(5))) == payloads(chain(5)), "a Unix socket needs none"
