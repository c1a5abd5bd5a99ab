"""A fleet of real worker loops around the fake runner, inside the test's own event loop.

Everything but the model is the product: wire, leases, frames, engine, engine thread. A worker can be killed as SIGKILL
would (its connection drops, nothing is released) or frozen as SIGSTOP would (it stays subscribed and says nothing).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfleet.worker.backend import worker_record
from kvfleet.worker.engine.bundle import read_bundle, read_public_prefixes
from kvfleet.worker.engine.engine_factory import build_engine
from kvfleet.worker.engine.engine_thread import EngineThread
from kvfleet.worker.model.model_folder import DEMO_FOLDER
from kvfleet.worker.network.tier_network import TierNetwork
from kvfleet.worker.own_backend import assemble
from kvfleet.worker.serve.loop import WorkerLoop
from kvfleet.worker.settings import WorkerSettings
from kvproto.buckets import Bucket
from kvproto.connection import Connection
from kvproto.members import Lease
from kvproto.subjects import WORKER_INBOX, Subjects, inbox_prefix
from kvproto.tasks import end


@dataclass
class FakeWorker:
    id: str
    connection: Connection
    loop: WorkerLoop
    thread: EngineThread
    fatal: list[str] = field(default_factory=list)
    network: TierNetwork | None = None
    dead: bool = False
    frozen: bool = False

    async def freeze(self) -> None:
        """As SIGSTOP: it stays connected and subscribed, and says nothing any more."""
        self.dead = self.frozen = True
        await end(self.loop.tasks.running)
        await asyncio.get_running_loop().run_in_executor(None, self.thread.stop)

    async def kill(self) -> None:
        """As SIGKILL: the socket closes, the record stays until it expires."""
        self.dead = True
        tasks = list(self.loop.tasks.running)
        for task in tasks:
            task.cancel()
        self.connection._closing = True
        if self.connection._watchdog is not None:
            self.connection._watchdog.cancel()
        transport = self.connection.raw._transport._io_writer.transport  # type: ignore[union-attr]
        self.connection.raw.options["allow_reconnect"] = False
        transport.abort()
        await end(tasks)
        await asyncio.get_running_loop().run_in_executor(None, self.thread.stop)

    async def stop(self) -> None:
        if self.frozen:
            await self.connection.close()
        if self.dead:
            return
        self.dead = True
        await self.loop.drain()
        await self.loop.stop()
        if self.network is not None:
            await self.network.stop()
        await asyncio.get_running_loop().run_in_executor(None, self.thread.stop)
        await self.connection.close()
        await asyncio.get_running_loop().run_in_executor(None, self.thread.engine.tiers.close)


class FakeFleet:
    """Starts and stops fake workers on one NATS server and namespace."""

    def __init__(
        self,
        nats_url: str,
        subjects: Subjects,
        folder: Path = DEMO_FOLDER,
        login: Mapping[str, Any] | None = None,
        on_fatal: Callable[[str], None] | None = None,
    ) -> None:
        """`login`: more for `Connection.open`. `on_fatal`: has what a worker must end for; else they keep it."""
        self.nats_url = nats_url
        self.login = login or {}
        self.on_fatal = on_fatal
        self.subjects = subjects
        self.folder = folder
        self.workers: dict[str, FakeWorker] = {}

    async def start(self, worker: str, sockets: Path | None = None, **settings: Any) -> FakeWorker:
        """With a folder for `sockets` it has a data plane, as in production."""
        chosen = WorkerSettings(
            id=worker,
            nats_url=self.nats_url,
            namespace=self.subjects.namespace,
            **{"runner": "fake", "blocks": 1024, "drain_s": 0.5, **settings},
        )
        name = chosen.served_model_name or "demo"
        bundle = read_bundle(
            self.folder,
            name,
            load_format="auto",
            dtype="auto",
            block_size=chosen.block_size,
            public_prefixes=read_public_prefixes(chosen.public_prefixes_file),
        )
        connection = await Connection.open(
            self.nats_url, name=f"worker-{worker}", inbox_prefix=inbox_prefix(WORKER_INBOX, worker), **self.login
        )
        bucket = await Bucket.open(connection, self.subjects.members_bucket)
        lease = Lease(bucket, worker_record(chosen, worker, bundle, chosen.slots))
        fatal: list[str] = []
        network = TierNetwork(chosen, worker, f"host-of-{worker}", sockets) if sockets is not None else None
        engine = build_engine(chosen, self.folder, bundle, *([network.remote_for] if network is not None else []))
        on_fatal = self.on_fatal or fatal.append
        loop, thread = assemble(chosen, connection, self.subjects, lease, engine, bundle, on_fatal, network)
        thread.start()
        if network is not None:
            await network.follow(connection, self.subjects, loop.record)
        await loop.start()
        self.workers[worker] = FakeWorker(worker, connection, loop, thread, fatal, network)
        return self.workers[worker]

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
