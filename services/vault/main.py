"""Wiring of a vault process: settings, keys, store, data plane, loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path

from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.loop import CLOSE_S, VaultLoop
from kvfleet.vault.settings import VaultSettings, default_max_bytes
from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from kvfleet.vault.vault_metrics import readings
from kvproto.dataplane.keys import KeyRing, follow_keys
from kvproto.dataplane.server import DataPlaneServer
from kvproto.errors import Unavailable
from kvproto.members import Lease
from kvproto.messages import Role, Tier
from kvproto.subjects import VAULT_INBOX
from kvservice import lifecycle
from kvservice.data_plane import limits_of, reachable, recorder_of, runtime_folder, server_context
from kvservice.membership import join, member_record
from kvservice.metrics import Probes
from kvservice.tracing_start import open_tracer

log = logging.getLogger(__name__)

STATE_PART, STATE_DISK_PART = 8, 16  # of what blocks get, for states beside it: little enough for limits set before
LAST_WORDS_S = 2.0  # for the disk to take blocks that only memory has


async def open_store(
    max_bytes: int, folder: Path | None, disk_max_bytes: int, life: lifecycle.Lifecycle
) -> tuple[VaultStore, DiskThread | None]:
    """With the blocks that its disk kept. Raises Unavailable for a folder that cannot be used."""
    if folder is None:
        return VaultStore(max_bytes), None
    disk = DiskStore(folder, disk_max_bytes)
    began = time.monotonic()
    try:
        found = await lifecycle.in_daemon_thread(disk.open)
    except OSError as error:
        raise Unavailable(f"cannot use --disk-dir {folder}: {error.strerror or error}") from None
    log.info("%d blocks on disk, listed in %.1f s", len(found), time.monotonic() - began)
    thread = DiskThread(disk)
    store = VaultStore(max_bytes, thread, on_disk=found)
    thread.start(store)

    async def close() -> None:
        await asyncio.get_running_loop().run_in_executor(None, thread.close, LAST_WORDS_S)

    life.closing("disk", close, LAST_WORDS_S + 5.0)
    return store, thread


async def serve(settings: VaultSettings, life: lifecycle.Lifecycle) -> None:
    probes = Probes(settings, life)
    tracer = open_tracer(settings, "vault", life)
    member = settings.member
    record = member_record(Role.VAULT, member, address=socket.gethostname())
    tls = server_context(settings)
    connection, subjects, bucket = await join(settings, life, "vault", VAULT_INBOX, prestart_s=settings.prestart_s)
    ring = KeyRing()
    keys = await follow_keys(connection, subjects, ring)
    life.closing("keys", keys.stop)

    max_bytes, folder = settings.max_bytes or default_max_bytes() // settings.vaults_on_host, settings.disk_dir
    store, disk = await open_store(max_bytes, folder, settings.disk_max_bytes, life)
    states, _ = await open_store(
        settings.state_max_bytes or max(1, max_bytes // STATE_PART),
        folder and folder / "states",
        settings.state_disk_max_bytes or max(1, settings.disk_max_bytes // STATE_DISK_PART),
        life,
    )
    server = DataPlaneServer(
        VaultPools(store, states),
        ring,
        member,
        tcp=(settings.data_plane_host, settings.data_plane_port),
        unix_path=runtime_folder(settings, life) / f"{member}.sock",
        tls=tls,
        limits=limits_of(settings),
        on_traced=recorder_of(tracer, Tier.VAULT),
    )
    loop = VaultLoop(
        connection,
        subjects,
        Lease(bucket, replace(record, inbox=connection.inbox_prefix)),
        store,
        server,
        life.fatal,
        reachable=lambda addresses: reachable(addresses, settings),
        states=states,
    )
    life.closing("data plane", loop.close_data_plane)
    await loop.start()
    life.closing("vault", loop.stop, CLOSE_S + 5.0)
    certificates = {"nats": settings.nats_cert, "data_plane": settings.data_plane_cert}
    probes.ready(readings(loop, connection, disk, certificates))
    log.info(
        "vault %s is ready: %d MiB, %s", member, store.table.memory.max_bytes >> 20, ", ".join(loop.record.data_plane)
    )


def main() -> None:
    lifecycle.run_service("vault", VaultSettings, serve)


if __name__ == "__main__":
    main()
