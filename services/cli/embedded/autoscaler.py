"""`kvfleet up --autoscale MIN:MAX`: as many workers of each model as placement says, on this machine.

    placement ── kvf.placement.stats: desired, the largest of all replicas' ──▶ here ─┬─ too few ──▶ start workers
                                                                                      └─ one too many ──▶ who is the
        cheapest to lose? ── kvf.placement.victim ──▶ that one drains: its streams go on elsewhere, it ends with 0

Nothing happens while no placement answers, and no worker drains unless every registered replica answers, knows, and
sees all workers of this machine. `steps` decides and is pure; a thread of its own sends the requests; the thread that
owns the fleet starts processes, as the kernel ends them with the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import typer

from kvfleet.cli.console import err
from kvfleet.cli.embedded.processes import Child
from kvfleet.cli.operator.drain import costs, tell
from kvfleet.cli.operator.operator_login import Login
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message, is_no_responders
from kvproto.errors import CodecError, KvfleetError
from kvproto.ids import new_process_id
from kvproto.messages import PlacementStats, Role
from kvproto.subjects import Subjects

POLL_S = 1.0
ANSWERS_S = 0.3  # for all replicas to answer
MEMBERS_S = 2.0  # to read who is registered
JOIN_S = 0.5  # when all processes are gone: the fleet's own time to stop is up by then
PAUSE_S = 60.0  # after a worker was given up: the next one would hardly do better


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    minimum: int
    maximum: int


def read_limits(said: str | None) -> ScaleLimits | None:
    """`MIN:MAX`. Raises typer.BadParameter."""
    if said is None:
        return None
    low, _, high = said.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise typer.BadParameter(f"{said!r} is not MIN:MAX with 1 <= MIN <= MAX", param_hint="--autoscale")
    return ScaleLimits(int(low), int(high))


@dataclass(frozen=True, slots=True)
class WantedWorkers:
    """One model, over all replicas."""

    desired: int
    living: int  # workers that every replica sees
    known: bool = True  # to every replica


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


@dataclass(slots=True)
class KnownWorkers:
    model: str
    draining: bool = False


@dataclass(eq=False, slots=True)
class LocalAutoscaler:
    """The thread that owns the processes calls `start`, then `maintain` regularly; it sets `stopping` and calls `join`.
    `spawn(model)` starts a worker."""

    login: Login
    namespace: str
    models: Sequence[str]
    spawn: Callable[[str], Child]
    lock: threading.Lock = field(default_factory=threading.Lock)
    workers: dict[str, KnownWorkers] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)  # by model, to be started, and not there yet
    wanted: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)  # models of workers to start
    stopping: threading.Event = field(default_factory=threading.Event)
    paused_until: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self, workers: Iterable[tuple[Child, str]]) -> None:
        self.workers = {child.name: KnownWorkers(model) for child, model in workers}
        self.thread.start()

    def join(self) -> None:
        """Wait a moment for the thread, once `stopping` is set. It ends with the process in any case."""
        if self.thread.is_alive():
            self.thread.join(JOIN_S)

    def drains(self, worker: Child) -> bool:
        with self.lock:
            known = self.workers.get(worker.name)
            return known is not None and known.draining

    def maintain(self, workers: list[Child]) -> None:
        """Starts wanted workers and removes those that are gone from `workers`."""
        for gone in [child for child in workers if child.given_up]:
            workers.remove(gone)
            if gone.process.returncode and not self.drains(gone):
                self.paused_until = time.monotonic() + PAUSE_S
            with self.lock:
                self.workers.pop(gone.name, None)
        while not self.wanted.empty():
            model = self.wanted.get()
            try:
                child = self.spawn(model)
            except OSError as error:  # the machine has no room: the workers that are there go on
                err.print(f"kvfleet: no worker of {model} was started: {error}")
                self.paused_until = time.monotonic() + PAUSE_S
                with self.lock:
                    self.asked[model] -= 1
                continue
            err.print(f"kvfleet: starting {child.name} of {model}")
            workers.append(child)
            with self.lock:
                self.workers[child.name] = KnownWorkers(model)
                self.asked[model] -= 1

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        except KvfleetError as error:
            err.print(f"kvfleet: no autoscaling any more: {error}")

    async def _watch(self) -> None:
        subjects = Subjects(self.namespace)
        async with self.login.connected("kvfleet-autoscaler") as connection:
            while not await asyncio.to_thread(self.stopping.wait, POLL_S):
                try:
                    await self._look(connection, subjects)
                except (KvfleetError, TimeoutError) as error:  # an outage: the fleet stays as it is
                    if self.stopping.is_set():
                        return
                    err.print(f"kvfleet: not scaled: {error or 'no answer'}")

    async def _look(self, connection: Connection, subjects: Subjects) -> None:
        answers = await ask_all(connection, subjects, ANSWERS_S)
        wanted = merged(answers)
        for model in self.models:
            if model not in wanted:
                continue
            with self.lock:
                known = [(name, one) for name, one in self.workers.items() if one.model == model]
                asked = self.asked[model]
            draining = sum(one.draining for _, one in known)
            step = steps(wanted[model], len(known) - draining + asked, draining)
            if step > 0 and time.monotonic() >= self.paused_until:
                self._start(model, step)
            elif step < 0 and await registered(connection, subjects) <= {one.placement for one in answers}:
                await self._drain(connection, subjects, model, {name for name, one in known if not one.draining})

    def _start(self, model: str, count: int) -> None:
        with self.lock:
            self.asked[model] += count
        for _ in range(count):
            self.wanted.put(model)

    async def _drain(self, connection: Connection, subjects: Subjects, model: str, own: set[str]) -> None:
        """The cheapest of ours. Raises KvfleetError."""
        cheapest = next((one for one in await costs(connection, subjects, model) if one.worker in own), None)
        if cheapest is None:
            return  # none of ours is ready
        self._mark(cheapest.worker, draining=True)  # first: it may end at once
        try:
            await tell(connection, subjects, cheapest.worker)
        except BaseException:
            self._mark(cheapest.worker, draining=False)
            raise
        err.print(
            f"kvfleet: draining {cheapest.worker} of {model}: {cheapest.seconds:.2f} s to compute again, "
            f"{cheapest.requests} requests",
        )

    def _mark(self, worker: str, *, draining: bool) -> None:
        with self.lock:
            if worker in self.workers:
                self.workers[worker].draining = draining


async def registered(connection: Connection, subjects: Subjects) -> set[str]:
    """The placement replicas that hold a lease. Raises Unavailable, TimeoutError."""
    found: set[str] = set()
    async with asyncio.timeout(MEMBERS_S):
        bucket = await Bucket.open(connection, subjects.members_bucket)
        watch = await bucket.watch(f"{Role.PLACEMENT.value}.>")
        try:
            async for entry in watch.entries():
                if entry is None:
                    break
                if entry.value is not None:
                    found.add(entry.key.rsplit(".", 1)[-1])
        finally:
            await watch.stop()
    return found


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
