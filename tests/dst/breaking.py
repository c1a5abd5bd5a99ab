"""Does what a schedule says to a world, and mends it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.dst.nats_link import Published
from tests.dst.nats_server import Subscribed
from tests.dst.schedule import Fault, Kind
from tests.dst.world import AT, Begin, World

CALM_S = (0.0001, 0.001)


class Breaker:
    """`begins`: how each process that may die is started again."""

    def __init__(self, world: World, begins: dict[str, Begin], note: Callable[[str], None]) -> None:
        self._world, self._begins, self._note = world, begins, note
        self._lossy: dict[str, float] = {}  # by process: the chance that a message to it is lost
        self._repeating: dict[str, float] = {}
        world.server.on_delivery = self._copies

    def plan(self, faults: tuple[Fault, ...]) -> None:
        hub = self._world.hub
        for fault in faults:
            hub.at(hub.now + fault.at_s, partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        world, hub, name = self._world, self._world.hub, fault.target
        self._note(str(fault))
        server, process = world.server, world.processes.get(name)
        mend: Callable[[], None] = _nothing
        if fault.kind is Kind.NATS_KILL:
            server.kill()
            mend = server.start
        elif fault.kind is Kind.NATS_HANG:
            server.hang()
            mend = server.wake
        elif fault.kind is Kind.NATS_LEADERLESS:
            server.jetstream.is_away = True
            mend = partial(setattr, server.jetstream, "is_away", False)
        elif fault.kind is Kind.SLOW:
            server.latency_range_s = (0.0001, 0.002 + 0.3 * fault.strength**3)
            mend = partial(setattr, server, "latency_range_s", CALM_S)
        elif process is None or process.place.is_dead:
            return
        elif fault.kind is Kind.KILL:
            world.kill(name)
            mend = partial(world.start, name, self._begins[name])  # type: ignore[assignment]
        elif fault.kind is Kind.PAUSE:
            process.place.pause()
            mend = partial(self._wake, name)
        elif fault.kind is Kind.CUT:
            for transport in world.transports_of(name):
                transport.lose()
        elif fault.kind is Kind.CLOCK:
            process.place.clock_ahead_s += (fault.strength - 0.5) * 400
        elif fault.kind is Kind.LOST:
            self._lossy[name] = 0.3 * fault.strength
            mend = partial(self._lossy.pop, name, 0.0)  # type: ignore[assignment]
        elif fault.kind is Kind.REPEATED:
            self._repeating[name] = 0.5 * fault.strength
            mend = partial(self._repeating.pop, name, 0.0)  # type: ignore[assignment]
        else:
            mend = self._part(name, fault.kind)
        hub.at(hub.now + fault.for_s, mend)

    def _part(self, name: str, kind: Kind) -> Callable[[], None]:
        world = self._world
        world.net.apart.add((name, AT))
        held = []
        for transport in world.transports_of(name):
            if kind in (Kind.PARTITION, Kind.DUMB):
                held.append(transport.to_server)
            if kind in (Kind.PARTITION, Kind.DEAF):
                held.append(transport.to_client)
        for link in held:
            link.hold()

        def mend() -> None:
            world.net.apart.discard((name, AT))
            for link in held:
                link.let_go()

        return mend

    def _wake(self, name: str) -> None:
        place = self._world.processes[name].place
        if not place.is_dead:
            place.go_on()

    def _copies(self, message: Published, to: Subscribed) -> int:
        if not self._lossy and not self._repeating:
            return 1
        name, draw = to.client.transport.place.name, self._world.hub.random.random
        if draw() < self._lossy.get(name, 0.0):
            return 0
        return 2 if draw() < self._repeating.get(name, 0.0) else 1


def _nothing() -> None:
    pass
