"""Shows that HTTP of the simulation does as HTTP does: a small app on it, then a fleet with two ingresses. Prints what
happened, and when. Begun by `test_web`, in a process that does nothing else.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import httpx
from starlette.types import Message, Receive, Scope, Send

from kvfleet.ingress.ingress import Ingress
from kvfleet.placement.workers.warm_up import warm_up
from tests.chaos.behaviour import PLAIN, Behaviour
from tests.chaos.cases import Case
from tests.chaos.history import Exchange, Transport
from tests.chaos.http_asking import HttpClients
from tests.dst import guard
from tests.dst.hub import Place
from tests.dst.ingresses import ingress
from tests.dst.web import HIGH, SimHttpTransport, SimWeb
from tests.dst.world import Begin, World

PART, PARTS = 8_192, 64  # of what the small app sends
LIMIT_S = 60.0
TEXT = "the king and his men rode to the gate of the old town"
Call = Coroutine[Any, Any, Any]


class _Pours:
    """An app. Sends much for a GET, and for a POST nothing until its client has left."""

    def __init__(self) -> None:
        self.sent = 0
        self.heard: list[Message] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.sent = 0
        if scope["method"] == "POST":
            while not self.heard or self.heard[-1]["type"] != "http.disconnect":
                self.heard.append(await receive())
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", scope["raw_path"])]})
        for left in reversed(range(PARTS)):
            self.sent += PART
            await send({"type": "http.response.body", "body": bytes(PART), "more_body": left > 0})


class WebTrial:
    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.web = SimWeb(self.world.hub)

    def say(self, told: object) -> None:
        print(f"{self.world.hub.now:.9f} {told}")

    def until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        self.world.hub.run(lambda: bool(condition()), limit_s)

    def start(self, *begun: tuple[str, Begin]) -> None:
        for name, begin in begun:
            self.world.start(name, begin)
        self.until(lambda: all(self.world.processes[name].made for name, _ in begun))

    def place(self, name: str) -> Place:
        return self.world.processes[name].place

    def kill(self, name: str) -> None:
        self.world.kill(name)
        self.web.died(self.place(name))
        self.say(f"{name} is dead")

    async def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=SimHttpTransport(self.web), trust_env=False, timeout=3.0)

    def failure(self, name: str, work: Call) -> str:
        """What a request of this process raises, and after how long."""
        began = self.world.hub.now
        try:
            self.world.do(name, work)
        except httpx.TransportError as error:
            return f"{type(error).__name__} after {self.world.hub.now - began:.9f} s"
        raise AssertionError("it should have failed")

    def spawn(self, name: str, work: Call) -> asyncio.Task[Any]:
        return self.world.spawn(self.world.processes[name], work)

    def close(self) -> None:
        assert not self.web.failures, self.web.failures
        for process in [*self.world.former, *self.world.processes.values()]:
            assert not process.loop.unhandled, process.loop.unhandled
            assert process.failed is None, process.failed
        self.world.close()


def alone() -> None:
    """The web by itself: connections that fail, are slow, held and cut."""
    trial, app = WebTrial(1), _Pours()
    web, hub = trial.web, trial.world.hub

    async def serving() -> bool:
        web.serve(hub.here, trial.world.processes["s"].loop, "s", app)
        return True

    trial.start(("s", serving), ("c", trial.http), ("d", trial.http))
    client: httpx.AsyncClient = trial.world.processes["c"].made
    other: httpx.AsyncClient = trial.world.processes["d"].made
    url = "http://s:80/a%2Fb?c=d"

    answer = trial.world.do("c", client.get(url))
    assert (len(answer.content), answer.headers["x-path"]) == (PART * PARTS, "/a%2Fb"), answer
    trial.until(lambda: not web.connections)
    trial.say("whole")
    trial.say(f"nobody there: {trial.failure('c', client.get('http://t/'))}")

    async def slowly() -> int:
        most, read = 0, 0
        async with client.stream("GET", url) as answer:
            async for part in answer.aiter_raw():
                read += len(part)
                most = max(most, app.sent - read)
                await asyncio.sleep(0.05)
        return most

    ahead = trial.world.do("c", slowly())
    assert HIGH / 2 < ahead <= HIGH + 2 * PART, ahead
    trial.say(f"read slowly, {ahead} bytes behind")

    trial.place("s").pause()
    trial.say(f"paused: {trial.failure('c', client.get(url))}")
    trial.place("s").go_on()
    trial.until(lambda: not web.connections)

    web.apart.add(("c", "s"))
    trial.say(f"apart: {trial.failure('c', client.get(url))}")
    web.apart.clear()

    asking = trial.spawn("c", client.post(url, content=b"x" * 1000))
    trial.until(lambda: app.heard)
    for one in web.connections_of(trial.place("c")):
        one.hold()
    trial.until(asking.done)
    assert isinstance(asking.exception(), httpx.ReadTimeout), asking
    trial.world.run_for(1.0)
    assert len(web.connections) == 1, "the server has not heard of it"
    for one in web.connections_of(trial.place("s")):
        one.let_go()
    trial.until(lambda: app.heard[-1]["type"] == "http.disconnect")
    assert sum(len(one.get("body", b"")) for one in app.heard) == 1000
    app.heard.clear()
    trial.say("held, and let go")

    asking = trial.spawn("c", client.post(url))
    trial.until(lambda: app.heard)
    for one in web.connections_of(trial.place("s")):
        one.lose()
    trial.until(lambda: asking.done() and app.heard[-1]["type"] == "http.disconnect")
    trial.say(f"lost: {asking.exception()!r}")
    app.heard.clear()

    asking = trial.spawn("d", other.post(url))
    trial.until(lambda: app.heard)
    trial.kill("d")
    trial.until(lambda: app.heard[-1]["type"] == "http.disconnect")
    app.heard.clear()

    def dying(work: Call, when: Callable[[], object]) -> BaseException | None:
        asking = trial.spawn("c", work)
        trial.until(when)
        trial.kill("s")
        trial.until(asking.done)
        return asking.exception()

    trial.say(f"killed before its head: {dying(client.post(url), lambda: app.heard)!r}")
    trial.say(f"dead: {trial.failure('c', client.get(url))}")
    trial.start(("s", serving))
    trial.say(f"killed after it: {dying(slowly(), lambda: app.sent > HIGH)!r}")
    assert not web.connections, web.connections
    trial.close()


class FleetTrial(WebTrial):
    INGRESSES = ("i0", "i1")
    asked = 0

    def start_fleet(self) -> None:
        world = self.world
        world.start("init", world.buckets)
        self.until(world.processes["init"].tasks[0].done)
        members: list[tuple[str, Begin]] = [(name, partial(world.placement, name)) for name in ("p0", "p1")]
        members += [(name, partial(world.worker, name)) for name in ("w0", "w1")]
        self.start(*members)
        self.start(*((name, partial(ingress, world, self.web, name)) for name in self.INGRESSES))
        self.start(("c", self.clients), ("d", self.clients))
        self.until(lambda: all(self.ingress(name).ready_workers == 2 for name in self.INGRESSES))
        self.until(lambda: all(self.ingress(name).models.bundles for name in self.INGRESSES))

    async def clients(self) -> HttpClients:
        bases = {name: f"http://{name}:8080" for name in self.INGRESSES}
        return HttpClients(bases, lambda: self.world.hub.now, SimHttpTransport(self.web))

    def ingress(self, name: str) -> Ingress:
        made = self.world.processes[name].made
        assert isinstance(made, Ingress)
        return made

    def running(self) -> int:
        """Sequences at the workers."""
        loads = [self.world.processes[name].made.loop.heartbeat().load for name in ("w0", "w1")]
        return sum(load.running + load.waiting for load in loads)

    def asking(
        self, case: Case, behaviour: Behaviour = PLAIN, *, turn: int = 0, client: str = "c"
    ) -> tuple[Exchange, asyncio.Task[None]]:
        self.asked += 1
        exchange = Exchange(self.asked, case.transport, case.name, case.model, case.tenant, behaviour.name, 0.0, turn)
        made: HttpClients = self.world.processes[client].made
        if case.transport is Transport.BACKGROUND:
            work = made.ask_in_background(case, exchange, key=case.name)
        else:
            work = made.ask(case, behaviour, exchange, session=case.name, key=f"key-{self.asked}")
        return exchange, self.spawn(client, work)

    def ask(self, case: Case, behaviour: Behaviour = PLAIN, turn: int = 0) -> Exchange:
        exchange, task = self.asking(case, behaviour, turn=turn)
        self.until(task.done)
        task.result()
        self.tell(exchange)
        return exchange

    def tell(self, exchange: Exchange) -> None:
        """With a digest of all that its client saw, times and texts to the last bit."""
        digest = hashlib.sha256(repr(exchange).encode()).hexdigest()[:16]
        ingresses = [(round(at, 3), name) for at, name in exchange.ingresses]
        ends = [one.code for one in exchange.ends]
        self.say(f"{exchange.case} {exchange.request} {ingresses} {len(exchange.pieces)} pieces, {ends} {digest}")


def case_of(name: str, transport: Transport, tokens: int, tenant: str = "public") -> Case:
    return Case(name, transport, "demo", tenant, tokens, {"temperature": 0.0, "ignore_eos": True}, turns=(TEXT, TEXT))


def fleet() -> None:
    """Streams and what becomes of them when clients leave and an ingress dies."""
    trial = FleetTrial(2)
    trial.start_fleet()
    trial.say("all are there")

    def finished(exchange: Exchange) -> str:
        assert [one.code for one in exchange.ends] == ["finished"], exchange
        return exchange.text_of(0)

    chat = case_of("chat", Transport.CHAT, 48)
    assert finished(trial.ask(chat)) == finished(trial.ask(chat, Behaviour("whole", whole=True)))
    completion = case_of("completion", Transport.COMPLETIONS, 48)
    streamed = finished(trial.ask(completion))
    assert finished(trial.ask(completion, Behaviour("whole", whole=True))) == streamed
    turns = case_of("generate", Transport.GENERATE, 24)
    for turn in range(2):
        finished(trial.ask(turns, turn=turn))
    background = trial.ask(case_of("background", Transport.BACKGROUND, 40, "acme"))
    finished(background)
    assert len(background.workers) == 1, background
    refused = trial.ask(case_of("unknown", Transport.CHAT, 8, "nobody"))
    assert [one.code for one in refused.ends] == ["401"], refused

    trial.until(lambda: not trial.running())
    left = trial.ask(case_of("leaves", Transport.CHAT, 400), Behaviour("leaves", leaves_after=5))
    assert left.left_at is not None, left
    assert trial.running(), "its sequence runs still"
    trial.until(lambda: not trial.running(), 5.0)
    trial.say("the sequence of the client that left is over")

    dying, _ = trial.asking(case_of("dies", Transport.CHAT, 400), client="d")
    trial.until(lambda: len(dying.pieces) > 5)
    trial.kill("d")
    trial.until(lambda: not trial.running(), 90.0)  # for as long it may come back: a grace period
    trial.say("the sequence of the client that died is over")

    long = case_of("long", Transport.CHAT, 90)
    whole = finished(trial.ask(long))
    for what in ("reset", "killed"):
        cut, task = trial.asking(case_of(f"long-{what}", Transport.CHAT, 90))
        trial.until(lambda cut=cut: len(cut.pieces) > 5)  # type: ignore[misc]
        name = cut.ingresses[-1][1]
        if what == "killed":
            trial.kill(name)
        else:
            for one in trial.web.connections_of(trial.place(name)):
                one.lose()
        trial.until(task.done)
        trial.tell(cut)
        assert finished(cut) == whole, what
        assert (cut.resumed, len(cut.broken)) == (1, 1), cut
    trial.start((name, partial(ingress, trial.world, trial.web, name)))
    both = [trial.asking(chat) for _ in trial.INGRESSES]
    trial.until(lambda: all(task.done() for _, task in both))
    assert {name for asked, _ in both for _, name in asked.ingresses} == {*trial.INGRESSES}, both
    for asked, _ in both:
        finished(asked)
        trial.tell(asked)
    trial.until(lambda: not trial.web.connections)
    trial.close()


def main(arguments: list[str]) -> int:
    """`arguments`: the log level of the product, which otherwise says nothing."""
    logging.basicConfig(level=[*arguments, "CRITICAL"][0], stream=sys.stderr)
    warm_up()  # what is compiled is kept in files
    guard.begin()
    sys.unraisablehook = lambda _: None  # last words of coroutines whose run is over
    gc.collect()
    gc.disable()  # what it frees would come to an end at other moments
    alone()
    fleet()
    return 0
