"""A fleet of real parts in one process, on virtual time: placements, workers and clients beside a simulated NATS.

Import `tests.dst.threads` first, and install it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvchat.chat_template import template_of
from kvfleet.placement.config import PlacementConfig
from kvfleet.placement.loop import PlacementLoop, PlacementParts
from kvfleet.vault.disk.disk import DiskStore
from kvfleet.vault.disk.disk_thread import DiskThread
from kvfleet.vault.loop import VaultLoop
from kvfleet.vault.store.pools import VaultPools
from kvfleet.vault.store.store import VaultStore
from kvfleet.worker.engine import engine
from kvfleet.worker.engine.bundle import read_bundle
from kvfleet.worker.serve import chat_intake
from kvfleet.worker.text.grammar_guard import GrammarGuard
from kvfleet.worker.tiers import source
from kvproto import codec
from kvproto import connection as product
from kvproto.buckets import Bucket, ensure_buckets
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.dataplane import addresses
from kvproto.dataplane.keys import KeyRing, ensure_key, follow_keys
from kvproto.dataplane.link import Link
from kvproto.dataplane.server import DataPlaneServer
from kvproto.ids import new_epoch, new_process_id
from kvproto.members import Lease
from kvproto.messages import Grammar, Heartbeat, MemberRecord, Role, State, WorkerRecord
from kvproto.subjects import (
    DEFAULT_NAMESPACE,
    PLACEMENT_INBOX,
    PRODUCER_INBOX,
    VAULT_INBOX,
    Subjects,
    inbox_prefix,
)
from kvsampling import grammar, grammar_check
from kvservice.membership import member_record
from tests.dst import roles, threads
from tests.dst.files import SimDisk
from tests.dst.hub import Hub, Place
from tests.dst.loop import SimFuture, SimLoop, SimTask
from tests.dst.nats_link import Net, SimClient
from tests.dst.nats_server import Beyond, SimNats
from tests.dst.sockets import SimSocket, Sockets
from tests.dst.web import SimWeb
from tests.support import fake_fleet
from tests.support.fake_fleet import FakeFleet, FakeWorker

PORT = 4222  # of the first region's server
FLEET_KEY = b"the fleet's"
VAULT_BYTES, DISK_BYTES = (1 << 17, 1 << 14), 1 << 20  # little memory: blocks go to the disk
BLOCKS = (64, 20, 64)  # of a worker: few make sequences give way to others
LAST_WORDS_S = 1.0
SOCKETS = Path("/run/kvfleet")
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


def _listening(path: Path) -> tuple[SimSocket, addresses.UnixAddress]:
    made = SimSocket()
    made.bind(str(path))
    made.listen()
    return made, addresses.UnixAddress(str(path))


@functools.lru_cache(maxsize=64)
def _read_once(version: int, kind: type[Any], data: bytes) -> Any:
    """A record or a heartbeat: what reaches a dozen processes is read by one of them."""
    return _DECODE(kind, data)


def _decode(kind: type[Any], data: bytes, **limit: int) -> Any:
    return _read_once(codec.VERSION, kind, data) if kind in _SHARED else _DECODE(kind, data, **limit)


_DECODE = codec.decode
_SHARED = frozenset((Heartbeat, WorkerRecord, MemberRecord))
codec.decode = _decode
source.PROBE_BYTES = 1 << 16  # links are measured with, and the memory of this process by that


class _AtOnce:
    """In place of a thread of the process that all simulated ones are in."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:  # noqa: BLE001 - who waits gets it
            done.set_exception(error)
        return done


_GRAMMARS: list[grammar.Grammars] = []  # of the one tokenizer: it takes long


def _grammars(*of: Any) -> grammar.Grammars:
    if not _GRAMMARS:
        _GRAMMARS.append(grammar.Grammars(*of))
    return _GRAMMARS[0]


@functools.cache
def _fault_of(said: Grammar) -> str:
    return grammar_check._fault(_GRAMMARS[0], said)


threads.number(Link, SimFuture, SimTask)
grammar._POOL[:] = [_AtOnce()]  # type: ignore[list-item]
engine.Grammars = _grammars  # type: ignore[misc, assignment]
GrammarGuard._try = lambda self, said: _fault_of(said)  # type: ignore[method-assign]
addresses.listening_unix = _listening  # type: ignore[assignment]
fake_fleet.read_bundle = _bundle
chat_intake.template_of = _template


@dataclass(frozen=True, slots=True)
class Home:
    """A region: its server, and its subjects."""

    at: str
    server: SimNats
    subjects: Subjects

    @property
    def url(self) -> str:
        return f"nats://{self.at}"


@dataclass(eq=False)
class Process:
    """One life. `made`: what its `begin` returned."""

    place: Place
    loop: SimLoop
    begin: Begin
    made: Any = None
    failed: BaseException | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)


class World:
    """`regions`: by the first letter and number of a name, where its process is; every second one of a kind is in the
    second region, if there are two. `hybrid`: the model has recurrent states."""

    def __init__(self, seed: int, regions: Sequence[str] = ("",), *, hybrid: bool = False) -> None:
        self.hub, self.hybrid = Hub(seed), hybrid
        self.vault_bytes, self.blocks = VAULT_BYTES[seed % 2], BLOCKS[seed % 3]
        threads.begin(self.hub)
        self.net = SimClient.net = Net(self.hub)
        self.homes = [self._home(region, PORT + at) for at, region in enumerate(regions)]
        for one, other in itertools.permutations(self.homes, 2):
            one.server.beyond.append(Beyond(other.server))
        self.sockets = SimSocket.network = Sockets(self.hub)
        self.web = SimWeb(self.hub)
        self.disks: dict[str, SimDisk] = {}
        self.versions: dict[str, int] = {}  # of the wire, that the next life of a process speaks
        self.fatals: list[str] = []
        self.ended: list[tuple[float, str]] = []  # when lives of which processes
        self.processes: dict[str, Process] = {}  # present lives
        self.former: list[Process] = []
        self._lives = itertools.count()  # of workers, each with a folder for its sockets

    def _home(self, region: str, port: int) -> Home:
        at = f"127.0.0.1:{port}"
        server = self.net.servers[at] = SimNats(self.hub, f"nats://{at}", roles.users())
        return Home(at, server, Subjects(DEFAULT_NAMESPACE, region))

    def home_of(self, name: str) -> Home:
        """Of names that end in a number; others are in the first region."""
        digits = re.search(r"[0-9]+", name)
        return self.homes[int(digits[0]) % len(self.homes) if digits else 0]

    # Processes.

    def start(self, name: str, begin: Begin) -> Process:
        """A life of `name`: `begin` makes it, on an event loop of its own."""
        if (earlier := self.processes.get(name)) is not None:
            self.former.append(earlier)
        place = self.hub.place(name)
        place.version = self.versions.get(name, codec.VERSION)
        process = self.processes[name] = Process(place, SimLoop(place), begin)

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
        if self.processes[name] is process:
            if not process.place.is_dead:
                self.kill(name)
            self.start(name, begin)

    def spawn(self, process: Process, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        here, self.hub.here = self.hub.here, process.place
        task = process.loop.create_task(work)
        self.hub.here = here
        process.tasks.append(task)
        return task

    def kill(self, name: str) -> None:
        self._end(self.processes[name])

    def _end(self, process: Process) -> None:
        self.ended.append((self.hub.now, process.place.name))
        process.place.die()
        for transport in self._transports(process.place):
            transport.lose()
        self.sockets.died(process.place)
        self.web.died(process.place)
        if (disk := self.disks.get(process.place.name)) is not None:
            disk.died(process.place)

    def fatal(self, why: str) -> None:
        """As its lifecycle: a process ends by itself, and is started again."""
        place = self.hub.here
        process = next(one for one in [*self.processes.values(), *self.former] if one.place is place)
        self.fatals.append(f"{place.name}: {why}")
        self.hub.at(self.hub.now, partial(self._end, process))
        self.hub.at(self.hub.now + BACKOFF_S, partial(self._again, place.name, process, process.begin))

    def drain(self, name: str, limit_s: float) -> None:
        """As SIGTERM: what it made stops, then the process ends, at the latest after so long."""
        process = self.processes[name]
        if process.made is None:
            self.kill(name)
            return

        async def stop() -> None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(process.made.stop(), limit_s)
            self.hub.at(self.hub.now, partial(self._over, name, process))

        self.spawn(process, stop())

    def _over(self, name: str, process: Process) -> None:
        if self.processes[name] is process and not process.place.is_dead:
            self.kill(name)

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
        return self._transports(self.processes[name].place)

    def _transports(self, place: Place) -> list[Any]:
        return [one for home in self.homes for one in home.server.clients if one.place is place]

    def close(self) -> None:
        self.hub.close()

    # What may be a process.

    async def buckets(self) -> None:
        for home in self.homes:
            connection = await self.connect(home, "init", "_adm.init", "admin")
            await ensure_buckets(connection, home.subjects)
            await ensure_key(await Bucket.open(connection, home.subjects.keys_bucket))
            await connection.close()

    @staticmethod
    async def connect(home: Home, name: str, prefix: str, role: str) -> Connection:
        return await Connection.open(home.url, name=name, inbox_prefix=prefix, user=role, password=role)

    async def worker(self, name: str, **settings: Any) -> FakeWorker:
        home = self.home_of(name)
        login = {"user": "worker", "password": "worker"}
        fleet = FakeFleet(home.url, home.subjects, login=login, on_fatal=self.fatal)
        chosen = {
            "fleet_key": FLEET_KEY.decode(),
            "region": home.subjects.region,
            "fake_tokens_per_s": 20.0,
            "fake_prefill_tokens_per_s": 400.0,
            "blocks": self.blocks,
            "host_bytes": 1 << 13,
            "drain_s": 0.5,
        }
        states = {"states": 32, "state_every": 2, "host_state_bytes": 128} if self.hybrid else {}
        return await fleet.start(name, SOCKETS / str(next(self._lives)), **{**chosen, **states, **settings})

    async def vault(self, name: str, *, has_disk: bool = False) -> Vault:
        prefix = inbox_prefix(VAULT_INBOX, name)
        home = self.home_of(name)
        connection = await self.connect(home, f"vault-{name}", prefix, "vault")
        ring = KeyRing()
        await follow_keys(connection, home.subjects, ring)
        store, thread = VaultStore(self.vault_bytes), None
        if has_disk:
            disk = DiskStore(self.disk(name).folder, DISK_BYTES)
            found = await asyncio.get_running_loop().run_in_executor(None, disk.open)
            thread = DiskThread(disk)
            store = VaultStore(self.vault_bytes, thread, on_disk=found)
            thread.start(store)
        states = VaultStore(self.vault_bytes) if self.hybrid else None
        pools = store if states is None else VaultPools(store, states)
        server = DataPlaneServer(pools, ring, name, tcp=("127.0.0.1", 0))
        bucket = await Bucket.open(connection, home.subjects.members_bucket)
        record = replace(member_record(Role.VAULT, name), inbox=prefix)
        loop = VaultLoop(connection, home.subjects, Lease(bucket, record), store, server, self.fatal, states=states)
        await loop.start()
        return Vault(loop, store, thread)

    def disk(self, name: str) -> SimDisk:
        """Of the machine where it runs: what is left of it after its lives."""
        if name not in self.disks:
            self.disks[name] = SimDisk(self.hub, name, cuts=0.1)
        return self.disks[name]

    async def placement(self, name: str) -> PlacementLoop:
        prefix = inbox_prefix(PLACEMENT_INBOX, f"{name}-{new_process_id()}")
        home = self.home_of(name)
        connection = await self.connect(home, f"placement-{name}", prefix, "placement")
        system = await self.connect(home, f"placement-sys-{name}", prefix, "sys")
        record = MemberRecord(
            name, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, codec.supported_versions()
        )
        chance = random.Random(self.hub.random.getrandbits(32)).random
        config, parts = PlacementConfig(policy="cost", index_blocks=4096), PlacementParts(system=system)
        loop = PlacementLoop(
            connection, home.subjects, record, config, chance=chance, fleet_key=FLEET_KEY, parts=parts,
            on_fenced=lambda error: self.fatal(str(error)),
        )  # fmt: skip
        await loop.start()
        return loop

    async def producer(self, name: str, tenant: str = "public") -> Connection:
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.{tenant}", new_process_id())
        return await self.connect(self.home_of(name), prefix, prefix, f"producer-{tenant}")

    async def client(self, name: str, tenant: str = "public") -> Client:
        return await Client.over(await self.producer(name, tenant), self.home_of(name).subjects)


@dataclass(frozen=True, slots=True)
class Vault:
    loop: VaultLoop
    store: VaultStore
    thread: DiskThread | None

    async def stop(self) -> None:
        await self.loop.stop()
        if self.thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.thread.close, LAST_WORDS_S)
