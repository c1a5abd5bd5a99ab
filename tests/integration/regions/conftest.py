"""Two regions in the test's own loop: real servers joined as hub and leaf, real placements, fake-runner workers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvfleet.cli.operator.init import create_buckets
from kvfleet.cli.operator.operator_login import Login
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.ids import new_epoch
from kvproto.messages import MemberRecord, Role, State
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from kvproto.testing.nats_process import free_port
from tests.support.fake_fleet import FakeFleet
from tests.support.nats_regions import NatsRegions

FLEET_KEY = "secret of both regions"


@dataclass
class Region:
    """One region: what runs in it ends with `stop`. `logins`: by role, more for `Connection.open`."""

    url: str
    subjects: Subjects
    fleet: FakeFleet
    logins: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    placements: list[tuple[PlacementLoop, Connection]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    @property
    def placement(self) -> PlacementLoop:
        return self.placements[0][0]

    async def worker(self, name: str, **settings: Any) -> Any:
        return await self.fleet.start(name, fleet_key=FLEET_KEY, **settings)

    async def start_placement(self, name: str, spill_s: float = 0.2) -> None:
        connection = await Connection.open(
            self.url,
            name=f"placement-{name}",
            inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name),
            **self.logins.get("placement", {}),
        )
        record = MemberRecord(name, new_epoch(), "", State.READY, Role.PLACEMENT, "h", 1, codec.supported_versions())
        loop = PlacementLoop(
            connection,
            self.subjects,
            record,
            PlacementConfig(spill_wait_s=spill_s),
            chance=random.Random(1).random,
            fleet_key=FLEET_KEY.encode(),
        )
        await loop.start()
        self.placements.append((loop, connection))

    async def client(self, tenant: str = "public") -> Client:
        client = await Client.open(
            self.url,
            tenant=tenant,
            namespace=self.subjects.namespace,
            region=self.subjects.region,
            **self.logins.get("producer", {}),
        )
        self.clients.append(client)
        return client

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        await self.fleet.stop()
        for loop, connection in self.placements:
            await loop.stop(grace_s=0)
            await connection.close()


class Link:
    """The wire between the regions: what the leaf takes for the hub. `cut` ends it, `mend` lets it come back."""

    def __init__(self, hub_port: int) -> None:
        self._hub_port = hub_port
        self._whole = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._whole = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._whole = True

    async def stop(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError, asyncio.CancelledError):  # of the test's end
            there, hub = await asyncio.open_connection("127.0.0.1", self._hub_port)
            self._writers |= {writer, hub}
            try:
                await asyncio.gather(_pump(reader, hub), _pump(there, writer))
            finally:
                self._writers -= {writer, hub}
                writer.close()
                hub.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()


@dataclass
class TwoRegions:
    us: Region
    eu: Region
    link: Link


@pytest.fixture
async def regions(tmp_path: Path) -> AsyncIterator[TwoRegions]:
    """Each with its placement; workers are the test's."""
    hub_port = free_port()
    link = Link(hub_port)
    await link.start()
    servers = NatsRegions(tmp_path, hub_port=hub_port, link_port=link.port)
    made: list[Region] = []
    try:
        servers.start()
        for name, node in (("us", servers.us), ("eu", servers.eu)):
            subjects = Subjects("kvf", name)
            await create_buckets(Login(node.url), "kvf")
            region = Region(node.url, subjects, FakeFleet(node.url, subjects))
            made.append(region)
            await region.start_placement(f"p-{name}")
        await servers.joined()
        yield TwoRegions(*made, link)
    finally:
        for region in made:
            await region.stop()
        await link.stop()
        servers.stop()
