"""Buckets: deletes compare and set, their markers go by themselves, and a difference in configuration is one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock

import pytest
from nats.js import JetStreamContext

from kvproto import buckets, codec
from kvproto.buckets import Bucket, BucketFollower, BucketWatch, Entry, StaleRevision, ensure_buckets
from kvproto.connection import Connection
from kvproto.errors import AuthenticationFailed, Unavailable
from kvproto.ids import epoch
from kvproto.members import Fenced, Lease
from kvproto.messages import MemberRecord, Role, State
from kvproto.subjects import Subjects
from tests.support.waiting import LIMIT_S, until


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Connection]:
    connection = await Connection.open(nats_url, name="buckets", inbox_prefix="_adm.buckets")
    yield connection
    await connection.close()


async def test_compare_and_set(connection: Connection, fleet_buckets: Subjects) -> None:
    bucket = await Bucket.open(connection, fleet_buckets.sessions_bucket)
    first = await bucket.update("a.b", b"1", 0)
    with pytest.raises(StaleRevision):
        await bucket.update("a.b", b"2", 0)
    second = await bucket.update("a.b", b"2", first)
    with pytest.raises(StaleRevision):
        await bucket.delete("a.b", first)
    assert (await bucket.get("a.b")).value == b"2"
    await bucket.delete("a.b", second)
    gone = await bucket.get("a.b")
    assert gone.value is None
    third = await bucket.update("a.b", b"3", gone.revision)
    assert (await bucket.get("a.b")).revision == third


async def test_a_deleted_keys_marker_goes_by_itself(
    connection: Connection, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "MARKER_TTL_S", 1.0)
    name = fleet_buckets.sessions_bucket
    bucket = await Bucket.open(connection, name)
    for i in range(5):
        await bucket.update(f"k.{i}", b"x", 0)
        await bucket.delete(f"k.{i}")
    jetstream = connection.raw.jetstream()
    assert (await jetstream.stream_info(f"KV_{name}")).state.messages == 5
    async with asyncio.timeout(LIMIT_S / 2):
        while (await jetstream.stream_info(f"KV_{name}")).state.messages:
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("counted", [0, 1])
async def test_what_existed_is_told_whole_and_then_its_end(
    connection: Connection, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch, held: int, counted: int
) -> None:
    """On a slow machine the library counts nothing before the first message is here, or a heartbeat as one."""
    bucket = await Bucket.open(connection, fleet_buckets.sessions_bucket)
    for number in range(held):
        await bucket.update(f"k.{number}", b"x", 0)
    monkeypatch.setattr(JetStreamContext.PushSubscription, "delivered", counted)
    watch = await bucket.watch()
    async with asyncio.timeout(LIMIT_S):
        found = [entry async for entry in until_listed(watch)]
    await watch.stop()
    assert [entry.key for entry in found] == [f"k.{number}" for number in range(held)]


async def until_listed(watch: BucketWatch) -> AsyncIterator[Entry]:
    async for entry in watch.entries():
        if entry is None:
            return
        yield entry


async def test_a_watch_that_is_cancelled_or_fails_while_it_opens_leaves_no_subscription(
    connection: Connection, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a follower that begins again after two reconnects in a row."""
    ask, answered = JetStreamContext.PushSubscription.consumer_info, asyncio.Event()

    async def slow(self: JetStreamContext.PushSubscription) -> Any:
        await answered.wait()
        return await ask(self)

    async def read(watch: BucketWatch) -> None:
        async for entry in watch.entries():
            if entry is None:
                follower.listed.set()

    monkeypatch.setattr(JetStreamContext.PushSubscription, "consumer_info", slow)
    follower = BucketFollower(connection, fleet_buckets.sessions_bucket, ">", "test", read)
    await follower.begin()
    await until(lambda: connection.subscriptions == 1)
    await follower.begin()
    await until(lambda: connection.subscriptions == 2)
    answered.set()
    await follower.listed.wait()
    await until(lambda: connection.subscriptions == 1)
    calls = iter((ask, AsyncMock(side_effect=TimeoutError)))
    monkeypatch.setattr(JetStreamContext.PushSubscription, "consumer_info", lambda self: next(calls)(self))
    with pytest.raises(Unavailable):
        await (await Bucket.open(connection, fleet_buckets.sessions_bucket)).watch()
    assert connection.subscriptions == 1
    await follower.stop()
    assert not connection.subscriptions


async def test_a_follower_whose_cancellation_was_swallowed_does_not_go_on_beside_the_next(
    connection: Connection, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, going_on = asyncio.Event(), asyncio.Event()
    open_bucket = Bucket.open

    async def swallow_one(connection: Connection, name: str) -> Bucket:
        if not opening.is_set():
            opening.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(LIMIT_S)
            going_on.set()
        return await open_bucket(connection, name)

    async def read(watch: BucketWatch) -> None:
        async for entry in watch.entries():
            if entry is None:
                follower.listed.set()

    monkeypatch.setattr(Bucket, "open", swallow_one)
    follower = BucketFollower(connection, fleet_buckets.sessions_bucket, ">", "test", read)
    await follower.begin()
    await opening.wait()
    await follower.begin()
    await going_on.wait()
    await until(lambda: len(_followers()) == connection.subscriptions == 1)
    await follower.stop()
    assert not _followers()
    await until(lambda: not connection.subscriptions)  # a watch that was being opened is stopped once it is open


def _followers() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "test-watch"]


async def test_a_watch_that_ends_in_an_outage_does_not_subscribe_again_later(
    connection: Connection, fleet_buckets: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = await (await Bucket.open(connection, fleet_buckets.sessions_bucket)).watch()
    looking = watch._watcher._sub._sub._jsi._hbtask  # whether it is silent
    monkeypatch.setattr(connection.raw, "_send_unsubscribe", AsyncMock(side_effect=OSError))
    await watch.stop()
    await until(looking.done)
    assert not connection.subscriptions


async def test_a_watcher_sees_deletion_and_what_existed(connection: Connection, fleet_buckets: Subjects) -> None:
    bucket = await Bucket.open(connection, fleet_buckets.sessions_bucket)
    await bucket.update("a", b"1", 0)
    watch = await bucket.watch()
    seen = []
    await bucket.delete("a")
    async with asyncio.timeout(LIMIT_S):
        async for entry in watch.entries():
            seen.append(entry and (entry.key, entry.value, entry.expired))
            if entry is not None and entry.value is None:
                break
    await watch.stop()
    assert seen[-1] == ("a", None, False)


async def test_ensure_says_what_differs(connection: Connection, namespace: str) -> None:
    subjects = Subjects(namespace)
    try:
        assert await ensure_buckets(connection, subjects) == []
        assert await ensure_buckets(connection, subjects) == []
        differences = await ensure_buckets(connection, subjects, replicas=3)
        assert f"bucket {subjects.members_bucket}: replicas is 1, the configuration says 3" in differences
    finally:
        for name in (
            subjects.members_bucket,
            subjects.sessions_bucket,
            subjects.keys_bucket,
            subjects.responses_bucket,
            subjects.batches_bucket,
        ):
            await connection.raw.jetstream().delete_key_value(name)


async def test_more_may_watch_than_a_server_lets_by_itself(connection: Connection, fleet_buckets: Subjects) -> None:
    """It has a thousand consumers for a stream that says nothing, and each worker watches."""
    jetstream = connection.raw.jetstream()
    for bucket in (fleet_buckets.members_bucket, fleet_buckets.keys_bucket):
        config = (await jetstream.stream_info(f"KV_{bucket}")).config
        assert config.max_consumers == buckets.MAX_WATCHES
        assert config.allow_direct, "all else is as it was made"
        assert config.max_msgs_per_subject == 1
    more = {**config.as_dict(), "max_consumers": 2 * buckets.MAX_WATCHES}
    await connection.request(f"$JS.API.STREAM.UPDATE.{config.name}", json.dumps(more).encode(), 5.0)
    assert await ensure_buckets(connection, fleet_buckets) == []
    info = await jetstream.stream_info(config.name)
    assert info.config.max_consumers == 2 * buckets.MAX_WATCHES, "an operator's"


async def test_a_missing_bucket_names_the_command_that_creates_it(connection: Connection) -> None:
    with pytest.raises(Unavailable, match="kvfleet init"):
        await Bucket.open(connection, "absent")


async def test_a_refused_password_is_final_and_quick(nats_with_config, tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = tmp_path / "auth.conf"
    config.write_text('authorization { user: a, password: "right" }\n')
    server = nats_with_config(config)
    began = asyncio.get_running_loop().time()
    with pytest.raises(AuthenticationFailed, match="refuses user a"):
        await Connection.open(server.url, name="x", inbox_prefix="_adm.x", user="a", password="wrong")
    assert asyncio.get_running_loop().time() - began < 3


def a_life(started_ms: int) -> MemberRecord:
    """Of a process whose host's clock says so."""
    return MemberRecord(
        "v0", epoch(started_ms, started_ms), "", State.READY, Role.VAULT, "h", 1, codec.supported_versions()
    )


@pytest.mark.parametrize(("first_ms", "second_ms"), [(1_000, 2_000), (2_000, 1_000)])
async def test_the_life_that_registered_last_is_the_later_one_whatever_clocks_say(
    connection: Connection, fleet_buckets: Subjects, first_ms: int, second_ms: int
) -> None:
    bucket = await Bucket.open(connection, fleet_buckets.members_bucket)
    first, second = Lease(bucket, a_life(first_ms)), Lease(bucket, a_life(second_ms))
    await first.renew()
    await first.renew()
    await second.renew()
    with pytest.raises(Fenced):
        await first.renew()
    await second.renew()
    with pytest.raises(Fenced):
        await first.renew()


@pytest.mark.parametrize(("first_ms", "second_ms"), [(1_000, 2_000), (2_000, 1_000)])
async def test_an_earlier_life_that_registers_again_in_a_gap_is_replaced_again(
    connection: Connection, fleet_buckets: Subjects, first_ms: int, second_ms: int
) -> None:
    """Both were away for so long that their records expired, and the earlier one is back first."""
    bucket = await Bucket.open(connection, fleet_buckets.members_bucket)
    first, second = Lease(bucket, a_life(first_ms)), Lease(bucket, a_life(second_ms))
    await first.renew()
    await second.renew()
    await bucket.delete("vault.v0")
    await first.renew()
    await second.renew()
    held = await bucket.get("vault.v0")
    assert held.value is not None
    assert codec.decode(MemberRecord, held.value).epoch == second.record.epoch
    with pytest.raises(Fenced):
        await first.renew()
