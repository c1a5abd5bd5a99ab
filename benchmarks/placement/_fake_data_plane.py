"""What fake workers keep open as real ones do: a watch of vaults and one of keys each, three connections to each vault.

Nothing is asked over those connections but what a real one is asked while it idles; the process is refused nothing that
a worker is not.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from kvproto.buckets import Bucket, BucketFollower
from kvproto.connection import Connection
from kvproto.dataplane.client import DataPlaneClient
from kvproto.dataplane.keys import KeyRing, follow_keys
from kvproto.members import Members
from kvproto.messages import MemberRecord, Role
from kvproto.subjects import Subjects
from kvservice.data_plane import DataPlaneSettings, limits_of

CONNECTIONS = 3  # to each vault: to look, to fetch, to write
KEEP_ALIVE_S = 30.0
CONNECT_S = 60.0  # a thousand begin at the same moment
AT_ONCE = 8  # threads of this process: those of a real worker would be its own


class FakeDataPlane:
    """Of all workers of one process. Owned by its loop."""

    def __init__(self, connection: Connection, workers: list[str]) -> None:
        limits_of(DataPlaneSettings(data_plane_connections=CONNECTIONS * len(workers) * 2))
        self.heard = 0  # records that watches were sent
        self._connection = connection
        self._subjects = Subjects()
        self._workers = workers
        self._keys: list[BucketFollower] = []
        self._clients: list[DataPlaneClient] = []
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> int:
        return sum(not client.closed for client in self._clients)

    async def start(self) -> None:
        """Returns when every worker watches, and has its connections to the vaults that are there."""
        members = Members(self._connection, self._subjects, hears=False, role=Role.VAULT)
        await members.start()
        vaults = [record for record, _ in members.view.members.values()]
        await members.stop()
        bucket = await Bucket.open(self._connection, self._subjects.members_bucket)
        rings = []
        for _ in self._workers:
            ring = KeyRing()
            self._keys.append(await follow_keys(self._connection, self._subjects, ring, timeout_s=CONNECT_S))
            rings.append(ring)
            self._tasks.append(asyncio.create_task(self._watch(bucket)))
        loop = asyncio.get_running_loop()
        self._clients = await asyncio.gather(
            *(
                loop.run_in_executor(self._threads, _connected, vault, ring, worker)
                for worker, ring in zip(self._workers, rings, strict=True)
                for vault in vaults
                for _ in range(CONNECTIONS)
            )
        )
        self._tasks.append(asyncio.create_task(self._keep_alive()))

    async def _watch(self, bucket: Bucket) -> None:
        watch = await bucket.watch(f"{Role.VAULT.value}.>")
        async for entry in watch.entries():
            self.heard += entry is not None

    async def _keep_alive(self) -> None:
        """Each connection echoes nothing every half minute, spread over it."""
        loop = asyncio.get_running_loop()
        while True:
            for client in self._clients:
                await asyncio.sleep(KEEP_ALIVE_S / len(self._clients))
                await loop.run_in_executor(self._threads, client.echo, 0, time.monotonic() + CONNECT_S)
            await asyncio.sleep(0 if self._clients else KEEP_ALIVE_S)


def _connected(vault: MemberRecord, ring: KeyRing, worker: str) -> DataPlaneClient:
    return DataPlaneClient.connect(
        vault.data_plane, ring, identity=worker, expect=vault.id, same_host=True, timeout_s=CONNECT_S
    )
