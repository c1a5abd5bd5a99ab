"""A fleet of real parts in one process, on virtual time: placements, workers and clients beside a simulated NATS.

Import `tests.dst.threads` first, and install it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvchat.chat_template import template_of
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.loop import PlacementLoop, PlacementParts
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.serve import chat_intake
from kvproto import codec
from kvproto import connection as product
from kvproto.buckets import ensure_buckets
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.ids import new_epoch, new_process_id
from kvproto.messages import MemberRecord, Role, State
from kvproto.subjects import PLACEMENT_INBOX, PRODUCER_INBOX, Subjects, inbox_prefix
from tests.dst import threads
from tests.dst.hub import Hub, Place
from tests.dst.loop import SimLoop
from tests.dst.nats_link import Net, SimClient
from tests.dst.nats_server import SimNats
from tests.support import fake_fleet
from tests.support.fake_fleet import FakeFleet, FakeWorker

AT = "127.0.0.1:4222"
URL = f"nats://{AT}"
FLEET_KEY = b"the fleet's"
BACKOFF_S = 1.0  # before what could not start is started again
Begin = Callable[[], Awaitable[Any]]

product._Client = SimClient  # type: ignore[misc]
_BUNDLES: dict[tuple[str, int], Any] = {}
_TEMPLATES: dict[int, Any] = {}


def _bundle(folder: Path, name: str, *, block_size: int, **more: Any) -> Any:
    """Read once in a process."""
    if (name, block_size) not in _BUNDLES:
        _BUNDLES[name, block_size] = read_bundle(folder, name, block_size=block_size, **more)
    return _BUNDLES[name, block_size]


def _template(bundle: Any) -> Any:
    if id(bundle) not in _TEMPLATES:  # of a bundle that is kept
        _TEMPLATES[id(bundle)] = template_of(bundle)
    return _TEMPLATES[id(bundle)]


fake_fleet.read_bundle = _bundle
chat_intake.template_of = _template


@dataclass(eq=False)
class Process:
    """One life. `made`: what its `begin` returned."""

    place: Place
    loop: SimLoop
    made: Any = None
    failed: BaseException | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.hub = Hub(seed)
        threads.begin(self.hub)
        self.net = SimClient.net = Net(self.hub)
        self.server = self.net.servers[AT] = SimNats(self.hub, URL)
        self.subjects = Subjects()
        self.processes: dict[str, Process] = {}  # present lives
        self.former: list[Process] = []

    # Processes.

    def start(self, name: str, begin: Begin) -> Process:
        """A life of `name`: `begin` makes it, on an event loop of its own."""
        if (earlier := self.processes.get(name)) is not None:
            self.former.append(earlier)
        place = self.hub.place(name)
        process = self.processes[name] = Process(place, SimLoop(place))

        async def live() -> None:
            try:
                process.made = await begin()
            except Exception as error:  # noqa: BLE001 - the trial tells it
                process.failed = error
                self.hub.at(self.hub.now + BACKOFF_S, partial(self._again, name, process, begin))

        self.spawn(process, live())
        return process

    def _again(self, name: str, process: Process, begin: Begin) -> None:
        """As its supervisor would."""
        if self.processes[name] is process and not process.place.is_dead:
            self.kill(name)
            self.start(name, begin)

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        here, self.hub.here = self.hub.here, process.place
        task = process.loop.create_task(work)
        self.hub.here = here
        process.tasks.append(task)
        return task

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.place.die()
        for transport in list(self.server.clients):
            if transport.place is process.place:
                transport.lose()

    def do(self, name: str, work: Coroutine[Any, Any, Any], limit_s: float = 60.0) -> Any:
        """Until it is done, while all others go on."""
        task = self.spawn(self.processes[name], work)
        self.hub.run(task.done, limit_s)
        return task.result()

    def run_for(self, seconds: float) -> None:
        over: list[bool] = []
        self.hub.at(self.hub.now + seconds, partial(over.append, True))
        self.hub.run(lambda: bool(over), seconds + 1.0)

    def transports_of(self, name: str) -> list[Any]:
        place = self.processes[name].place
        return [one for one in self.server.clients if one.place is place]

    def close(self) -> None:
        self.hub.close()

    # What may be a process.

    async def buckets(self) -> None:
        connection = await Connection.open(URL, name="init", inbox_prefix="_adm.init")
        await ensure_buckets(connection, self.subjects)
        await connection.close()

    async def worker(self, name: str, **settings: Any) -> FakeWorker:
        fleet = FakeFleet(URL, self.subjects)
        chosen = {"fake_tokens_per_s": 30.0, "host_bytes": 0, "blocks": 128, "drain_s": 0.5}
        return await fleet.start(name, **{**chosen, **settings})

    async def placement(self, name: str) -> PlacementLoop:
        prefix = inbox_prefix(PLACEMENT_INBOX, f"{name}-{new_process_id()}")
        connection = await Connection.open(URL, name=f"placement-{name}", inbox_prefix=prefix)
        record = MemberRecord(
            name, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, codec.supported_versions()
        )
        chance = random.Random(self.hub.random.getrandbits(32)).random
        config, parts = PlacementConfig(policy="cost", index_blocks=4096), PlacementParts(system=None)
        loop = PlacementLoop(connection, self.subjects, record, config, chance=chance, fleet_key=FLEET_KEY, parts=parts)
        await loop.start()
        return loop

    async def client(self, tenant: str = "public") -> Client:
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.{tenant}", new_process_id())
        connection = await Connection.open(URL, name=prefix, inbox_prefix=prefix)
        return await Client.over(connection, self.subjects)
