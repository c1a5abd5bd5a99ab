"""One run of a seed: a fleet, its clients' requests, what breaks meanwhile, and what the chaos suite's judge says."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from kvfleet.worker.serve.loop import ENGINE_FAILED
from tests.chaos import schedule as chaos
from tests.chaos.behaviour import PLAIN
from tests.chaos.checker import check
from tests.chaos.history import Answer, Exchange, Happened, History
from tests.chaos.load import answer_of
from tests.dst import deleted
from tests.dst.breaking import Breaker
from tests.dst.callers import Callers
from tests.dst.cases import Request, cases
from tests.dst.hub import Stuck
from tests.dst.ingresses import ingress
from tests.dst.plan import CLIENTS, HYBRID_SEED, Plan, names_in
from tests.dst.rest import faults_at_rest
from tests.dst.schedule import Fault, Kind
from tests.dst.timeline import Timeline
from tests.dst.world import Begin, World

WHOLE_S = 60.0
READY_S = 30.0
FORGOTTEN_S = 10.0  # after which, and after the faults, what was deleted must be nowhere
COMMIT_S = 8.0  # of a session whose record cannot be written
FENCED_S = 1.5  # in which an earlier life that woke has ended
PATIENCE_S = 9.0  # of a request that no worker has taken on; it ends a little later
_AS_CHAOS = {
    Kind.KILL: chaos.Kind.KILL, Kind.POWER_CUT: chaos.Kind.KILL, Kind.DISK_LOST: chaos.Kind.KILL,
    Kind.PAUSE: chaos.Kind.STOP_LONG, Kind.TWIN: chaos.Kind.STOP_LONG,
    Kind.DRAIN: chaos.Kind.DRAIN, Kind.UPGRADE: chaos.Kind.UPGRADE,
    Kind.PARTITION: chaos.Kind.PARTITION, Kind.DEAF: chaos.Kind.PARTITION, Kind.DUMB: chaos.Kind.PARTITION,
    Kind.LOST: chaos.Kind.PARTITION, Kind.CUT: chaos.Kind.CUT, Kind.NATS_KILL: chaos.Kind.NATS_KILL,
    Kind.NATS_HANG: chaos.Kind.NATS_STOP, Kind.NATS_LEADERLESS: chaos.Kind.NATS_STOP, Kind.SLOW: chaos.Kind.NATS_STOP,
    Kind.APART: chaos.Kind.NATS_STOP,
}  # fmt: skip


Answers = dict[tuple[str, int], Answer]


@dataclass(slots=True)
class Outcome:
    wrong: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # what happened, with its time
    counts: dict[str, int] = field(default_factory=dict)


class Trial:
    def __init__(self, plan: Plan) -> None:
        self.world = world = World(plan.group, plan.regions, hybrid=plan.hybrid)
        self.group, self.fleet = plan.group, plan.fleet
        makers = {"f": world.worker, "p": world.placement, "v": world.vault, "i": partial(ingress, world, world.web)}
        self.begins: dict[str, Begin] = {name: partial(makers[name[0]], name) for name in names_in(plan.fleet)}
        if "v0" in self.begins:
            self.begins["v0"] = partial(world.vault, "v0", has_disk=True)

    def start(self) -> None:
        """Raises Stuck."""
        world = self.world
        world.start("init", world.buckets)
        world.hub.run(world.processes["init"].tasks[0].done, READY_S)
        for name, begin in self.begins.items():
            world.start(name, begin)
        self.callers = Callers(world, [name for name in self.begins if name[0] == "i"])
        names = (*self.begins, *self.callers.names)
        world.hub.run(lambda: all(world.processes[name].made for name in names), READY_S)
        workers = [world.home_of(name) for name in self.begins if name[0] == "f"]
        views = {name: self.callers.client(tenant).members.view for tenant, name in CLIENTS.items()}
        world.hub.run(
            lambda: all(len(list(one.ready())) == workers.count(world.home_of(name)) for name, one in views.items()),
            READY_S,
        )


def learn(*, hybrid: bool) -> Answers:
    """The right answers, of a fleet that nothing happens to."""
    trial = Trial(Plan(HYBRID_SEED if hybrid else 0, (), ()))
    trial.start()
    tasks = [trial.callers.ask(Request(0.2 * at, case, PLAIN)) for at, case in enumerate(cases())]
    trial.world.hub.run(lambda: all(task.done() for task in tasks), 300.0)
    for task in tasks:
        task.result()
    known = {case.name: case for case in cases()}
    exchanges = trial.callers.exchanges
    for one in exchanges:
        assert [end.code for end in one.ends] == ["finished"], (one.case, one.ends, one.refusals)
    answers = {(one.case, one.turn): answer_of(one, known[one.case]) for one in exchanges}
    trial.world.close()
    return answers


def run(plan: Plan, answers: Answers, trial: Trial, *, traces: bool = False) -> Outcome:
    """Of a fleet that has just started. `traces`: the lines have the messages that a failure is about."""
    world, hub, found = trial.world, trial.world.hub, Outcome()
    hub.random.seed(plan.seed)
    random.seed(plan.seed)
    happened: list[Happened] = []
    twins: list[tuple[str, float, float]] = []
    began = hub.now

    def note(fault: Fault) -> None:
        found.lines.append(f"{hub.now - began:9.4f} {fault}")
        if (kind := _AS_CHAOS.get(fault.kind)) is not None:
            until = hub.now + fault.for_s
            judged = chaos.Fault(len(happened), fault.at_s, kind, fault.target, fault.for_s, 0)
            happened.append(Happened(judged, hub.now, until, until))
            if fault.kind is Kind.TWIN:
                twins.append((fault.target, hub.now, until + FENCED_S))

    breaker = Breaker(world, note)
    timeline = Timeline([home.server for home in world.homes]) if traces else None
    try:
        breaker.plan(plan.faults)
        tasks = [trial.callers.ask(request) for request in plan.requests]
        world.run_for(WHOLE_S)
        bad = _judge(trial, found, tasks, History(answers, trial.callers.exchanges, happened), twins)
        if timeline is not None:
            requests_of = {one.request for one in trial.callers.exchanges if one.number in bad}
            lines = [(float(line.split()[0]), line.split(maxsplit=1)[1]) for line in found.lines]
            found.lines = [
                f"{at:9.4f} {told}"
                for at, told in sorted(lines + timeline.about(requests_of, began), key=itemgetter(0))
            ]
    except Stuck as error:
        found.wrong.append(f"stuck: {error}")
    finally:
        breaker.end()
    for process in [*world.former, *world.processes.values()]:
        found.wrong += [
            f"{process.place.name}: {one.get('message')} {one.get('exception')!r}" for one in process.loop.unhandled
        ]
    found.lines += [f"{told} ended by itself" for told in world.fatals]
    found.wrong += [told for told in world.fatals if ENGINE_FAILED in told]  # its requests went on elsewhere
    for exchange in trial.callers.exchanges:
        pieces = [(one.at, one.ids, one.text) for one in exchange.pieces]
        found.lines.append(f"request {exchange.number} {exchange.case} {exchange.workers} {exchange.refusals} {pieces}")
    found.counts["turns"] = hub.turns_total
    return found


def _judge(
    trial: Trial,
    found: Outcome,
    tasks: list[asyncio.Task[None]],
    history: History,
    twins: list[tuple[str, float, float]],
) -> set[int]:
    """The exchanges that broke a promise. `twins`: when two lives of whom were there."""
    for request, task in enumerate(tasks):
        if task.done() and task.exception() is not None:
            found.wrong.append(f"caller {request}: {task.exception()!r}")
    given_up = [one for one in history.exchanges if _outlasted(one, history.faults) or _doubled(one, twins)]
    history.exchanges = [one for one in history.exchanges if one not in given_up]
    verdict = check(history)
    found.wrong += [f"{one.what}: {one.told} (request {one.exchange})" for one in verdict.violations]
    found.wrong += [f"at rest: {told}" for told in faults_at_rest(trial.world)]
    before = trial.world.hub.now - FORGOTTEN_S
    texts = [text for at, text in trial.callers.deleted if at < before]
    found.wrong += sorted({f"deleted: {told}" for told in deleted.found(trial.world, texts)})
    found.wrong += [f"web: {told}" for told in trial.world.web.failures]
    found.counts |= verdict.counts
    found.counts["resumed"] = sum(len({name for _, name in one.workers}) > 1 for one in history.exchanges)
    found.counts["given_up"] = len(given_up)
    found.counts["deleted"] = len(texts)
    return {one.exchange for one in verdict.violations if one.exchange is not None}


def _outlasted(exchange: Exchange, faults: list[Happened]) -> bool:
    """Whether NATS was away, for all or for an ingress, so often that a request's patience ended before any worker
    began with it, or a session's when all was said and only its record was left to write: then an error is right, also
    in a stream."""
    if not exchange.ends or exchange.ends[0].code == "finished":
        return False
    end = exchange.ends[0].at
    during = [
        one
        for one in faults
        if (one.fault.target == "nats" or (one.fault.target[0] == "i" and one.fault.kind is chaos.Kind.PARTITION))
        and one.began < end
        and one.until > exchange.began
    ]
    if exchange.pieces:
        away_s = sum(max(0.0, min(one.until, end) - max(one.began, end - COMMIT_S)) for one in during)
        return exchange.ends[0].code == "unavailable" and away_s > COMMIT_S / 2
    return bool(during) and end - exchange.began > PATIENCE_S


def _doubled(exchange: Exchange, twins: list[tuple[str, float, float]]) -> bool:
    """Whether two lives of its worker may have said it to a bare producer. The earlier one ends when it next renews
    its lease; clients drop what they hear twice."""
    if not exchange.transport.is_bare:
        return False
    end = max([exchange.began, *(piece.at for piece in exchange.pieces)])
    names = {name for _, name in exchange.workers}
    return any(name in names and began < end and exchange.began < until for name, began, until in twins)
