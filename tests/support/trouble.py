"""A fleet under NATS trouble: real workers, placement and client in this loop, servers as processes to be broken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvfleet.placement.loop import PlacementLoop, PlacementParts
from kvproto.buckets import RESPONSES_BYTES, ensure_buckets
from kvproto.client import Client, Generation
from kvproto.connection import Connection
from kvproto.ids import new_process_id
from kvproto.messages import Finished, Role, Sampling, Started, Tokens
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from kvservice.membership import member_record
from tests.support.fake_fleet import FakeFleet
from tests.support.unfailed import unfailed
from tests.support.waiting import LIMIT_S, until

PACE = 300  # tokens/s of one worker, all its streams together


@dataclass
class Running:
    """One stream as its reader saw it. Tokens are checked as they come."""

    generation: Generation
    ids: list[int] = field(default_factory=list)
    attempts: int = 0
    cached: list[int] = field(default_factory=list)  # of each attempt that started
    finished: bool = False


@dataclass
class Fleet:
    """Two or more workers, one placement, one client, all over the same servers."""

    servers: str
    subjects: Subjects
    workers: FakeFleet
    placement: PlacementLoop
    client: Client
    prompts: int = 0

    async def start_streams(self, count: int, tokens: int) -> list[asyncio.Task[Running]]:
        """Returns when each has given tokens."""
        asked = [self.generation(tokens) for _ in range(count)]
        begun = [Running(one) for one in asked]
        tasks = [asyncio.create_task(self.run(one)) for one in begun]
        await until(lambda: all(one.ids for one in begun) or any(task.done() for task in tasks))
        return tasks

    def generation(self, tokens: int) -> Generation:
        self.prompts += 1
        prompt = tuple((self.prompts * 37 + i * 7) % 900 + 10 for i in range(40))
        return Generation("demo", Sampling(tokens, temperature=0.0, ignore_eos=True), prompt, patience_s=20.0)

    async def run(self, running: Running) -> Running:
        async with self.client.generate(running.generation) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    assert event.index == len(running.ids), "every token once, in order"
                    running.ids += event.ids
                elif isinstance(event, Started):
                    running.cached.append(event.cached_tokens)
                elif isinstance(event, Finished):
                    running.finished = True
        running.attempts = stream.attempts
        wanted = unfailed(running.generation.prompt_ids, running.generation.sampling.max_tokens)
        assert running.finished
        assert running.ids == wanted
        return running

    async def serve(self, tokens: int = 8, within_s: float = LIMIT_S) -> Running:
        """One new request, served to its end."""
        return await asyncio.wait_for(self.run(Running(self.generation(tokens))), within_s)

    def epochs(self) -> dict[str, str]:
        return {worker: view.record.epoch for worker, view in self.client.members.view.workers.items()}

    def is_whole(self) -> bool:
        """All are ready in the views of both readers, and the placement is known."""
        ready = len(self.workers.workers)
        view = self.client.members.view
        return (
            len(list(view.ready())) == ready
            and len(list(self.placement.subscriptions.members.view.ready())) == ready
            and any(role is Role.PLACEMENT for role, _ in view.members)
        )

    async def leases_are_written(self) -> None:
        """Every worker's record is renewed from now on."""
        before = {worker: view.record_at for worker, view in self.client.members.view.workers.items()}
        await until(lambda: all(v.record_at > before[w] for w, v in self.client.members.view.workers.items()))

    def check(self, epochs: dict[str, str]) -> None:
        """After the trouble: nobody ended, nobody lost its blocks, the view is whole."""
        assert self.is_whole()
        assert self.epochs() == epochs, "no worker began a new life"
        for worker in self.workers.workers.values():
            assert worker.fatal == []
            assert worker.loop.tasks.running, "its tasks run"
        assert self.placement.internal_errors_total == 0
        self.placement.core.check_integrity()


@asynccontextmanager
async def fleet_over(
    servers: str | Sequence[str],
    *,
    workers: int = 2,
    replicas: int = 1,
    system_user: str | None = None,
    responses_bytes: int = RESPONSES_BYTES,
) -> AsyncIterator[Fleet]:
    """A fleet that serves, over servers that run; `system_user`, its own password: placement hears of disconnects."""
    url = servers if isinstance(servers, str) else ",".join(servers)
    subjects = Subjects()
    setup = await Connection.open(url, name="setup", inbox_prefix="_adm.t")
    await ensure_buckets(
        setup,
        subjects,
        replicas=replicas,
        patience_s=20.0,
        responses_bytes=responses_bytes,
        batches_bytes=responses_bytes,
    )
    await setup.close()
    started = FakeFleet(url, subjects)
    member = new_process_id()
    connection = await Connection.open(
        url, name=f"placement-{member}", inbox_prefix=inbox_prefix(PLACEMENT_INBOX, member)
    )
    system = None
    if system_user is not None:
        credentials = {"user": system_user, "password": system_user}
        prefix = inbox_prefix(PLACEMENT_INBOX, f"sys-{member}")
        system = await Connection.open(url, name=f"placement-sys-{member}", inbox_prefix=prefix, **credentials)
    record = member_record(Role.PLACEMENT, member)
    parts = PlacementParts(system=system)
    placement = PlacementLoop(connection, subjects, record, chance=random.random, parts=parts)
    client = None
    try:
        for number in range(workers):
            await started.start(f"w{number}", fake_tokens_per_s=PACE)
        await placement.start()
        client = await Client.open(url)
        fleet = Fleet(url, subjects, started, placement, client)
        await until(fleet.is_whole)
        yield fleet
    finally:
        if client is not None:
            await client.close()
        await placement.stop(grace_s=0)
        await connection.close()
        if system is not None:
            await system.close()
        await started.stop()
