"""As many workers of each model of `kvfleet up` as `kvfleet scale` says, or with `--autoscale MIN:MAX` placement.

    placement ── kvf.placement.stats: desired, the largest of all replicas' ──▶ here ─┬─ too few ──▶ start workers
    kvfleet scale ── kvf.embedded.scale: so many ──▶                                  └─ one too many ──▶ who is the
        cheapest to lose? ── kvf.placement.victim ──▶ that one drains: its streams go on elsewhere, it ends with 0

Nothing happens while no placement answers, and no worker drains unless every registered replica answers, knows, and
sees all workers of this machine. `steps` decides and is pure; a thread of its own sends the requests; the thread that
owns the fleet starts processes, as the kernel ends them with the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import typer

from kvfleet.cli.console import err
from kvfleet.cli.embedded.processes import Child
from kvfleet.cli.operator.drain import costs, tell
from kvfleet.cli.operator.operator_login import Login
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message, is_no_responders
from kvproto.errors import CodecError, InvalidRequest, KvfleetError
from kvproto.ids import new_process_id
from kvproto.messages import PlacementStats, Role, ScaleReply, ScaleRequest
from kvproto.subjects import Subjects

POLL_S = 1.0
ANSWERS_S = 0.3  # for all replicas to answer
MEMBERS_S = 2.0  # to read who is registered
MOST_WORKERS = 256  # of a model, on one machine
PAUSE_S = 60.0  # after a worker was given up: the next one would hardly do better


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    minimum: int
    maximum: int


def read_limits(said: str | None) -> ScaleLimits | None:
    """`MIN:MAX`; a MIN of 0: no worker while there is nothing to do. Raises typer.BadParameter."""
    if said is None:
        return None
    low, _, high = said.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) >= 1):
        raise typer.BadParameter(f"{said!r} is not MIN:MAX with 0 <= MIN <= MAX >= 1", param_hint="--autoscale")
    return ScaleLimits(int(low), int(high))


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """One model, over all replicas."""

    desired: int
    living: int  # workers that every replica sees
    known: bool = True  # to every replica


UNKNOWN = WantedWorkers(0, 0, known=False)  # no placement has seen it


def steps(wanted: WantedWorkers, running: int, draining: int) -> int:
    """How many workers to start, or -1: one is to drain. `running`: those that do not drain. One drains at a time, and
    none does unless all are known: a replica that has just begun desires what it sees. Pure."""
    if running < wanted.desired:
        return wanted.desired - running
    if draining or not wanted.known or wanted.living < running:
        return 0
    return -1 if running > wanted.desired else 0


def merged(answers: Sequence[PlacementStats]) -> dict[str, WantedWorkers]:
    """By model, the most that any replica desires. Pure."""
    found: dict[str, WantedWorkers] = {}
    for model in {one.model for answer in answers for one in answer.models}:
        said = [one for answer in answers for one in answer.models if one.model == model]
        known = len(said) == len(answers) and all(one.known for one in said)
        found[model] = WantedWorkers(max(one.desired for one in said), min(one.living for one in said), known)
    return found


@dataclass(eq=False, slots=True)
class LocalAutoscaler:
    """The thread that owns the processes starts `thread`, calls `maintain` regularly, and sets `stopping`. In any case
    `thread` ends with the process. `spawn(model)` starts a worker. Placement decides how many there are, or `targets`,
    by model."""

    login: Login
    namespace: str
    models: Sequence[str]
    spawn: Callable[[str], Child]
    workers: list[Child]  # the fleet's own
    placement_decides: bool = True
    may_be_none: bool = False  # a fleet without a worker is at rest, not broken
    targets: dict[str, int] = field(default_factory=dict)
    wanted: deque[str] = field(default_factory=deque)  # models of workers to start; one leaves as its worker comes
    lock: threading.Lock = field(default_factory=threading.Lock)  # of both
    stopping: threading.Event = field(default_factory=threading.Event)
    paused_until: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def maintain(self) -> None:
        """Starts wanted workers and removes those that are gone."""
        for gone in [child for child in self.workers if child.given_up]:
            with self.lock:
                self.workers.remove(gone)
            if gone.process.returncode and not gone.draining:
                self.paused_until = time.monotonic() + PAUSE_S
        while self.wanted:
            model, started = self.wanted[0], []
            try:
                started = [self.spawn(model)]
                err.print(f"kvfleet: starting {started[0].name} of {model}")
            except OSError as error:  # the machine has no room: the workers that are there go on
                err.print(f"kvfleet: no worker of {model} was started: {error}")
                self.paused_until = time.monotonic() + PAUSE_S
            with self.lock:
                self.workers += started
                self.wanted.popleft()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except KvfleetError as error:
            err.print(f"kvfleet: not scaled any more: {error}")

    async def _watch(self) -> None:
        subjects = Subjects(self.namespace)
        async with self.login.connected("kvfleet-autoscaler") as connection:
            await connection.subscribe(subjects.embedded_scale(), partial(self._answer, connection))
            while not await asyncio.to_thread(self.stopping.wait, POLL_S):
                if not (self.placement_decides or self.targets):
                    continue
                try:
                    await self._look(connection, subjects)
                except (KvfleetError, TimeoutError) as error:  # an outage: the fleet stays as it is
                    if self.stopping.is_set():
                        return
                    err.print(f"kvfleet: not scaled: {error or 'no answer'}")

    async def _answer(self, connection: Connection, message: Message) -> None:
        """Silent about models that are not of this fleet: another one may have them."""
        try:
            asked = codec.decode(ScaleRequest, message.data)
        except CodecError as error:
            await connection.publish(message.reply, codec.encode(ScaleReply("", 0, error.code, error.message)))
            return
        if asked.model and asked.model not in self.models:
            return
        with self.lock:
            reply = self.retarget(asked)
        await connection.publish(message.reply, codec.encode(reply))

    def retarget(self, asked: ScaleRequest) -> ScaleReply:
        """Take what is asked for, if it can be had."""
        model = asked.model or self.models[0]
        has = sum(child.model == model and not child.draining for child in self.workers)
        why = ""
        if not asked.model and len(self.models) > 1:
            why = f"name one of its models: {', '.join(self.models)}"
        elif self.placement_decides:
            why = "it was started with --autoscale: placement says how many workers there are"
        elif not 1 <= asked.workers <= MOST_WORKERS:
            why = f"{asked.workers} workers: from 1 to {MOST_WORKERS}"
        if why:
            return ScaleReply(model, has, InvalidRequest.code, why)
        self.targets[model] = asked.workers
        self.paused_until = 0.0
        return ScaleReply(model, has)

    async def _look(self, connection: Connection, subjects: Subjects) -> None:
        answers = await ask_all(connection, subjects, ANSWERS_S)
        wanted = merged(answers)
        for model, target in self.targets.items():
            wanted[model] = replace(wanted.get(model, UNKNOWN), desired=target)
        for model in self.models:
            if model not in wanted:
                continue
            with self.lock:
                known = [child for child in self.workers if child.model == model]
                asked = self.wanted.count(model)
            staying = {child.name: child for child in known if not child.draining}
            step = steps(wanted[model], len(staying) + asked, len(known) - len(staying))
            if step > 0 and time.monotonic() >= self.paused_until:
                self.wanted += [model] * step
            elif step < 0 and await registered(connection, subjects) <= {one.placement for one in answers}:
                await _drain(connection, subjects, model, staying)


async def _drain(connection: Connection, subjects: Subjects, model: str, own: Mapping[str, Child]) -> None:
    """The cheapest of our own workers. Raises KvfleetError."""
    cheapest = next((one for one in await costs(connection, subjects, model) if one.worker in own), None)
    if cheapest is None:
        return  # none of ours is ready
    child = own[cheapest.worker]
    child.draining = True  # first: it may end at once
    try:
        await tell(connection, subjects, child.name)
    except BaseException:
        child.draining = False
        raise
    err.print(
        f"kvfleet: draining {child.name} of {model}: {cheapest.seconds:.2f} s to compute again, "
        f"{cheapest.requests} requests",
    )


async def registered(connection: Connection, subjects: Subjects) -> set[str]:
    """The placement replicas that hold a lease. Raises Unavailable, TimeoutError."""
    async with asyncio.timeout(MEMBERS_S):
        bucket = await Bucket.open(connection, subjects.members_bucket)
        return {entry.key.rsplit(".", 1)[-1] for entry in await bucket.listed(f"{Role.PLACEMENT.value}.>")}


async def ask_all(connection: Connection, subjects: Subjects, within_s: float) -> list[PlacementStats]:
    """The placement replicas' answers within that time."""
    answers: dict[str, PlacementStats] = {}
    nobody = asyncio.Event()

    async def hear(message: Message) -> None:
        if is_no_responders(message):
            nobody.set()
            return
        with contextlib.suppress(CodecError):
            answer = codec.decode(PlacementStats, message.data)
            answers[answer.placement] = answer

    inbox = f"{connection.inbox_prefix}.s.{new_process_id()}"
    subscription = await connection.subscribe(inbox, hear)
    try:
        await connection.publish(subjects.placement_stats(), b"", reply=inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await nobody.wait()
    finally:
        await subscription.unsubscribe()
    return list(answers.values())
