"""A client asks all placement replicas about a request; scripted replicas answer, or do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvproto import codec
from kvproto.buckets import Bucket
from kvproto.client import Client, Generation
from kvproto.connection import Connection, Message
from kvproto.errors import InvalidRequest, KvfleetError, NotFound, Unavailable
from kvproto.ids import new_epoch
from kvproto.members import Lease
from kvproto.messages import (
    Decision,
    ExplainRequest,
    Explanation,
    MemberRecord,
    Placement,
    PlaceRequest,
    Role,
    Sampling,
    State,
    Tokens,
)
from kvproto.subjects import PLACEMENT_INBOX, Subjects, inbox_prefix
from tests.support.fake_fleet import FakeFleet
from tests.support.waiting import LIMIT_S

SAMPLING = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
DECISION = Decision("r1", 0, "acme", "demo", 1, "cost", "w1", "why", 40, {"device": 32}, 0.5, (), 1, "p1")


class Replica:
    """A placement replica as far as explanations go. `garbage`: an answer that nobody can read; `breaks_off`: after the
    first part; `is_old`: it knows of no newest ones."""

    def __init__(self, connection: Connection, lease: Lease, decisions: tuple[Decision, ...], silent: bool) -> None:
        self.connection = connection
        self.lease = lease
        self.decisions = decisions
        self.silent = silent
        self.asked: list[ExplainRequest] = []
        self.garbage = False
        self.breaks_off = False
        self.is_old = False

    async def on_explain(self, message: Message) -> None:
        ask = codec.decode(ExplainRequest, message.data)
        self.asked.append(ask)
        if ask.newest and not self.is_old:
            await self._tell_newest(ask, message.reply)
            return
        found = tuple(one for one in self.decisions if one.request == ask.request and ask.tenant in (None, one.tenant))
        if not self.silent:
            answer = codec.encode(Explanation(self.lease.record.id, found))
            await self.connection.publish(message.reply, b"\xff\x00" if self.garbage else answer)

    async def _tell_newest(self, ask: ExplainRequest, reply: str) -> None:
        """One a part."""
        kept = [one for one in self.decisions if ask.tenant in (None, one.tenant) and ask.model in (None, one.model)]
        for one in kept[: ask.newest]:
            await self.connection.publish(reply, codec.encode(Explanation(self.lease.record.id, (one,), True)))
            if self.breaks_off:
                return
        await self.connection.publish(reply, codec.encode(Explanation(self.lease.record.id)))


StartReplica = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def start_replica(nats_url: str, fleet_buckets: Subjects) -> AsyncIterator[StartReplica]:
    opened: list[Connection] = []

    async def start(name: str, *decisions: Decision, silent: bool = False) -> Replica:
        connection = await Connection.open(
            nats_url, name=f"placement-{name}", inbox_prefix=inbox_prefix(PLACEMENT_INBOX, name)
        )
        opened.append(connection)
        record = MemberRecord(
            name, new_epoch(), "", State.READY, Role.PLACEMENT, "localhost", 1, codec.supported_versions()
        )
        replica = Replica(
            connection,
            Lease(await Bucket.open(connection, fleet_buckets.members_bucket), record),
            tuple(replace(one, placement=name) for one in decisions),
            silent,
        )
        await connection.subscribe(fleet_buckets.placement_explain(), replica.on_explain)
        await connection.synced()
        await replica.lease.register()
        return replica

    yield start
    await asyncio.gather(*(connection.close() for connection in opened))


async def knows(client: Client, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while sum(role is Role.PLACEMENT for role, _ in client.members.view.members) != count:
            await asyncio.sleep(0.01)


async def timed(asking: Awaitable[tuple[Decision, ...]]) -> tuple[tuple[Decision, ...], float]:
    began = asyncio.get_running_loop().time()
    return await asking, asyncio.get_running_loop().time() - began


async def test_answers_of_all_replicas_become_one(client: Client, start_replica: StartReplica) -> None:
    retried = replace(DECISION, attempt=1, worker="w2")
    replicas = [await start_replica("p1", retried), await start_replica("p2", DECISION), await start_replica("p3")]
    await knows(client, 3)
    subscriptions = client.connection.subscriptions
    decisions, took = await timed(client.explain("r1", "acme"))
    assert [(one.attempt, one.placement, one.worker) for one in decisions] == [(0, "p2", "w1"), (1, "p1", "w2")]
    assert took < 0.4, "nobody is waited for who has answered"
    assert [replica.asked for replica in replicas] == [[ExplainRequest("r1", "acme")]] * 3
    assert client.connection.subscriptions == subscriptions


async def test_tenants_are_the_replicas_to_tell_apart(client: Client, start_replica: StartReplica) -> None:
    await start_replica("p1", DECISION)
    await knows(client, 1)
    assert len(await client.explain("r1")) == 1
    for request, tenant in (("r1", "other"), ("r2", "acme")):
        with pytest.raises(NotFound):
            await client.explain(request, tenant)


@pytest.mark.parametrize("garbage", [False, True])
async def test_a_replica_that_does_not_answer_costs_half_a_second(
    client: Client, start_replica: StartReplica, garbage: bool
) -> None:
    await start_replica("p1", DECISION)
    other = await start_replica("p2", DECISION, silent=not garbage)
    other.garbage = garbage
    await knows(client, 2)
    decisions, took = await timed(client.explain("r1"))
    assert [one.placement for one in decisions] == ["p1"]
    assert 0.4 < took < 2.0


async def test_a_fleet_without_placement_says_so(client: Client, start_replica: StartReplica) -> None:
    subscriptions = client.connection.subscriptions
    for _ in range(2):  # nobody listens; then nobody answers
        with pytest.raises(Unavailable):
            await client.explain("r1")
        await start_replica("p1", silent=True)
    assert client.connection.subscriptions == subscriptions


@pytest.mark.parametrize("request_id", ["", "a b", "a.b", "x" * 65])
async def test_what_can_be_no_id_is_not_asked(client: Client, request_id: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await client.explain(request_id)
    assert error.value.field == "request"


async def test_no_policy_is_followed_that_was_not_asked_for(
    client: Client, nats_url: str, fleet_buckets: Subjects
) -> None:
    """Placement is away: the client follows by itself what it can, and refuses what only placement knows."""
    fleet = FakeFleet(nats_url, fleet_buckets)
    try:
        for worker in ("w0", "w1"):
            await fleet.start(worker)
        async with asyncio.timeout(LIMIT_S):
            while len(list(client.members.view.ready())) < 2:
                await asyncio.sleep(0.02)

        async def placed(policy: str | None = None, worker: str | None = None) -> tuple[str, str]:
            asked = Generation("demo", SAMPLING, (1, 2, 3), policy=policy, worker=worker)
            async with client.generate(asked) as stream:
                async for _ in stream:
                    pass
            assert stream.placement is not None
            return stream.placement.policy, stream.placement.worker

        owner = client.members.ring("demo")
        assert (await placed())[0] == (await placed("ring"))[0] == "ring"
        for worker in owner.nodes:
            assert await placed("direct", worker) == await placed(None, worker) == ("direct", worker)
        fallbacks = client.counters.fallback_total
        refusals: list[tuple[tuple[str | None, str | None], type[KvfleetError], str]] = [
            (("cost", None), Unavailable, "policy"),
            (("never_heard_of", None), Unavailable, "policy"),
            (("direct", None), InvalidRequest, "worker"),
            (("direct", "w9"), NotFound, "worker"),
        ]
        for (policy, worker), error, field in refusals:
            with pytest.raises(error) as caught:
                await placed(policy, worker)
            assert caught.value.field == field, policy
        assert client.counters.fallback_total == fallbacks + 2, "those of direct alone"
    finally:
        await fleet.stop()


async def test_a_stream_that_has_begun_goes_on_whatever_its_policy(
    client: Client, nats_url: str, fleet_buckets: Subjects
) -> None:
    """Placement answers once and vanishes, then the worker does: the promise about streams is the greater one."""
    fleet = FakeFleet(nats_url, fleet_buckets)
    placement = await Connection.open(nats_url, name="placement-p1", inbox_prefix=inbox_prefix(PLACEMENT_INBOX, "p1"))

    async def answer_once(message: Message) -> None:
        ask = codec.decode(PlaceRequest, message.data)
        await placement.publish(message.reply, codec.encode(Placement(ask.request, "w0", ask.attempt, policy="cost")))
        await subscription.unsubscribe()

    try:
        for worker in ("w0", "w1"):
            await fleet.start(worker, fake_tokens_per_s=200)
        async with asyncio.timeout(LIMIT_S):
            while len(list(client.members.view.ready())) < 2:
                await asyncio.sleep(0.02)
        subscription = await placement.subscribe(fleet_buckets.place_all(), answer_once)
        await placement.synced()
        asked = Generation("demo", replace(SAMPLING, max_tokens=60), (1, 2, 3), policy="cost")
        tokens = 0
        async with client.generate(asked) as stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    tokens += len(event.ids)
                    if tokens >= 10 and not fleet.workers["w0"].dead:
                        await fleet.workers["w0"].kill()
        assert (tokens, stream.attempts, stream.worker) == (60, 2, "w1")
        assert stream.placement is not None
        assert stream.placement.policy == "ring", "and it says what it went by"
    finally:
        await fleet.stop()
        await placement.close()


# ---------------------------------------------------------------------------------------------- the newest


def at(unix_ms: int, **changes: Any) -> Decision:
    return replace(DECISION, **{"request": f"r{unix_ms}", "unix_ms": unix_ms, **changes})


async def test_the_newest_of_all_replicas_newest_first(client: Client, start_replica: StartReplica) -> None:
    replicas = [
        await start_replica("p1", at(7), at(5), at(1)),
        await start_replica("p2", at(6), at(4, tenant="other"), at(3, model="large")),
        await start_replica("p3"),
    ]
    await knows(client, 3)
    decisions, took = await timed(client.newest_decisions(4))
    assert [one.unix_ms for one in decisions] == [7, 6, 5, 4]
    assert took < 0.4, "nobody is waited for who has answered"
    assert [replica.asked for replica in replicas] == [[ExplainRequest("", None, 4)]] * 3
    assert [one.unix_ms for one in await client.newest_decisions(200, "acme")] == [7, 6, 5, 3, 1]
    assert [one.unix_ms for one in await client.newest_decisions(200, "acme", "large")] == [3]
    assert await client.newest_decisions(200, "nobody") == ()


async def test_one_that_vanished_between_two_parts_has_said_what_it_said(
    client: Client, start_replica: StartReplica
) -> None:
    replica = await start_replica("p1", at(2), at(1))
    await start_replica("p2", at(3))
    await knows(client, 2)
    replica.breaks_off = True
    decisions, took = await timed(client.newest_decisions(9))
    assert [one.unix_ms for one in decisions] == [3, 2]
    assert 0.4 < took < 1.0


async def test_a_replica_that_does_not_know_the_question_has_none(client: Client, start_replica: StartReplica) -> None:
    replica = await start_replica("p1", at(2))
    replica.is_old = True
    await knows(client, 1)
    decisions, took = await timed(client.newest_decisions(9))
    assert (decisions, took < 0.4) == ((), True)


async def test_what_is_asked_of_the_newest_is_checked_and_nobody_answering_is_said(client: Client) -> None:
    for limit, model, field in ((0, None, "limit"), (201, None, "limit"), (1, "m" * 257, "model")):
        with pytest.raises(InvalidRequest) as refused:
            await client.newest_decisions(limit, None, model)
        assert refused.value.field == field
    with pytest.raises(Unavailable):
        await client.newest_decisions(1)
