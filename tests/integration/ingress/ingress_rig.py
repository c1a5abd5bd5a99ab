"""One ingress, served by uvicorn in the test's own loop, over a real NATS server; and a real placement beside it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn
from prometheus_client import CollectorRegistry

from kvfleet.ingress.app import create_app, for_browsers
from kvfleet.ingress.auth.api_keys import KeySet, parse_keys
from kvfleet.ingress.auth.tenancy import Tenancy
from kvfleet.ingress.ingress import Ingress, IngressBuckets
from kvfleet.ingress.settings import IngressConfig
from kvfleet.ingress.telemetry.audit import NO_AUDIT, Audit
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.loop import PlacementLoop
from kvproto import codec
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.ids import new_epoch, new_process_id
from kvproto.messages import MemberRecord, Role, State
from kvproto.subjects import INGRESS_INBOX, PLACEMENT_INBOX, Subjects, inbox_prefix
from tests.support.waiting import LIMIT_S
from tests.support.waiting import until as until  # its tests take it from here

FLEET_KEY = "secret of the fleet"


@dataclass
class Served:
    """One running ingress and how to reach it."""

    url: str
    http: httpx.AsyncClient
    ingress: Ingress
    client: Client
    _server: uvicorn.Server
    _serving: asyncio.Task[None]

    async def go_away(self) -> None:
        """Nothing answers at its address any more; the ingress itself goes on."""
        self._server.should_exit = True
        self._server.force_exit = True  # whoever holds a connection is not waited for
        await self._serving

    async def come_back(self) -> None:
        """At the same address."""
        self._server, self._serving = await _listen(self.ingress, int(self.url.rsplit(":", 1)[1]))

    async def stop(self) -> None:
        await self.http.aclose()
        self._server.should_exit = True
        await self._serving
        await self.ingress.close()
        await self.client.close()
        await self.client.connection.close()


async def serve(
    url: str,
    subjects: Subjects,
    *,
    keys: str = "",
    tenancy: Tenancy | None = None,
    audit: Audit = NO_AUDIT,
    **changes: Any,
) -> Served:
    """`tenancy` where `keys` do not say enough; `changes` of the configuration."""
    member = new_process_id()
    prefix = inbox_prefix(INGRESS_INBOX, member)
    connection = await Connection.open(url, name=f"ingress-{member}", inbox_prefix=prefix)
    client = await Client.over(connection, subjects)
    config = replace(IngressConfig(id=member, keepalive_s=0.2, no_worker_timeout_s=1.0), **changes)
    tenancy = tenancy or Tenancy(parse_keys(keys) if keys else KeySet(), time.time)
    buckets = await IngressBuckets.open(connection, subjects)
    ingress = Ingress(client, config, buckets, tenancy, CollectorRegistry(), audit)
    await ingress.start()
    server, serving = await _listen(ingress, 0, config.web.cors_origins)
    port = server.servers[0].sockets[0].getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    http = httpx.AsyncClient(base_url=base, timeout=LIMIT_S)
    for _ in range(200):
        if (await http.get("/readyz")).status_code == 200:
            break
        await asyncio.sleep(0.01)
    return Served(base, http, ingress, client, server, serving)


async def _listen(
    ingress: Ingress, port: int, origins: tuple[str, ...] = ()
) -> tuple[uvicorn.Server, asyncio.Task[None]]:
    server = uvicorn.Server(
        uvicorn.Config(
            for_browsers(create_app(ingress), origins),
            port=port,
            http="httptools",
            access_log=False,
            log_level="warning",
            lifespan="off",
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    return server, serving


async def start_placement(url: str, subjects: Subjects, name: str) -> tuple[PlacementLoop, Connection]:
    connection = await Connection.open(url, name=f"placement-{name}", inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name))
    record = MemberRecord(
        name, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, codec.supported_versions()
    )
    loop = PlacementLoop(
        connection,
        subjects,
        record,
        PlacementConfig(policy="cost"),
        chance=random.Random(1).random,
        fleet_key=FLEET_KEY.encode(),
    )
    await loop.start()
    return loop, connection


Serve = Callable[..., Awaitable[Served]]
