"""The suite sees what it looks for: with fencing, duplicate removal or resend switched off it turns red, else green."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

import pytest

from kvproto.buckets import Bucket, ensure_buckets
from kvproto.chats import chat_of
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.subjects import PRODUCER_INBOX, Subjects, inbox_prefix, member_key
from kvproto.testing.fixtures import ProcessFactory
from tests.chaos import mutations
from tests.chaos.asking import ask_client
from tests.chaos.behaviour import PLAIN
from tests.chaos.cases import Case
from tests.chaos.checker import check
from tests.chaos.history import Answer, Exchange, History, Transport
from tests.chaos.load import answer_of
from tests.support.fake_fleet import FakeFleet
from tests.support.nats_proxy import Mangling, NatsProxy
from tests.support.waiting import LIMIT_S

CASE = Case(
    "scene", Transport.CLIENT, "demo", "public", 90, {"temperature": 0.0, "ignore_eos": True}, tuple(range(9, 60))
)
WORDS = {"type": "array", "minItems": 6, "maxItems": 6, "items": {"type": "string", "pattern": "^[a-z]{5,9}$"}}
NOTE = {"type": "object", "properties": {"words": WORDS}, "required": ["words"]}
CALL = Case(
    "call", Transport.CLIENT, "demo", "public", 200, {"temperature": 0.0},
    chat=chat_of(
        messages=[{"role": "user", "content": "Take a note."}], tool_choice="required", parallel_tool_calls=False,
        tools=[{"type": "function", "function": {"name": "note", "parameters": NOTE}}],
    ),
)  # fmt: skip
WITHIN = '{"words": ["'  # its arguments
STREAMS = 2
BROKEN_FOR_S = 4.0  # streams of which some may never end

pytestmark = [
    pytest.mark.usefixtures("sockets_of_nats_py"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """Two fake workers and a client, each with a network of its own to break."""

    def __init__(self, url: str, case: Case) -> None:
        self.case = case
        self.subjects = Subjects()
        self.client_way = NatsProxy(url)
        self.worker_ways = {name: NatsProxy(url) for name in ("w0", "w1")}
        self._url = url
        self._fleets = [FakeFleet("", self.subjects) for _ in self.worker_ways]
        self.client: Client
        self.serving = ""

    async def __aenter__(self) -> Stage:
        self._admin = await Connection.open(self._url, name="chaos", inbox_prefix="_adm.chaos")
        await ensure_buckets(self._admin, self.subjects)
        self._members = await Bucket.open(self._admin, self.subjects.members_bucket)
        await self.client_way.start()
        for (name, way), fleet in zip(self.worker_ways.items(), self._fleets, strict=True):
            await way.start()
            fleet.nats_url = way.url
            await self._start(fleet, name)
        prefix = inbox_prefix(f"{PRODUCER_INBOX}.public", f"chaos{os.urandom(4).hex()}")
        connection = await Connection.open(self.client_way.url, name=prefix, inbox_prefix=prefix)
        self.client = await Client.over(connection, self.subjects)
        async with asyncio.timeout(LIMIT_S):
            while len(list(self.client.members.view.ready())) < 2:
                await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.client.connection.close()
        await self._admin.close()
        for fleet in self._fleets:
            await fleet.stop()
        for way in (self.client_way, *self.worker_ways.values()):
            await way.close()

    async def _start(self, fleet: FakeFleet, name: str) -> None:
        await fleet.start(name, fake_tokens_per_s=110.0, host_bytes=0)

    async def learn(self) -> dict[tuple[str, int], Answer]:
        """The right answer, while nothing breaks."""
        (one,) = await self._ask(1)
        assert [end.code for end in one.ends] == ["finished"]
        return {(self.case.name, 0): answer_of(one, self.case)}

    async def watch(self, scene: Scene, ends_within_s: float = LIMIT_S) -> list[Exchange]:
        """What clients see of a scene."""
        return await self._ask(STREAMS, scene, ends_within_s)

    async def _ask(self, count: int, scene: Scene | None = None, ends_within_s: float = LIMIT_S) -> list[Exchange]:
        now = asyncio.get_running_loop().time
        case = self.case
        some = [Exchange(n, case.transport, case.name, case.model, case.tenant, "plain", now()) for n in range(count)]
        asking = [asyncio.create_task(ask_client(self.client, case, PLAIN, one, now)) for one in some]
        if scene is not None:
            async with asyncio.timeout(LIMIT_S):
                begun = WITHIN if case is CALL else ""
                while not all(one.pieces and begun in one.text_of(0) for one in some):
                    await asyncio.sleep(0.01)
            self.serving = some[0].worker_at(now()) or ""
            await scene(self)
        _, running = await asyncio.wait(asking, timeout=ends_within_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return some

    async def frames_of_old_attempts(self) -> None:
        """Its worker is taken for dead, as placement says it; the cancel is lost, and it goes on, and falls sick."""
        old, other = self.serving, next(name for name in self.worker_ways if name != self.serving)
        self.worker_ways[old].mangling = Mangling(("kvf.worker.*.cancel", "kvf.worker.*.cancel.*"), lost=1.0)
        self.worker_ways[other].latency_s = 0.1
        await self._members.delete(member_key("worker", old))
        async with asyncio.timeout(LIMIT_S):
            while self.client.members.view.is_alive(old):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # what was right until then may have been read
        runner = next(fleet.workers[old] for fleet in self._fleets if old in fleet.workers).thread.engine.runner
        healthy = runner._hashed
        runner._hashed = lambda seen: healthy(seen) ^ 1
        await asyncio.sleep(1.0)
        runner._hashed = healthy
        self.worker_ways[old].mangling = None
        self.worker_ways[other].latency_s = 0.0

    async def repeated_frames(self) -> None:
        self.client_way.mangling = Mangling(duplicated=0.5, seed=1)

    async def lost_frames(self) -> None:
        self.client_way.mangling = Mangling(lost=0.3, seed=1)
        await asyncio.sleep(1.0)
        self.client_way.mangling = None

    async def killed_worker(self) -> None:
        """As with SIGKILL. Another takes its place."""
        fleet = next(fleet for fleet in self._fleets if self.serving in fleet.workers)
        await fleet.workers.pop(self.serving).kill()
        await self._start(fleet, f"{self.serving}x")


@pytest.mark.parametrize(
    ("case", "scene", "mutation", "seen"),
    [
        (CASE, Stage.frames_of_old_attempts, mutations.without_fencing, {"error", "wrong", "duplicated", "lost"}),
        (CASE, Stage.repeated_frames, mutations.without_duplicate_removal, {"duplicated", "wrong"}),
        (CASE, Stage.lost_frames, mutations.without_resend, {"lost", "error", "wrong"}),
        (CALL, Stage.killed_worker, mutations.without_earlier_outputs_in_grammars, {"error", "wrong"}),
        (CALL, Stage.killed_worker, mutations.without_earlier_text_in_messages, {"error", "wrong"}),
    ],
)
async def test_what_is_switched_off_is_seen(
    nats_process: ProcessFactory, case: Case, scene: Scene, mutation: mutations.Mutation, seen: set[str]
) -> None:
    async with Stage(nats_process().url, case) as stage:
        answers = await stage.learn()
        as_it_is = check(History(answers, await stage.watch(scene)))
        assert not as_it_is.violations
        with mutation():
            broken = check(History(answers, await stage.watch(scene, BROKEN_FOR_S)))
    assert broken.violations, "the suite does not see it"
    assert {one.what for one in broken.violations} <= seen
