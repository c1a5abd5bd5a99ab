"""Does what a schedule says to a world, and mends it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.dataplane.block import BlockHeader
from kvproto.dataplane.keys import rotate_key
from kvproto.errors import KvfleetError
from tests.dst.hub import Place
from tests.dst.nats_link import Link, Published
from tests.dst.nats_server import SimNats, Subscribed
from tests.dst.schedule import Fault, Kind
from tests.dst.world import Home, Vault, World

CALM_S = (0.0001, 0.001)
DRAIN_S = 8.0  # until a process that does not end is killed
NEXT_VERSION = codec.VERSION + 1  # of a release to come, which reads this one too

Mend = Callable[[], object]


class Breaker:
    """Tells `note` of each fault as it is done."""

    def __init__(self, world: World, note: Callable[[Fault], None]) -> None:
        self._world, self._note = world, note
        self._lossy: dict[str, float] = {}  # by process: the chance that a message to it is lost
        self._repeating: dict[str, float] = {}
        for home in world.homes:
            home.server.on_delivery = self._copies
        self._this = codec.MIN_VERSION, codec.VERSION

    def plan(self, faults: tuple[Fault, ...]) -> None:
        hub = self._world.hub
        if any(fault.kind is Kind.UPGRADE for fault in faults):
            hub.enter = self._speak
        for fault in faults:
            hub.at(hub.now + fault.at_s, partial(self._begin, fault))

    def end(self) -> None:
        codec.MIN_VERSION, codec.VERSION = self._this

    def _speak(self, place: Place) -> None:
        low, high = self._this
        codec.VERSION = place.version or high
        codec.MIN_VERSION = max(low, codec.VERSION - 1)

    def _begin(self, fault: Fault) -> None:
        hub, process = self._world.hub, self._world.processes.get(fault.target)
        if fault.kind is Kind.SCALE_UP:
            if fault.target + "b" in self._world.processes:
                return
        elif process is not None and process.place.is_dead:
            return
        self._note(fault)
        mend = _DEEDS[fault.kind](self, fault)
        if mend is not None:
            hub.at(hub.now + fault.for_s, mend)

    # Processes.

    def _kill(self, fault: Fault) -> Mend:
        world, name = self._world, fault.target
        former = world.processes[name]
        world.kill(name)
        return lambda: world.start(name, former.begin) if world.processes[name] is former else None

    def _pause(self, fault: Fault) -> Mend:
        place = self._world.processes[fault.target].place
        place.pause()
        return lambda: None if place.is_dead else place.go_on()

    def _twin(self, fault: Fault) -> Mend:
        """On a machine that was taken for dead, and is not."""
        world, name = self._world, fault.target
        former = world.processes[name]
        world.hub.at(
            world.hub.now + fault.for_s / 2,
            lambda: world.start(name, former.begin) if world.processes[name] is former else None,
        )
        return self._pause(fault)

    def _drain(self, fault: Fault) -> Mend:
        world, name = self._world, fault.target
        former = world.processes[name]
        world.drain(name, DRAIN_S)

        def start() -> None:
            if world.processes[name] is not former:
                return
            if former.place.is_dead:
                world.start(name, former.begin)
            else:
                world.hub.at(world.hub.now + 0.5, start)

        return start

    def _upgrade(self, fault: Fault) -> Mend:
        versions, name = self._world.versions, fault.target
        versions[name] = self._this[1] if versions.get(name) == NEXT_VERSION else NEXT_VERSION
        return self._drain(fault)

    def _scale_up(self, fault: Fault) -> None:
        name = f"{fault.target}b"
        self._world.start(name, partial(self._world.worker, name))

    def _jump(self, fault: Fault) -> None:
        self._world.processes[fault.target].place.clock_ahead_s += (fault.strength - 0.5) * 400

    # Networks.

    def _partition(self, fault: Fault) -> Mend:
        """From NATS alone, or from all."""
        world, name, kind = self._world, fault.target, fault.kind
        place = world.processes[name].place
        is_alone = fault.strength > 0.4
        apart = {(name, home.at) for home in world.homes}
        world.net.apart |= apart
        links: list[Link | None] = []
        for transport in world.transports_of(name):
            links += [transport.to_server] * (kind is not Kind.DEAF) + [transport.to_client] * (kind is not Kind.DUMB)
        if is_alone:
            world.sockets.apart.add(name)
            for socket in world.sockets.of(place):
                there = socket.peer.out if socket.peer is not None else None
                links += [socket.out] * (kind is not Kind.DEAF) + [there] * (kind is not Kind.DUMB)
        lost = {(client, name) for client in world.processes} if is_alone and name[0] == "i" else set()
        world.web.apart |= lost
        web = world.web.connections_of(place) if is_alone else []
        for connection in web:
            connection.hold()
        for link in links:
            if link is not None:
                link.hold()

        def mend() -> None:
            world.net.apart.difference_update(apart)
            world.web.apart.difference_update(lost)
            world.sockets.apart.discard(name)
            for connection in web:
                connection.let_go()
            for link in links:
                if link is not None:
                    link.let_go()

        return mend

    def _cut(self, fault: Fault) -> None:
        world, place = self._world, self._world.processes[fault.target].place
        for transport in world.transports_of(fault.target):
            transport.lose()
        for socket in world.sockets.of(place):
            socket.lose()
        for connection in world.web.connections_of(place):
            connection.lose()

    def _half_open(self, fault: Fault) -> None:
        for socket in self._world.sockets.of(self._world.processes[fault.target].place):
            socket.forget()

    def _slow(self, fault: Fault) -> Mend:
        world = self._world
        slow = (0.0001, 0.002 + 0.3 * fault.strength**3)
        networks = [self._server(fault), world.sockets, world.web][: 1 + int(3 * fault.strength)]

        def mend() -> None:
            for one in networks:
                one.latency_range_s = CALM_S

        for one in networks:
            one.latency_range_s = slow
        return mend

    def _lose(self, fault: Fault) -> Mend:
        return self._of(self._lossy, fault.target, 0.3 * fault.strength)

    def _repeat(self, fault: Fault) -> Mend:
        return self._of(self._repeating, fault.target, 0.5 * fault.strength)

    def _flip(self, fault: Fault) -> Mend:
        return self._of(self._world.sockets.flips, fault.target, 0.1 * fault.strength)

    @staticmethod
    def _of(chances: dict[str, float], name: str, chance: float) -> Mend:
        chances[name] = chance
        return partial(chances.pop, name, 0.0)

    def _copies(self, message: Published, to: Subscribed) -> int:
        if not self._lossy and not self._repeating:
            return 1
        name, draw = to.client.transport.place.name, self._world.hub.random.random
        if draw() < self._lossy.get(name, 0.0):
            return 0
        return 2 if draw() < self._repeating.get(name, 0.0) else 1

    def _lie(self, fault: Fault) -> Mend:
        """It says that it has what it has not, and that it keeps what it lets go."""
        made, random = self._world.processes[fault.target].made, self._world.hub.random.random
        if not isinstance(made, Vault):
            return lambda: None
        store, lies = made.store, lambda: random() < fault.strength
        has, commit = store.has, store.commit

        def let_go(header: BlockHeader, buffer: memoryview) -> bool:
            if not lies():
                return commit(header, buffer)
            store.abandon(header, buffer)
            return True

        store.has = lambda *asked: [found or lies() for found in has(*asked)]  # type: ignore[method-assign]
        store.commit = let_go  # type: ignore[method-assign]

        def mend() -> None:
            store.has, store.commit = has, commit  # type: ignore[method-assign]

        return mend

    def _rotate(self, fault: Fault) -> None:
        world, home = self._world, self._home(fault)

        async def rotate() -> None:
            with contextlib.suppress(KvfleetError):
                connection = await world.connect(home, "init", "_adm.init", "admin")
                await rotate_key(await Bucket.open(connection, home.subjects.keys_bucket))
                await connection.close()

        world.spawn(world.processes["init"], rotate())

    # Disks.

    def _power_cut(self, fault: Fault) -> Mend:
        mend = self._kill(fault)
        self._world.disk(fault.target).power_cut()
        return mend

    def _lose_disk(self, fault: Fault) -> Mend:
        mend = self._kill(fault)
        del self._world.disks[fault.target]
        self._world.disk(fault.target)
        return mend

    def _fill(self, fault: Fault) -> Mend:
        disk = self._world.disk(fault.target)
        disk.room_bytes = 0
        return partial(setattr, disk, "room_bytes", None)

    def _slow_disk(self, fault: Fault) -> Mend:
        disk = self._world.disk(fault.target)
        disk.slow_s = 0.2 * fault.strength
        return partial(setattr, disk, "slow_s", 0.0)

    def _fail(self, fault: Fault) -> Mend:
        disk = self._world.disk(fault.target)
        disk.failing = fault.strength
        return partial(setattr, disk, "failing", 0.0)

    def _rot(self, fault: Fault) -> None:
        self._world.disk(fault.target).flip()

    # The NATS server.

    def _home(self, fault: Fault) -> Home:
        homes = self._world.homes
        return homes[int(fault.strength * 1000) % len(homes)]

    def _server(self, fault: Fault) -> SimNats:
        return self._home(fault).server

    def _kill_nats(self, fault: Fault) -> Mend:
        server = self._server(fault)
        server.kill()
        return server.start

    def _hang_nats(self, fault: Fault) -> Mend:
        server = self._server(fault)
        server.hang()
        return server.wake

    def _take_leader(self, fault: Fault) -> Mend:
        """Its consumers may be gone with the server that had them."""
        jetstream = self._server(fault).jetstream
        jetstream.is_away = True

        def mend() -> None:
            jetstream.is_away = False
            if fault.strength > 0.5:
                jetstream.lose_consumers()

        return mend

    def _part_regions(self, fault: Fault) -> Mend:
        links = [one for home in self._world.homes for one in home.server.beyond]
        for link in links:
            link.is_apart = True
        return lambda: [setattr(link, "is_apart", False) for link in links]


_DEEDS: dict[Kind, Callable[[Breaker, Fault], Mend | None]] = {
    Kind.KILL: Breaker._kill, Kind.PAUSE: Breaker._pause, Kind.DRAIN: Breaker._drain, Kind.UPGRADE: Breaker._upgrade,
    Kind.SCALE_UP: Breaker._scale_up, Kind.PARTITION: Breaker._partition, Kind.DEAF: Breaker._partition,
    Kind.DUMB: Breaker._partition, Kind.CUT: Breaker._cut, Kind.HALF_OPEN: Breaker._half_open, Kind.SLOW: Breaker._slow,
    Kind.LOST: Breaker._lose, Kind.REPEATED: Breaker._repeat, Kind.FLIPPED: Breaker._flip, Kind.CLOCK: Breaker._jump,
    Kind.POWER_CUT: Breaker._power_cut, Kind.DISK_LOST: Breaker._lose_disk, Kind.DISK_FULL: Breaker._fill,
    Kind.DISK_SLOW: Breaker._slow_disk, Kind.DISK_FAILS: Breaker._fail, Kind.DISK_ROTS: Breaker._rot,
    Kind.NATS_KILL: Breaker._kill_nats, Kind.NATS_HANG: Breaker._hang_nats, Kind.NATS_LEADERLESS: Breaker._take_leader,
    Kind.APART: Breaker._part_regions, Kind.TWIN: Breaker._twin, Kind.LIES: Breaker._lie, Kind.KEYS: Breaker._rotate,
}  # fmt: skip
