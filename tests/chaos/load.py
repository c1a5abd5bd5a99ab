"""Loop: the clients of a run: so many users at once, each asking one thing after the other.

Everything a user sees goes into the history. Users never stop for a fault: what they see is the result.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.subjects import PRODUCER_INBOX, inbox_prefix
from tests.chaos.asking import BareProducer, ask_client
from tests.chaos.behaviour import PLAIN, Behaviour
from tests.chaos.cases import Case, canary
from tests.chaos.fleet import Fleet
from tests.chaos.history import Answer, Exchange, History, Transport
from tests.chaos.http_asking import HttpClients
from tests.chaos.layout import FAKE, REAL, TENANTS, Role
from tests.support.waiting import LIMIT_S

THINK_S = {REAL: 0.5, FAKE: 0.2}
CANARY_S = 1.5
TWIN_S = 0.4  # after which a client asks the same a second time
OWN_TOKENS = 3  # of a random prompt a tenant may have by chance, from prompts of its own: reuse is exact to the token
REFERENCES_AT_ONCE = 12


class Load:
    """Owns the clients and, through them, the history's exchanges. `start`, then `stop`, which waits for their ends."""

    def __init__(self, fleet: Fleet, cases: Sequence[Case], history: History, seed: int) -> None:
        self.history = history
        self.clients: dict[str, Client] = {}
        self._fleet = fleet
        self._cases = list(cases)
        self._chance = random.Random(seed)
        self._numbers = itertools.count()
        self._users: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        bases = {name: f"http://127.0.0.1:{port}" for name, port in fleet.ports.items()}
        self._http = HttpClients(bases, fleet.now)
        self._bare: BareProducer
        self._bare_connection: Connection | None = None

    async def open(self) -> None:
        for place, tenant in zip(self._fleet.layout.of_role(Role.CLIENT), TENANTS, strict=True):
            prefix = inbox_prefix(f"{PRODUCER_INBOX}.{tenant}", f"chaos{os.urandom(4).hex()}")
            url = self._fleet.ways[place.name].url
            connection = await self._fleet.connect(f"producer-{tenant}", prefix, url)
            self.clients[tenant] = await Client.over(connection, self._fleet.subjects)
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.public", f"bare{os.urandom(4).hex()}")
        self._bare_connection = bare = await self._fleet.connect("producer-public", prefix)
        self._bare = BareProducer(bare, self._fleet.subjects, self._fleet.now)
        for client in self.clients.values():
            async with asyncio.timeout(LIMIT_S):
                while {view.record.model for view in client.members.view.ready()} != set(self._fleet.layout.models):
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._http.close()
        for client in self.clients.values():
            await client.close()
            await client.connection.close()
        if self._bare_connection is not None:
            await self._bare_connection.close()

    # ------------------------------------------------------------------ without faults

    async def learn(self) -> None:
        """Ask for every case once, while nothing breaks: these are the right answers. Raises AssertionError."""
        gate = asyncio.Semaphore(REFERENCES_AT_ONCE)

        async def once(case: Case) -> None:
            async with gate:
                for exchange in await self.converse(case, PLAIN):
                    assert [end.code for end in exchange.ends] == ["finished"], (case, exchange.ends, exchange.refusals)
                    self.history.answers[case.name, exchange.turn] = answer_of(exchange, case)

        await asyncio.gather(*(once(case) for case in self._cases))

    async def converse(self, case: Case, behaviour: Behaviour) -> list[Exchange]:
        """Ask it, and where it is a session all its turns, until one does not finish."""
        session = f"s-{os.urandom(6).hex()}" if case.transport is Transport.GENERATE else ""
        turns = len(case.turns) if session else 1
        out: list[Exchange] = []
        for turn in range(turns):
            exchange = self._exchange(case, behaviour, turn)
            out.append(exchange)
            await self._ask(case, behaviour, exchange, session)
            if [end.code for end in exchange.ends] != ["finished"]:
                break
        return out

    # ------------------------------------------------------------------ with faults

    def start(self, real: int, fake: int) -> None:
        """So many users of each model, who take its cases in turn, each from another place; and one canary."""
        for model, count in ((REAL, real), (FAKE, fake)):
            cases = [case for case in self._cases if case.model == model]
            taken = itertools.cycle(cases)
            for at in range(count):
                chance = random.Random(self._chance.getrandbits(32))
                self._users.append(asyncio.create_task(self._use(model, taken, chance), name=f"user-{model}-{at}"))
        chance = random.Random(self._chance.getrandbits(32))
        self._users.append(asyncio.create_task(self._cross(chance), name="user-canary"))

    async def stop(self) -> None:
        """No new requests; waits for those that run. Raises what a user raised: the suite's own fault."""
        self._stopping.set()
        await asyncio.gather(*self._users)

    async def _use(self, model: str, cases: itertools.cycle[Case], chance: random.Random) -> None:
        while not self._stopping.is_set():
            case = next(cases)
            transport = case.transport
            is_plain = transport.is_bare or transport is Transport.BACKGROUND
            behaviour = Behaviour.draw(chance, is_http=transport.is_http, is_plain=is_plain)
            if transport is Transport.GENERATE and behaviour.whole:
                behaviour = PLAIN
            await self.converse(case, behaviour)
            await self._think(THINK_S[model] * chance.uniform(0.5, 1.5))

    async def _cross(self, chance: random.Random) -> None:
        """One tenant asks for what nobody ever asked for, then another does: nothing of it is cached for that one."""
        while not self._stopping.is_set():
            model = chance.choice(self._fleet.layout.models)
            first, second = chance.sample(TENANTS, 2)
            case = canary(random.Random(chance.getrandbits(32)), first, model)
            found = []
            for one in (case, replace(case, tenant=second)):
                exchange = self._exchange(one, PLAIN, 0)
                await self._ask(one, PLAIN, exchange, "")
                found.append(exchange)
            if all(len(exchange.ends) == 1 and exchange.ends[0].code == "finished" for exchange in found):
                self.history.counts["canaries"] = self.history.counts.get("canaries", 0) + 1
                if (found[1].cached_tokens or 0) > OWN_TOKENS and not self._was_asked_again(found[1]):
                    tokens = f"{found[1].cached_tokens} tokens of {first}'s prompt for {second}"
                    self.history.crossed.append(f"{tokens}, request {found[1].request}, by {found[1].workers}")
                if found[0].text_of(0) != found[1].text_of(0):
                    self.history.crossed.append(f"{first} and {second} asked the same and got different answers")
            await self._think(CANARY_S)

    def _was_asked_again(self, exchange: Exchange) -> bool:
        """By an ingress, or, where that was killed before its first word, by the client: it may find what was computed
        for it the first time."""
        broke = any(not why.endswith("no connection") for _, why in exchange.refusals)
        return broke or bool(exchange.broken) or self._fleet.was_tried_again(exchange.request)

    async def _think(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            pass

    # ------------------------------------------------------------------ one request

    def _exchange(self, case: Case, behaviour: Behaviour, turn: int) -> Exchange:
        exchange = Exchange(
            next(self._numbers),
            case.transport,
            case.name,
            case.model,
            case.tenant,
            behaviour.name,
            self._fleet.now(),
            turn,
        )
        self.history.exchanges.append(exchange)
        return exchange

    async def _ask(self, case: Case, behaviour: Behaviour, exchange: Exchange, session: str) -> None:
        if case.transport is Transport.CLIENT:
            await ask_client(self.clients[case.tenant], case, behaviour, exchange, self._fleet.now)
        elif case.transport.is_bare:
            await self._bare.ask(case, behaviour, exchange)
        elif case.transport is Transport.BACKGROUND:
            await self._http.ask_in_background(case, exchange, key=os.urandom(8).hex())
        elif behaviour.repeats:
            key = os.urandom(8).hex()
            twin = self._exchange(case, behaviour, exchange.turn)
            await asyncio.gather(
                self._http.ask(case, behaviour, exchange, session=session, key=key),
                self._later(self._http.ask(case, behaviour, twin, session=session, key=key)),
            )
        else:
            key = os.urandom(8).hex() if exchange.number % 2 or behaviour.cuts_after is not None else None
            await self._http.ask(case, behaviour, exchange, session=session, key=key)

    @staticmethod
    async def _later(work: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(TWIN_S)
        await work


def answer_of(exchange: Exchange, case: Case) -> Answer:
    """What a finished exchange got."""
    choices = range(case.choices)
    return Answer(
        texts=tuple(exchange.text_of(choice) for choice in choices),
        ids=tuple(exchange.ids_of(choice) for choice in choices),
        reasons=tuple(exchange.reasons.get(choice, "") for choice in choices),
        logprobs=tuple(tuple(exchange.logprobs.get(choice, ())) for choice in choices),
        output_tokens=exchange.ends[-1].output_tokens,
    )
