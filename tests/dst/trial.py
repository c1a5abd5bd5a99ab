"""One run of a seed: a fleet, forty requests, what breaks meanwhile, and what the chaos suite's judge says of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvproto.client import Client
from tests.chaos.asking import ask_client
from tests.chaos.behaviour import PLAIN, Behaviour
from tests.chaos.cases import Case
from tests.chaos.checker import check
from tests.chaos.history import Answer, Exchange, History, Transport
from tests.chaos.load import answer_of
from tests.dst.breaking import Breaker
from tests.dst.hub import Stuck
from tests.dst.schedule import Fault, drawn
from tests.dst.world import Begin, World

WORKERS, PLACEMENTS, CLIENTS = 4, 2, 2
REQUESTS, CASES = 40, 24
LOAD_S, BROKEN_S, WHOLE_S = 30.0, 32.0, 60.0  # requests begin, faults end, all is over
READY_S = 30.0
_WAYS: tuple[dict[str, Any], ...] = (
    {}, {}, {"temperature": 0.8, "seed": 1}, {"n": 2, "temperature": 0.9, "seed": 3}, {"logprobs": 2},
    {"frequency_penalty": 0.5},
)  # fmt: skip


@dataclass(slots=True)
class Outcome:
    seed: int
    faults: tuple[Fault, ...]
    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # what happened, with its time
    resumed: int = 0
    turns: int = 0


def cases() -> list[Case]:
    chance = random.Random(0)
    shared = [_ids(chance, length) for length in (16, 48, 96)]
    made = []
    for at in range(CASES):
        ids = chance.choice([(), *shared]) + _ids(chance, chance.randint(8, 60))
        sampling = {"temperature": 0.0, "ignore_eos": True, **_WAYS[at % len(_WAYS)]}
        made.append(
            Case(f"case-{at}", Transport.CLIENT, "demo", "public", chance.choice((4, 12, 24, 48)), sampling, ids)
        )
    return made


def _ids(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(10, 1000) for _ in range(count))


class Trial:
    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.members = [f"w{at}" for at in range(WORKERS)] + [f"p{at}" for at in range(PLACEMENTS)]
        self.clients = [f"c{at}" for at in range(CLIENTS)]
        self.begins: dict[str, Begin] = {}
        for name in self.members:
            self.begins[name] = partial(self.world.worker if name[0] == "w" else self.world.placement, name)
        self.exchanges: list[Exchange] = []

    def start(self) -> None:
        world = self.world
        world.start("init", world.buckets)
        world.hub.run(world.processes["init"].tasks[0].done, READY_S)
        for name in self.members:
            world.start(name, self.begins[name])
        for name in self.clients:
            world.start(name, world.client)
        names = (*self.members, *self.clients)
        world.hub.run(lambda: all(world.processes[name].made for name in names), READY_S)
        views = [self.client(name).members.view for name in self.clients]
        world.hub.run(lambda: all(len(list(view.ready())) == WORKERS for view in views), READY_S)

    def client(self, name: str) -> Client:
        made = self.world.processes[name].made
        assert isinstance(made, Client)
        return made

    def ask(self, name: str, case: Case, behaviour: Behaviour, at_s: float) -> Any:
        now = lambda: self.world.hub.now  # noqa: E731
        exchange = Exchange(
            len(self.exchanges), case.transport, case.name, case.model, case.tenant, behaviour.name, 0.0
        )
        self.exchanges.append(exchange)

        async def work() -> None:
            await asyncio.sleep(at_s)
            exchange.began = now()
            await ask_client(self.client(name), case, behaviour, exchange, now)

        return self.world.spawn(self.world.processes[name], work())


def learn() -> dict[tuple[str, int], Answer]:
    """The right answers, of a fleet that nothing happens to."""
    trial = Trial(0)
    trial.start()
    asked = cases()
    tasks = [trial.ask("c0", case, PLAIN, 0.0) for case in asked]
    trial.world.hub.run(lambda: all(task.done() for task in tasks), 120.0)
    for task in tasks:
        task.result()
    answers = {(case.name, 0): answer_of(one, case) for case, one in zip(asked, trial.exchanges, strict=True)}
    trial.world.close()
    return answers


def run(seed: int, answers: dict[tuple[str, int], Answer], faults: tuple[Fault, ...] | None = None) -> Outcome:
    """`faults`: others than the seed's."""
    trial = Trial(seed)
    hub = trial.world.hub
    found = Outcome(seed, drawn(seed, trial.members, trial.clients, BROKEN_S) if faults is None else faults)

    def note(told: str) -> None:
        found.lines.append(f"{hub.now - began:9.4f} {told}")

    began = hub.now
    try:
        trial.start()
        began = hub.now
        Breaker(trial.world, trial.begins, note).plan(found.faults)
        chance, asked = random.Random(seed), cases()
        tasks = [
            trial.ask(
                chance.choice(trial.clients),
                chance.choice(asked),
                Behaviour.draw(chance, is_http=False, is_plain=False),
                chance.uniform(0.0, LOAD_S),
            )
            for _ in range(REQUESTS)
        ]
        trial.world.run_for(WHOLE_S)
        for exchange, task in zip(trial.exchanges, tasks, strict=True):
            if not task.done():
                found.wrong.append(f"request {exchange.number} ({exchange.case}) has no end: {exchange.refusals[-2:]}")
            elif task.exception() is not None:
                found.wrong.append(f"request {exchange.number}: {task.exception()!r}")
        verdict = check(History(answers, trial.exchanges))
        found.wrong += [f"{one.what}: {one.told} (request {one.exchange})" for one in verdict.violations]
        found.wrong += [f"wrong: {one}" for one in verdict.mismatches]
        found.resumed = sum(len(one.workers) > 1 for one in trial.exchanges)
    except Stuck as error:
        found.wrong.append(f"stuck: {error}")
    for process in [*trial.world.former, *trial.world.processes.values()]:
        found.wrong += [
            f"{process.place.name}: {one.get('message')} {one.get('exception')!r}" for one in process.loop.unhandled
        ]
        if process.failed is not None and not process.place.is_dead:
            found.wrong.append(f"{process.place.name} did not start: {process.failed!r}")
    found.turns = hub.turns_total
    for exchange in trial.exchanges:
        found.lines.append(
            f"request {exchange.number} {exchange.workers} {[(one.at, one.ids) for one in exchange.pieces]}"
        )
    trial.world.close()
    return found
