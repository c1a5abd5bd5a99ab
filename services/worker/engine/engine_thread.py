"""The thread that owns the engine. Loop.

The loop puts commands on a deque and sets an event; the thread runs them between steps and hands results back with
`call_soon_threadsafe`. Neither side waits for the other. Answers to `call` share the deque of results: an answer comes
after the results of exactly the steps before it, so it matches the events made of those.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kvfleet.worker.engine.engine import Engine
from kvfleet.worker.eviction.base import EvictionBalance
from kvfleet.worker.port.capacity import Attempt
from kvfleet.worker.port.engine_port import EngineFacts, EnginePort
from kvfleet.worker.port.outputs import SequenceFailed, StepResult
from kvfleet.worker.port.sequence_spec import SequenceSpec
from kvfleet.worker.text.grammar_guard import GrammarGuard
from kvproto.block_hash import Root
from kvproto.errors import EngineFailure, KvfleetError
from kvproto.messages import Grammar, Inspection, Tier
from kvservice.distribution import Distribution

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEASURE_PERIOD_S = 0.05
NOTHING_RAN_S = 0.001
IDLE_PERIOD_S = 1.0  # idle rates change too: links are measured
CHECK_PERIOD_S = 1.0  # when idle
_STOPPED = "the engine was stopped"


@dataclass(eq=False)
class EngineThread(EnginePort):
    """Owns `engine` from `start` to `stop`. Methods and callbacks are for the loop's thread unless they say otherwise.

    `on_crash` hears of an exception out of a step: the thread is gone then, and all sequences, present and future, fail
    as EngineFailure (retryable). It hears of one out of `on_result` too: the thread ends, and delivers no more results.
    """

    engine: Engine
    on_result: Callable[[list[StepResult]], None]
    loop: asyncio.AbstractEventLoop
    on_crash: Callable[[BaseException], None] = lambda error: None
    cancel_to_free: Distribution = field(default_factory=Distribution)  # seconds until its blocks were free
    is_ready: bool = True  # a worker ends with its engine
    _commands: deque[Callable[[], None]] = field(default_factory=deque)
    _results: deque[StepResult | Callable[[], None]] = field(default_factory=deque)
    _delivery_due: bool = False
    _delivers: bool = True  # until `on_result` fails
    _wake: threading.Event = field(default_factory=threading.Event)
    _stopping: bool = False
    _measured_at: float = 0.0
    _check_due: float = 0.0
    _step_began: float | None = None  # set by the engine's thread
    _over: EngineFailure | None = None  # set by the engine's thread when it ends

    def __post_init__(self) -> None:
        self.counters = self.engine.counters
        runner = self.engine.runner
        self.facts = EngineFacts(self.engine.pool.num_blocks, runner.bytes_per_block, runner.memory.kv_format)
        self.measured = self.engine.load(), self.engine.rates()
        self.engine.deliver = self._hand_over
        self._guard = GrammarGuard(self.engine.grammars)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and join. Running sequences and calls fail as EngineFailure. From any thread."""
        self._stopping = True
        self._wake.set()
        self._guard.stop()
        if self._thread.is_alive():
            self._thread.join()
        elif self._over is None:  # it was never started
            self._end(EngineFailure(_STOPPED))

    async def learn(self, grammar: Grammar, tenant: str) -> None:
        await self._guard.check(grammar, tenant)
        await asyncio.to_thread(self.engine.grammars.compile, grammar)  # no step waits for it

    def submit(self, spec: SequenceSpec) -> None:
        """A sequence that the engine refuses comes back as SequenceFailed."""
        self._command(partial(self._add, spec))

    def cancel(self, request: str, attempt: int, received: Sequence[int] = ()) -> None:
        """No later step has them; the current one is aborted if it runs only for this."""
        self.engine.give_up(request, attempt)
        self._command(partial(self._cancel, request, attempt, received, time.monotonic()))

    def pause(self, request: str, attempt: int) -> None:
        self.post(lambda engine: engine.pause(request, attempt))

    def resume(self, request: str, attempt: int) -> None:
        self.post(lambda engine: engine.resume(request, attempt))

    def expect_return(self, request: str, attempt: int, soonest_s: float, latest_s: float) -> None:
        def expect(engine: Engine) -> None:
            engine.tiers.pauses.expect((request, attempt), soonest_s, latest_s)

        self.post(expect)

    def make_room(self, request: str, attempt: int, count: int) -> asyncio.Future[frozenset[Attempt]]:
        return self.call(lambda engine: engine.make_room(request, attempt, count))

    def let_go(self, attempts: Sequence[Attempt], *, keep: bool) -> asyncio.Future[None]:
        return self.call(lambda engine: engine.let_go(attempts, keep=keep))

    def holdings(self) -> asyncio.Future[tuple[Mapping[Tier, Sequence[bytes]], int]]:
        return self.call(lambda engine: (engine.kv.holdings(), engine.kv.digest))

    def inspect(self, root: Root, ids: Sequence[int]) -> asyncio.Future[Inspection]:
        return self.call(lambda engine: engine.kv.inspect(root, ids))

    def erase(self, root: Root, ids: Sequence[int], keep: int) -> asyncio.Future[int]:
        return self.call(lambda engine: engine.kv.erase(root, ids, keep))

    def read_kv(self, root: Root, ids: Sequence[int], layer: int) -> asyncio.Future[tuple[Any, Any]]:
        return self.call(lambda engine: engine.kv.read_kv(root, ids, layer))

    def wake(self) -> None:
        """Have the engine maintain its tiers. From any thread."""
        self._wake.set()

    @property
    def protected_blocks_total(self) -> int:
        protector = self.engine.tiers.protector
        return 0 if protector is None else protector.protected_total

    @property
    def balance(self) -> EvictionBalance:
        return self.engine.pool.balance

    def copied_bytes(self) -> tuple[int, int]:
        """From host to device, and from device to host."""
        copier = self.engine.tiers.copier
        return copier.speed_in.bytes_total, copier.speed_out.bytes_total

    @property
    def step_age_s(self) -> float:
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def call(self, query: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Run `query` on the engine's thread between two steps; EngineFailure if the thread is gone."""
        future: asyncio.Future[T] = self.loop.create_future()
        self._command(partial(self._answer, query, future))
        return future

    def post(self, work: Callable[[Engine], None]) -> None:
        """Like `call`, from any thread, without an answer."""
        self._command(partial(work, self.engine))

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()
        if self._over is not None:  # the thread is gone
            self._obey()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                self._obey()
                maintained = self.engine.maintain()
                if maintained is not None:
                    self._hand_over(maintained)
                if self.engine.has_work:
                    self._obey()  # cancels that came meanwhile
                    self._step_began = time.monotonic()
                    result = self.engine.step()
                    self._step_began = None
                    self._hand_over(result)
                    self._measure(MEASURE_PERIOD_S)
                    if not (result.sequences or result.outputs):  # all wait for block copies
                        self._wake.wait(NOTHING_RAN_S)
                elif not self._stopping and not self.engine.verify():
                    self._measure(0.0)
                    if (due_in := self.engine.tiers.due_in()) is None and time.monotonic() >= self._check_due:
                        # Better to crash on wrong books than to serve wrong blocks.
                        self.engine.audit()
                        self._check_due = time.monotonic() + CHECK_PERIOD_S
                    self._wake.wait(min(IDLE_PERIOD_S if due_in is None else due_in, self.engine.tiers.pauses.due_in()))
            self._end(EngineFailure(_STOPPED))
        except Exception as error:  # the thread's top: no request may wait for ever
            logger.exception("the engine failed")
            self._end(EngineFailure(f"the engine failed: {type(error).__name__}: {error}"))
            self._call_soon(self.on_crash, error)

    def _end(self, reason: EngineFailure) -> None:
        self._step_began = None
        self._over = reason
        self._hand_over(self.engine.abandon(reason))
        self._obey()  # commands that came meanwhile

    def _obey(self) -> None:
        while True:
            try:
                command = self._commands.popleft()
            except IndexError:  # not `while self._commands`: once it is over the loop's thread takes some too
                return
            command()

    def _add(self, spec: SequenceSpec) -> None:
        try:
            if self._over is not None:
                raise self._over
            self.engine.add(spec)
        except KvfleetError as error:
            self._hand_over(StepResult([SequenceFailed(spec.request, spec.attempt, error, spec.choice)]))

    def _cancel(self, request: str, attempt: int, received: Sequence[int], asked: float) -> None:
        if self.engine.cancel(request, attempt, received):
            self.cancel_to_free.observe(time.monotonic() - asked)

    def _answer(self, query: Callable[[Engine], T], future: asyncio.Future[T]) -> None:
        try:
            if self._over is not None:
                raise self._over
            result = query(self.engine)
        except Exception as error:  # noqa: BLE001 - the caller gets the error, the engine goes on
            failure = error
            self._hand_over(lambda: None if future.done() else future.set_exception(failure))
        else:
            self._hand_over(lambda: None if future.done() else future.set_result(result))

    def _measure(self, period: float) -> None:
        now = time.monotonic()
        if now - self._measured_at >= period:
            self.measured = self.engine.load(), self.engine.rates()
            self._measured_at = now

    def _hand_over(self, result: StepResult | Callable[[], None]) -> None:
        self._results.append(result)
        if not self._delivery_due:
            self._delivery_due = True
            self._call_soon(self._deliver)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self.loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed
            logger.debug("the event loop is closed, a result of the engine is dropped")

    def _deliver(self) -> None:
        self._delivery_due = False  # before taking: a later result makes a new delivery due
        results: list[StepResult] = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, StepResult):
                results.append(result)
                continue
            self._pass_on(results)
            results = []
            result()
        self._pass_on(results)

    def _pass_on(self, results: list[StepResult]) -> None:
        if not results or not self._delivers:
            return
        try:
            self.on_result(results)
        except Exception as error:  # the readers of these results would wait for ever
            self._delivers = False
            logger.exception("results of the engine were not taken")
            self._stopping = True
            self._wake.set()
            self.on_crash(error)
