"""Loop: who asks, each transport from a place of its own: two tenants' clients, a bare producer, an HTTP library."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from functools import partial
from typing import Any

from kvproto.client import Client
from tests.chaos.asking import BareProducer, ask_client
from tests.chaos.cases import Case
from tests.chaos.history import Exchange, Transport
from tests.chaos.http_asking import HttpClients
from tests.chaos.load import TWIN_S
from tests.dst.cases import Request
from tests.dst.ingresses import PORT
from tests.dst.plan import BARE, CLIENTS, HTTP
from tests.dst.web import SimHttpTransport
from tests.dst.world import World

DELETE_S = 0.5  # between two attempts


class Callers:
    """`exchanges`: what they saw. `deleted`: texts of sessions and responses that were, and when."""

    def __init__(self, world: World, ingresses: list[str]) -> None:
        self.exchanges: list[Exchange] = []
        self.deleted: list[tuple[float, str]] = []
        self._world = world
        self._https = HTTP[: len(world.homes)]
        bases = {name: f"http://{name}:{PORT}" for name in ingresses}
        for tenant, name in CLIENTS.items():
            world.start(name, partial(world.client, name, tenant))
        world.start(BARE, self._bare)
        for name in self._https:
            near = {one: url for one, url in bases.items() if world.home_of(one) is world.home_of(name)}
            world.start(name, partial(self._http, near))

    @property
    def names(self) -> tuple[str, ...]:
        return *CLIENTS.values(), BARE, *self._https

    async def _bare(self) -> BareProducer:
        return BareProducer(await self._world.producer(BARE), self._world.home_of(BARE).subjects, self._now)

    async def _http(self, bases: dict[str, str]) -> HttpClients:
        return HttpClients(bases, self._now, SimHttpTransport(self._world.web))

    def _now(self) -> float:
        return self._world.hub.now

    def client(self, tenant: str) -> Client:
        made = self._world.processes[CLIENTS[tenant]].made
        assert isinstance(made, Client)
        return made

    def ask(self, request: Request) -> asyncio.Task[None]:
        """Done when it has ended, all of its turns, and what it left is deleted. Not of a turn that was left as an
        ingress died under it: nobody promises that (docs/limits.md)."""
        transport = request.case.transport
        first = self._exchange(request, 0)
        http = self._https[first.number % len(self._https)]
        name = CLIENTS[request.case.tenant] if transport is Transport.CLIENT else BARE if transport.is_bare else http
        return self._world.spawn(self._world.processes[name], self._converse(request, first, name))

    async def _converse(self, request: Request, exchange: Exchange, name: str) -> None:
        await asyncio.sleep(request.at_s)
        case, session = request.case, f"s-{os.urandom(6).hex()}"
        for turn in range(max(1, len(case.turns)) if case.transport is Transport.GENERATE else 1):
            exchange = exchange if turn == 0 else self._exchange(request, turn)
            exchange.began = self._now()
            await self._once(request, exchange, session, name)
            if [end.code for end in exchange.ends] != ["finished"]:
                if exchange.ends or request.behaviour.leaves_after is None:
                    return
                break
        if request.deletes and not (exchange.left_at is not None and (exchange.broken or exchange.refusals)):
            is_session = case.transport is Transport.GENERATE
            path = f"sessions/{session}" if is_session else f"v1/responses/resp_{exchange.request}"
            if await self._delete(case, path, name) and not self._died_under(exchange):
                self.deleted += [(self._now(), turn) for turn in case.turns]

    async def _once(self, request: Request, exchange: Exchange, session: str, name: str) -> None:
        case, behaviour, transport = request.case, request.behaviour, request.case.transport
        if transport is Transport.CLIENT:
            await ask_client(self.client(case.tenant), case, behaviour, exchange, self._now)
            return
        if transport.is_bare:
            await self._made(BARE, BareProducer).ask(case, behaviour, exchange)
            return
        http, key = self._made(name, HttpClients), os.urandom(8).hex()
        if transport is Transport.BACKGROUND:
            await http.ask_in_background(case, exchange, key=key)
            return
        session = session if transport is Transport.GENERATE else ""
        asks: list[Awaitable[None]] = []
        if behaviour.repeats:
            twin = self._exchange(request, exchange.turn)
            twin.began = self._now() + TWIN_S
            asks.append(self._later(http.ask(case, behaviour, twin, session=session, key=key)))
        keyed = behaviour.repeats or exchange.number % 2 or behaviour.cuts_after is not None
        asks.append(http.ask(case, behaviour, exchange, session=session, key=key if keyed else None))
        await asyncio.gather(*asks)

    async def _later(self, asking: Awaitable[None]) -> None:
        await asyncio.sleep(TWIN_S)
        await asking

    async def _delete(self, case: Case, path: str, name: str) -> bool:
        """Whether an ingress has said so."""
        http, end = self._made(name, HttpClients), self._now() + case.limit_s
        while not (is_gone := await http.delete(path, case.tenant)) and self._now() < end:
            await asyncio.sleep(DELETE_S)
        return is_gone

    def _died_under(self, exchange: Exchange) -> bool:
        """Whether an ingress did that had a turn to note that was left."""
        names = {ingress for _, ingress in exchange.ingresses}
        ended = self._world.ended
        return exchange.left_at is not None and any(at > exchange.began and name in names for at, name in ended)

    def _made(self, name: str, kind: type) -> Any:
        made = self._world.processes[name].made
        assert isinstance(made, kind)
        return made

    def _exchange(self, request: Request, turn: int) -> Exchange:
        case = request.case
        exchange = Exchange(
            len(self.exchanges), case.transport, case.name, case.model, case.tenant, request.behaviour.name, 0.0, turn
        )
        self.exchanges.append(exchange)
        return exchange
