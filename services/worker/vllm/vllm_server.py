"""Loop: one vLLM server, and whether it is there. Owned by the worker's event loop.

    looking ──/health 200──▶ checked ──all is as it must be──▶ up ──connector gone, no answer, no step──▶ looking
                                └─ it is no server for this worker ──▶ Unsuitable

A server is checked by requests of its own: the connector must greet, the sampler refuse a form that it cannot know, and
the KV events of a prompt arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvfleet.worker.schedule.step_pacer import TELLING
from kvfleet.worker.vllm.foreign_blocks import ForeignBlocks, ForeignHash, salt_of_root
from kvfleet.worker.vllm.kv_event_feed import Event, KvEventFeed
from kvfleet.worker.vllm.server_facts import (
    SAMPLER,
    EventAddresses,
    ServerFacts,
    Unsuitable,
    contradictions,
    is_known,
    missing_flags,
)
from kvfleet.worker.vllm.token_routes import NextTokens, TokenRoutes
from kvfleet.worker.vllm.vllm_adapters import VllmAdapters
from kvfleet.worker.vllm.vllm_calls import VllmCalls
from kvfleet.worker.vllm.vllm_engine import VllmEngine
from kvfleet.worker.vllm.vllm_news import ERASE_S, DrawFailures, Told, VllmNews, problem_of
from kvfleet.worker.vllm.vllm_probe import VllmProbe
from kvfleet.worker.vllm.vllm_sequence import Sockets
from kvfleet_vllm import wire
from kvproto.block_hash import HASH_BYTES
from kvproto.errors import EngineFailure, KvfleetError, ModelNotFound, Unavailable
from kvproto.messages import TierEvents, TokenLogprobs
from kvproto.tasks import VitalTasks, end

log = logging.getLogger(__name__)

PERIOD_S = 1.0
TELL_EVERY_S = 10.0
HEALTH_S = 5.0
HELLO_S = 5.0
WORKERS_S = 0.5
POLL_S = 0.02
EVENTS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)  # for the events of one probe after the other
HANG_S = 30.0  # in a step
SILENT_S = 3.0  # after which a step that nobody waits for is looked after
MAX_ANEW = 3  # times that the events of one process may seem to begin anew


@dataclass(frozen=True, slots=True)
class Expected:
    """What the worker's settings say. `name` None: whatever it serves; `dtype` may be auto."""

    block_size: int
    name: str | None
    dtype: str


@dataclass(eq=False)
class VllmServer(VllmCalls):
    """`open`, then `find`, then `watch` with the engine that is made of what was found."""

    routes: TokenRoutes
    sockets: Sockets
    wanted: Expected
    on_fatal: Callable[[str], None]
    restarts_total: int = 0
    engine_pid: int = 0
    _engine: VllmEngine | None = None
    _early: list[TierEvents] = field(default_factory=list)  # changes before there is an engine
    _early_step: wire.EngineStep | None = None  # the newest
    _feed: KvEventFeed | None = None
    _facts: ServerFacts | None = None
    _hello: asyncio.Future[wire.EngineHello] | None = None
    _instance: str = ""
    _anew: int = 0  # of the feed's, when the server was checked
    _probe_root: bytes = b""
    _probe_seen: asyncio.Event = field(default_factory=asyncio.Event)
    _is_up: bool = False
    _is_tiered: bool = False  # vLLM's own host memory has blocks, too, of which it does not tell
    _suspect: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.blocks = ForeignBlocks(self.wanted.block_size)
        path = Path(self.sockets.news)
        self.news = VllmNews(path, self._on_hello, self._on_told, self._went, self._on_worker, self._on_lost)
        self.adapters = VllmAdapters(self.routes)
        self.probe = VllmProbe(self.routes, self.sockets.news)
        self._tasks = VitalTasks(self.on_fatal)

    async def open(self) -> None:
        """Raises Unavailable."""
        self._failures = DrawFailures(Path(self.sockets.failures))
        await self.routes.open()
        await self.news.listen()

    async def close(self) -> None:
        await end(list(self._tasks.running))
        await self.news.close()
        await self.routes.close()
        self.sockets.close()
        self._failures.close()

    async def find(self) -> ServerFacts:
        """Wait until it is there, and check it. Raises Unsuitable."""
        clock = asyncio.get_running_loop().time
        told_at = float("-inf")
        while True:
            try:
                await self._check()
                assert self._facts is not None
                return self._facts
            except EngineFailure as error:
                if clock() - told_at >= TELL_EVERY_S:
                    told_at = clock()
                    log.info("waiting for vLLM: %s", error)
            await asyncio.sleep(PERIOD_S)

    def watch(self, engine: VllmEngine) -> None:
        self._engine, self._is_up = engine, True
        engine.on_changes(self._early)
        if self._early_step is not None:
            engine.on_step(self._early_step)
        engine.came()
        self._tasks.spawn(self._watch(), "vllm-watch")

    async def generate(self, body: Mapping[str, Any], alternatives: int) -> AsyncGenerator[NextTokens, None]:
        with self._asking():
            async with contextlib.aclosing(self.routes.generate(body, alternatives)) as answer:
                async for part in answer:
                    yield part

    async def score(self, body: Mapping[str, Any]) -> tuple[TokenLogprobs, ...]:
        with self._asking():
            return await self.routes.score(body)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except EngineFailure:
            self._suspect.set()
            raise
        except ModelNotFound as error:  # it was unloaded here, and others may have it
            raise Unavailable(str(error), field=error.field) from None

    async def erase(self, hashes: Sequence[ForeignHash]) -> None:
        """Raises EngineFailure. A connector that hangs up meanwhile comes back, with all its blocks."""
        now = asyncio.get_running_loop().time
        until = now() + ERASE_S
        while hashes or self._is_tiered:
            try:
                await self._erase(hashes)
                break
            except EngineFailure:
                if not self._is_up or now() > until:
                    raise
            await asyncio.sleep(POLL_S)

    async def _erase(self, hashes: Sequence[ForeignHash]) -> None:
        if not self.news.is_open:  # it comes back with a request
            await self.probe.ask([1], os.urandom(HASH_BYTES))
        erasing = asyncio.ensure_future(self.news.erase(hashes))
        await asyncio.sleep(0)
        # An idle vLLM reads its connector's socket with a request.
        await asyncio.gather(self.probe.ask([1], os.urandom(HASH_BYTES)), erasing)

    async def abort(self, name: str) -> None:
        await self.routes.abort(name)

    def failure_of(self, name: str, index: int) -> KvfleetError | None:
        return self._failures.of(name, index)

    # What it tells.

    def _on_hello(self, hello: wire.EngineHello) -> None:
        if self._hello is not None and not self._hello.done():
            self._hello.set_result(hello)
        elif hello.instance != self._instance:
            self._went("it was restarted")

    def _on_worker(self) -> None:
        """After a worker was lost, all have greeted again: no step of before is under way."""
        moved = None if self._facts is None else self._facts.moved
        if self._engine is not None and self._is_up and moved is not None and len(self.news.workers) >= moved.ranks:
            self._engine.tiers.back()

    def _on_lost(self) -> None:
        log.warning("a worker of vLLM at %s moves no blocks any more, until it greets again", self.routes.url)
        if self._engine is not None:
            self._engine.tiers.away()

    def _on_told(self, told: Told) -> None:
        if self._engine is None:
            if isinstance(told, wire.EngineStep):
                self._early_step = told
        elif isinstance(told, wire.Scheduled):
            self._engine.on_scheduled(told)
        elif isinstance(told, wire.EngineStep):
            self._engine.on_step(told)
        else:
            self._engine.tiers.on_move(told)

    def _on_events(self, events: Sequence[Event]) -> None:
        # Not by a replay, which another server's events may lead to.
        if not self._probe_seen.is_set() and self._feed is not None and not self._feed.is_replay:
            keys = [key for event in events for keys in event.get("extra_keys") or () for key in keys or ()]
            if salt_of_root(self._probe_root) in keys:
                self._probe_seen.set()
        self._changed(self.blocks.apply(events))

    def _changed(self, changes: list[TierEvents]) -> None:
        if self._engine is None:
            self._early += changes
        else:
            self._engine.on_changes(changes)

    def _went(self, reason: str) -> None:
        """It is away: the engine is told, and it is looked for."""
        if self._is_up and self._engine is not None:
            self._is_up = False
            log.warning("vLLM at %s is away: %s", self.routes.url, reason)
            self._engine.went(f"vLLM is away: {reason}")
            self._suspect.set()

    # Watching.

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._suspect.wait(), PERIOD_S)
            self._suspect.clear()
            if not self._is_up:
                await self._come_back()
            elif (reason := await self._trouble()) is not None:
                self.news.hang_up()
                self._went(reason)

    async def _trouble(self) -> str | None:
        assert self._engine is not None
        if self._feed is not None and self._feed.anew_total - self._anew >= MAX_ANEW:
            self.on_fatal(f"KV events of several servers arrive at {self._feed.endpoint}: each needs one of its own")
            return "another server's KV events arrive"
        age, limit_s = self._engine.silence_s, HEALTH_S
        if age > max(HANG_S, self._engine.step_rates.patience_s):
            return f"it has been in one step for {age:.0f} s"
        try:
            async with asyncio.timeout(limit_s):
                await self.routes.get("/health")
            if age > SILENT_S and self._engine.is_idle:  # those who waited have left; is it slow, or does it hang?
                limit_s = HANG_S / 2
                async with asyncio.timeout(limit_s):
                    await self.probe.ask([1], os.urandom(HASH_BYTES))
                self._engine.on_answer()
        except TimeoutError:
            return f"it has not answered for {limit_s:.0f} s"
        except EngineFailure as error:
            return str(error)
        return None

    async def _come_back(self) -> None:
        before = self._facts
        try:
            await self._check()
        except EngineFailure as error:
            log.debug("vLLM is not back yet: %s", error)
            return
        except KvfleetError as error:
            self.on_fatal(str(error))
            return
        assert before is not None
        assert self._facts is not None
        assert self._engine is not None
        if changed := self._facts.changes(before):
            self.on_fatal(f"vLLM at {self.routes.url} came back as another: {'; '.join(changed)}")
            return
        log.info("vLLM at %s is back", self.routes.url)
        self._is_up = True
        self._engine.came()

    # Checking.

    async def _check(self) -> None:
        """Raises Unsuitable, or EngineFailure while it is not there yet."""
        adapters = await self.probe.served()
        await self.routes.get("/health")
        hello = await self._greeting()
        if (problem := problem_of(hello)) is not None:
            self.news.hang_up()
            raise Unsuitable(f"vLLM at {self.routes.url}: {problem}")
        if not is_known(hello.vllm):
            log.warning("vLLM %s was never tried with this version of kvfleet", hello.vllm)
        flags = missing_flags(hello.facts)
        if not await self.probe.draws_as_ours() and all(SAMPLER not in flag for flag in flags):
            flags.append(f"--logits-processors {SAMPLER} of this version")
        if flags:
            raise Unsuitable(f"vLLM at {self.routes.url} was started without: {', '.join(flags)}")
        self._is_tiered = bool(hello.facts.get("tier"))
        workers = await self._workers(hello)
        try:
            facts = ServerFacts.of(hello, self.probe.model, workers)
        except Unsuitable as error:
            raise Unsuitable(f"vLLM at {self.routes.url}: {error}") from None
        wanted = self.wanted
        against = contradictions(facts, hello.facts, block_size=wanted.block_size, name=wanted.name, dtype=wanted.dtype)
        if against:
            raise Unsuitable(f"vLLM at {self.routes.url} contradicts this worker: {'; '.join(against)}")
        await self._events_arrive(facts, hello)
        await self.adapters.found(adapters, is_enabled=facts.has_lora, anew=self._instance != hello.instance)
        if self._instance and self._instance != hello.instance:
            self.restarts_total += 1
        self._facts, self._instance, self.engine_pid = facts, hello.instance, hello.pid
        self._anew = 0 if self._feed is None else self._feed.anew_total

    async def _greeting(self) -> wire.EngineHello:
        self._hello = asyncio.get_running_loop().create_future()
        self.news.hang_up()
        try:
            await self.probe.ask([1], os.urandom(HASH_BYTES))
            return await asyncio.wait_for(self._hello, HELLO_S)
        except TimeoutError:
            raise Unsuitable(
                f"vLLM at {self.routes.url} was started without --kv-transfer-config with the kv_connector "
                "KvfleetConnector of kvfleet_vllm.connector, has another version of it, or cannot reach this worker's "
                "runtime_dir"
            ) from None
        finally:
            self._hello = None

    async def _workers(self, hello: wire.EngineHello) -> list[wire.WorkerHello]:
        """All of vLLM's workers, in the order of their ranks; none if some do not greet. They do with the first step
        that they make for this worker."""
        ranks = (hello.facts.get("tensor_parallel_size") or 1) * (hello.facts.get("pipeline_parallel_size") or 1)
        if self._is_tiered:
            ranks = 1  # the tier, which moves the blocks of all
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WORKERS_S):
                while len(self.news.workers) < ranks:
                    await asyncio.sleep(POLL_S)
                return [self.news.workers[rank] for rank in sorted(self.news.workers)]
        return []

    async def _events_arrive(self, facts: ServerFacts, hello: wire.EngineHello) -> None:
        if self._feed is None:
            at = EventAddresses.of(facts.events, self.routes.url)
            self._feed = KvEventFeed(
                at.endpoint, at.replay, at.topic, at.binds, self._on_events, lambda: self._changed(self.blocks.clear())
            )
            self._feed.open()
            self._tasks.spawn(self._feed.run(), "vllm-events")
        elif hello.instance != self._instance:
            self._feed.restarted()
        self._probe_seen.clear()
        # So long that the worker knows what a prompt's tokens cost, before a long one could seem to hang.
        blocks = min(-(-TELLING // facts.block_size), max(facts.context_length // facts.block_size - 1, 1))
        for wait_s in EVENTS_S:  # vLLM may need a moment to connect, and drops what it has told before
            self._probe_root = os.urandom(HASH_BYTES)
            await self.probe.ask([1] * blocks * facts.block_size, self._probe_root)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._probe_seen.wait(), wait_s)
                return
        raise Unsuitable(
            f"KV events of vLLM at {self.routes.url} do not arrive at {self._feed.endpoint}: is it another server's, "
            "or another worker's?"
        )
