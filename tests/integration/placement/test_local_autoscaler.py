"""When `kvfleet up --autoscale` has a worker drain: over NATS, with replicas that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest_asyncio

from kvfleet.cli.embedded.autoscaler import LocalAutoscaler
from kvfleet.cli.embedded.processes import Child
from kvfleet.cli.operator.operator_login import Login
from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.connection import Connection, Message
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import (
    AdminReply,
    MemberRecord,
    ModelSignals,
    PlacementStats,
    Role,
    State,
    VictimCost,
    VictimReport,
)
from kvproto.subjects import Subjects
from kvproto.tasks import end

MODEL = "demo"
WORKERS = ("w0", "w1", "w2")
LOWER = ModelSignals(MODEL, desired=2, living=3, minimum=1, maximum=4)

Register = Callable[..., Awaitable[Lease]]


@pytest_asyncio.fixture
async def register(requester: Connection, fleet_buckets: Subjects) -> AsyncIterator[Register]:
    """A replica that is registered; it answers only if it has something to say."""

    renewing: list[asyncio.Task[None]] = []

    async def one(name: str, says: ModelSignals | None = None) -> Lease:
        async def answer(message: Message) -> None:
            stats = PlacementStats(name, "cost", (), 0, 0, 0, 0, models=(says,) if says else ())
            await requester.publish(message.reply, codec.encode(stats))

        if says is not None:
            await requester.subscribe(fleet_buckets.placement_stats(), answer)
        record = MemberRecord(name, new_epoch(), "", State.READY, Role.PLACEMENT, "h", 1, codec.supported_versions())
        lease = Lease(await Bucket.open(requester, fleet_buckets.members_bucket), record)
        await lease.register()
        renewing.append(asyncio.create_task(lease.run(lambda error: None)))
        return lease

    yield one
    await end(renewing)


async def drained(requester: Connection, subjects: Subjects) -> list[str]:
    """Whom one look has drain, of three workers; w1 is the cheapest."""
    told: list[bool] = []
    known = [Child(name, lambda: None, model=MODEL) for name in WORKERS]  # type: ignore[arg-type, return-value]
    autoscaler = LocalAutoscaler(Login(""), subjects.namespace, [MODEL], lambda model: known[0], known)

    async def costs(message: Message) -> None:
        workers = tuple(VictimCost(name, 0.0, 0, 0, 0) for name in ("w1", "w0", "w2"))
        await requester.publish(message.reply, codec.encode(VictimReport("p0", workers)))

    async def drain(message: Message) -> None:
        told.append(known[1].draining)
        await requester.publish(message.reply, codec.encode(AdminReply()))

    subscriptions = [
        await requester.subscribe(subjects.placement_victim(), costs),
        await requester.subscribe(subjects.worker_admin("w1"), drain),
    ]
    await autoscaler._look(requester, subjects)
    for one in subscriptions:
        await one.unsubscribe()
    assert all(told)  # it is known to drain when it is told: it may end before it answers
    drains = [one.name for one in known if one.draining]
    assert len(drains) == len(told)
    return drains


async def test_the_cheapest_drains_when_all_answered(
    register: Register, requester: Connection, fleet_buckets: Subjects
) -> None:
    await register("p0", LOWER)
    await register("p1", LOWER)
    assert await drained(requester, fleet_buckets) == ["w1"]


async def test_nobody_drains_while_a_registered_replica_is_silent(
    register: Register, requester: Connection, fleet_buckets: Subjects
) -> None:
    await register("p0", LOWER)
    slow = await register("p1")
    assert await drained(requester, fleet_buckets) == []
    await slow.release()
    assert await drained(requester, fleet_buckets) == ["w1"]


async def test_nobody_drains_for_a_replica_that_knows_nothing_yet(
    register: Register, requester: Connection, fleet_buckets: Subjects
) -> None:
    await register("p0", ModelSignals(MODEL, desired=1, minimum=1, maximum=4, known=False))
    assert await drained(requester, fleet_buckets) == []
