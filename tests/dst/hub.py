"""Who runs next, and what time it is: one thread of the machine, virtual time, and an order drawn from a seed.

    actors: event loops, threads ──wait──▶ timers, locks, links ──wake──▶ ready ──drawn by the seed──▶ run

Each actor is a greenlet. It runs until it waits, or, an event loop, for a few callbacks. When none is ready, time goes
on to the next timer: a minute of a fleet that mostly waits takes no longer than what it does.
"""

from __future__ import annotations

import heapq
import logging
from asyncio import AbstractEventLoop, events
from collections.abc import Callable
from random import Random

from greenlet import GreenletExit, getcurrent, greenlet

START_S = 1_000.0  # of monotonic clocks
UNIX_S = 1_800_000_000.0  # of wall clocks then
LIMIT = 50_000  # turns without time going on: somebody waits by asking


class Stuck(Exception):
    """Nothing is left that could happen, or time does not go on."""


class Timer:
    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def cancel(self) -> None:
        self.action = _nothing


def _nothing() -> None:
    pass


class Place:
    """A process: what stops, goes on and dies together. `clock_ahead_s`: its wall clock against others'."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.name = hub, name
        self.is_dead = self.is_paused = False
        self.clock_ahead_s = 0.0
        self.version = 0  # of the wire, that it speaks
        self.actors: list[Actor] = []
        self._parked: list[Actor] = []

    def pause(self) -> None:
        """As SIGSTOP."""
        self.is_paused = True
        self._parked += [one for one in self.hub.ready if one.place is self]
        self.hub.ready = [one for one in self.hub.ready if one.place is not self]

    def go_on(self) -> None:
        self.is_paused = False
        parked, self._parked = self._parked, []
        self.hub.ready += parked

    def die(self) -> None:
        """At once, as with SIGKILL: nothing of it runs on, not even what is to be done at last."""
        self.pause()
        self.is_dead = True

    def woken(self, actor: Actor) -> None:
        (self._parked if self.is_paused else self.hub.ready).append(actor)


class Actor:
    """What runs in turn with others, in its place. `loop`: the event loop that it is."""

    def __init__(
        self, place: Place, work: Callable[[], None], name: str, loop: AbstractEventLoop | None = None
    ) -> None:
        self.place, self.name, self.loop = place, name, loop
        self.is_ready = False
        self.greenlet = greenlet(work, place.hub.greenlet)
        self.greenlet.actor = self  # type: ignore[attr-defined]
        place.actors.append(self)

    def wake(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            self.place.woken(self)

    def wait(self) -> None:
        """Until somebody wakes it. Called by itself."""
        hub = self.place.hub
        if hub.is_over:
            raise GreenletExit
        hub.greenlet.switch()


class Hub:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = START_S
        self.ready: list[Actor] = []
        self.greenlet = getcurrent()
        self.world = self.here = Place(self, "world")
        self.places = [self.world]
        self.is_over = False
        self.enter: Callable[[Place], None] = lambda place: None  # before another place's turn
        self.turns_total = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._made = 0

    @property
    def wall(self) -> float:
        """Where the present actor runs."""
        return UNIX_S + self.now - START_S + self.here.clock_ahead_s

    def place(self, name: str) -> Place:
        made = Place(self, name)
        self.places.append(made)
        return made

    def at(self, when: float, action: Callable[[], None]) -> Timer:
        self._made += 1
        timer = Timer(action)
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def sleep(self, delay_s: float) -> None:
        """Of the actor that runs."""
        me = current_actor()
        self.at(self.now + max(delay_s, 0.0), me.wake)
        me.wait()

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Raises Stuck."""
        end, turns, timers, draw = self.now + limit_s, 0, self._timers, self.random.random
        set_loop = events._set_running_loop
        try:
            while not until():
                if ready := self.ready:
                    turns += 1
                    at = int(draw() * len(ready))
                    actor = ready[at]
                    ready[at] = ready[-1]
                    ready.pop()
                    actor.is_ready = False
                    if actor.place is not self.here:
                        self.here = actor.place
                        self.enter(actor.place)
                    set_loop(actor.loop)
                    actor.greenlet.switch()
                    if turns > LIMIT:
                        raise Stuck(f"at {self.now:.6f} s {actor.place.name} runs without an end")
                    continue
                if not timers:
                    raise Stuck("nothing is left that could happen")
                when = timers[0][0]
                if when > end:
                    raise Stuck(f"not within {limit_s:g} s")
                if when > self.now:
                    self.now = when
                    self.turns_total, turns = self.turns_total + turns, 0
                self.here = self.world
                while timers and timers[0][0] <= self.now:
                    heapq.heappop(timers)[2].action()
        finally:
            self.here = self.world
            set_loop(None)

    def close(self) -> None:
        """What waits ends: its last words are heard by nobody."""
        self.is_over = True
        logging.disable()
        for place in self.places:
            for actor in place.actors:
                if actor.greenlet and not actor.greenlet.dead:
                    actor.greenlet.throw(GreenletExit)
        logging.disable(logging.NOTSET)


def current_actor() -> Actor:
    actor = getattr(getcurrent(), "actor", None)
    if actor is None:
        raise RuntimeError("what waits here is no actor: it would wait for ever")
    assert isinstance(actor, Actor)
    return actor
