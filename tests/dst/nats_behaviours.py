"""What a fleet counts on of NATS, asked of the real server and of the simulated one by the same functions.

Each takes a `Stage` and asserts. They see the product's own `Connection` and `Bucket` alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import pytest

from kvproto.buckets import Bucket, Entry, StaleRevision, ensure_buckets
from kvproto.connection import Connection, Message
from kvproto.errors import AuthenticationFailed, Unavailable, WorkerLost
from kvproto.subjects import Subjects

LIMIT_S = 60.0
QUIET_S = 0.3  # in which nothing may come


class Server(Protocol):
    """That was killed it starts again with its store."""

    @property
    def url(self) -> str: ...
    def hang(self) -> None: ...
    def wake(self) -> None: ...
    def kill(self) -> None: ...
    def start(self) -> None: ...


class Stage:
    """A server, and connections to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._opened: list[Connection] = []

    async def open(self, name: str, user: str = "admin", password: str | None = None) -> Connection:
        made = await Connection.open(
            self.server.url, name=name, inbox_prefix=f"_adm.{name}", user=user, password=password or user
        )
        self._opened.append(made)
        return made

    async def close(self) -> None:
        self.server.wake()
        for one in self._opened:
            await one.close()


Behaviour = Callable[[Stage], Awaitable[None]]
BEHAVIOURS: dict[str, Behaviour] = {}
SUBJECTS = Subjects("alike")


def behaviour(function: Behaviour) -> Behaviour:
    BEHAVIOURS[function.__name__] = function
    return function


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def heard(connection: Connection, subject: str, queue: str = "") -> list[Message]:
    """What comes there from now on."""
    messages: list[Message] = []

    async def note(message: Message) -> None:
        messages.append(message)

    await connection.subscribe(subject, note, queue=queue)
    await connection.synced()
    return messages


async def answering(connection: Connection, subject: str, queue: str = "") -> Any:
    async def answer(message: Message) -> None:
        await connection.publish(message.reply, b"to " + message.data, headers=message.headers)

    subscription = await connection.subscribe(subject, answer, queue=queue)
    await connection.synced()
    return subscription


def data(messages: list[Message]) -> list[bytes]:
    return [message.data for message in messages]


# Messages.


@behaviour
async def wildcards(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    one, rest, exact = await heard(a, "x.*.z"), await heard(a, "x.>"), await heard(b, "x.y.z")
    for subject in ("x.y.z", "x.y", "x.y.z.z", "x", "xx.y.z", "x.q.z"):
        await b.publish(subject, subject.encode())
    await b.synced()
    await a.synced()
    await until(lambda: len(rest) == 4)
    assert data(one) == [b"x.y.z", b"x.q.z"]
    assert data(rest) == [b"x.y.z", b"x.y", b"x.y.z.z", b"x.q.z"]
    assert [message.subject for message in rest] == ["x.y.z", "x.y", "x.y.z.z", "x.q.z"]
    await until(lambda: data(exact) == [b"x.y.z"])


@behaviour
async def one_of_a_queue_group(stage: Stage) -> None:
    connections = [await stage.open(f"c{at}") for at in range(3)]
    group = [await heard(one, "work", "g") for one in connections]
    other, alone = await heard(connections[0], "work", "h"), await heard(connections[1], "work")
    for number in range(60):
        await connections[2].publish("work", b"%d" % number)
    wanted = [b"%d" % number for number in range(60)]
    await until(lambda: sum(map(len, group)) == len(other) == len(alone) == 60)
    assert sorted(one for some in group for one in data(some)) == sorted(wanted)
    assert all(group), "each had some"
    assert data(other) == data(alone) == wanted


@behaviour
async def what_is_subscribed_twice_under_one_number_is_heard_once(stage: Stage) -> None:
    a = await stage.open("a")
    some = await heard(a, "t")
    number = max(a.raw._subs)
    await a.raw._send_command(b"SUB t  %d\r\n" % number)
    await a.synced()
    await a.publish("t", b"1")
    await a.publish("t", b"2")
    await a.synced()
    await asyncio.sleep(QUIET_S)
    assert data(some) == [b"1", b"2"]


@behaviour
async def messages_keep_their_order(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    some = await heard(b, "o.>")
    for number in range(2000):
        await a.publish(f"o.{number % 7}", b"%d" % number)
    await until(lambda: len(some) == 2000)
    assert data(some) == [b"%d" % number for number in range(2000)]


@behaviour
async def one_hears_what_one_says(stage: Stage) -> None:
    a = await stage.open("a")
    some = await heard(a, "me")
    await a.publish("me", b"hello")
    await until(lambda: data(some) == [b"hello"])


@behaviour
async def headers_travel(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    some = await heard(b, "h")
    await a.publish("h", b"body", headers={"Content-Type": "application/json", "traceparent": "00-ab-cd-01"})
    await a.publish("h", b"bare")
    await until(lambda: len(some) == 2)
    assert some[0].headers == {"Content-Type": "application/json", "traceparent": "00-ab-cd-01"}
    assert some[0].data == b"body"
    assert not some[1].headers


@behaviour
async def requests(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    subscription = await answering(b, "ask")
    answers = await asyncio.gather(*(a.request("ask", b"%d" % at, LIMIT_S) for at in range(20)))
    assert data(answers) == [b"to %d" % at for at in range(20)]
    await subscription.unsubscribe()
    await b.synced()
    with pytest.raises(WorkerLost):
        await a.request("ask", b"", LIMIT_S)


@behaviour
async def nobody_answers(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    began = time.monotonic()
    with pytest.raises(WorkerLost):
        await a.request("nobody", b"", LIMIT_S)
    assert time.monotonic() - began < LIMIT_S / 2
    await heard(b, "silent")
    with pytest.raises(TimeoutError):
        await a.request("silent", b"", 0.2)


@behaviour
async def a_stream_without_a_reader_is_told_so(stage: Stage) -> None:
    """Where it says where to answer to."""
    a = await stage.open("a")
    told = await heard(a, "_adm.a.inbox")
    await a.publish("nobody", b"x", reply="_adm.a.inbox")
    await a.publish("nobody", b"x")
    await until(lambda: told)
    await asyncio.sleep(QUIET_S)
    assert [(one.data, one.headers["Status"]) for one in told if one.headers] == [(b"", "503")]


@behaviour
async def what_is_drained_loses_nothing(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    subscription = await answering(b, "ask", "q")
    for _ in range(7):
        await b.publish("nobody", bytes(900_000))
    await subscription.drain()
    with pytest.raises(WorkerLost):
        await a.request("ask", b"", LIMIT_S)


@behaviour
async def what_is_too_large_is_refused(stage: Stage) -> None:
    a = await stage.open("a")
    assert a.max_payload == 1_048_576
    some = await heard(a, "large")
    await a.publish("large", bytes(a.max_payload))
    with pytest.raises(Unavailable):
        await a.publish("large", bytes(a.max_payload + 1))
    await until(lambda: [len(one.data) for one in some] == [1_048_576])
    assert a.is_connected


@behaviour
async def subscriptions_are_counted(stage: Stage) -> None:
    a = await stage.open("a")
    before = a.subscriptions
    subscription = await answering(a, "ask")
    await a.request("ask", b"", LIMIT_S)
    assert a.subscriptions == before + 1
    await subscription.unsubscribe()
    assert a.subscriptions == before


# Outages.


@behaviour
async def a_server_that_was_killed_comes_back(stage: Stage) -> None:
    """What was sent meanwhile arrives, subscriptions live on, and hooks are called when they are in force."""
    a, b = await stage.open("a"), await stage.open("b")
    some, went, came = await heard(b, "x.>"), [], []
    await answering(b, "ask")
    b.on_disconnect.append(lambda: went.append(b.is_connected))

    async def back() -> None:
        came.append((await b.request("ask", b"", LIMIT_S)).data)

    b.on_reconnect.append(back)
    await a.publish("x.before", b"1")
    await until(lambda: some)
    stage.server.kill()
    await until(lambda: went and not a.is_connected)
    assert (went, b.connected_for_s, b.is_settled(0.0)) == ([False], 0.0, False)
    await a.publish("x.meanwhile", b"2")
    stage.server.start()
    await until(lambda: came and a.is_connected)
    assert came == [b"to "]
    assert (b.reconnects_total, a.reconnects_total) == (1, 1)
    await a.publish("x.after", b"3")
    await until(lambda: b"3" in data(some))
    assert data(some) in ([b"1", b"2", b"3"], [b"1", b"3"]), "the other may have been there first"
    await until(lambda: b.is_settled(0.1))


@behaviour
async def a_server_that_hangs_is_silent(stage: Stage) -> None:
    a, b = await stage.open("a"), await stage.open("b")
    some = await heard(b, "x")
    await asyncio.sleep(2.5)
    assert not a.is_silent, "it answers, though nothing is said"
    stage.server.hang()
    await until(lambda: a.is_silent and b.is_silent)
    assert a.is_connected
    await a.publish("x", b"meanwhile")
    stage.server.wake()
    await until(lambda: data(some) == [b"meanwhile"])
    await until(lambda: not a.is_silent)
    assert (a.reconnects_total, b.reconnects_total) == (0, 0)


@behaviour
async def a_server_that_hangs_for_long_is_left(stage: Stage) -> None:
    a = await stage.open("a")
    went: list[bool] = []
    a.on_disconnect.append(lambda: went.append(True))
    stage.server.hang()
    await until(lambda: went)
    stage.server.wake()
    await until(lambda: a.reconnects_total and a.is_connected)
    some = await heard(a, "x")
    await a.publish("x", b"again")
    await until(lambda: data(some) == [b"again"])


@behaviour
async def nobody_is_there(stage: Stage) -> None:
    stage.server.kill()
    with pytest.raises(Unavailable, match="no NATS server answers"):
        await stage.open("a")
    stage.server.start()
    a = await stage.open("a")
    assert a.is_connected


# Buckets.


async def bucket(stage: Stage, name: str = "a") -> tuple[Connection, Bucket]:
    connection = await stage.open(name)
    await ensure_buckets(connection, SUBJECTS, patience_s=LIMIT_S)
    return connection, await Bucket.open(connection, SUBJECTS.members_bucket)


async def watched(among: Bucket, pattern: str = ">") -> tuple[list[Entry | None], Any]:
    """What a watch tells; and its end."""
    watch, told = await among.watch(pattern), []

    async def read() -> None:
        async for entry in watch.entries():
            told.append(entry)

    reading = asyncio.create_task(read())

    async def stop() -> None:
        await watch.stop()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    return told, stop


@behaviour
async def compare_and_set(stage: Stage) -> None:
    _, among = await bucket(stage)
    assert await among.get("w.a") == Entry("w.a", None, 0)
    first = await among.update("w.a", b"1", 0)
    second = await among.update("w.a", b"2", first)
    assert second > first
    for revision in (0, first, second + 1):
        with pytest.raises(StaleRevision):
            await among.update("w.a", b"3", revision)
    assert await among.get("w.a") == Entry("w.a", b"2", second)
    with pytest.raises(StaleRevision):
        await among.delete("w.a", first)
    await among.delete("w.a", second)
    gone = await among.get("w.a")
    assert (gone.value, gone.expired) == (None, False)
    assert gone.revision > second
    assert await among.update("w.a", b"4", gone.revision) > gone.revision


@behaviour
async def one_of_many_writers_wins(stage: Stage) -> None:
    _, among = await bucket(stage)
    _, other = await bucket(stage, "b")
    wins = 0
    for number in range(10):
        before = (await among.get("w.a")).revision
        done = await asyncio.gather(
            *((among, other)[at % 2].update("w.a", b"%d %d" % (number, at), before) for at in range(6)),
            return_exceptions=True,
        )
        wins += sum(not isinstance(one, StaleRevision) for one in done)
        assert all(isinstance(one, int | StaleRevision) for one in done), done
    assert wins == 10


@behaviour
async def keys_expire(stage: Stage) -> None:
    """After three seconds without a write; watchers are told that it was no deletion."""
    _, among = await bucket(stage)
    told, stop = await watched(among)
    await until(lambda: told == [None])
    revision = await among.update("w.a", b"1", 0)
    for _ in range(4):
        await asyncio.sleep(1.0)
        revision = await among.update("w.a", b"1", revision)
    began = time.monotonic()
    await until(lambda: told[-1] is not None and told[-1].value is None)
    assert 2.5 < time.monotonic() - began < 10.0
    last = told[-1]
    assert isinstance(last, Entry)
    assert (last.key, last.expired, last.revision > revision) == ("w.a", True, True)
    assert [entry.value for entry in told[1:-1] if entry is not None] == [b"1"] * 5
    gone = await among.get("w.a")
    assert gone.value is None
    assert await among.update("w.a", b"2", gone.revision)
    await stop()


@behaviour
async def a_deletion_is_told(stage: Stage) -> None:
    _, among = await bucket(stage)
    told, stop = await watched(among)
    await among.update("w.a", b"1", 0)
    await among.delete("w.a")
    await until(lambda: len(told) == 3)
    assert told[0] is None
    assert [(entry.value, entry.expired) for entry in told if entry is not None] == [(b"1", False), (None, False)]
    await stop()


@behaviour
async def a_watch_tells_what_existed_and_then_its_end(stage: Stage) -> None:
    connection, _ = await bucket(stage)
    keys = await Bucket.open(connection, SUBJECTS.sessions_bucket)  # whose entries do not expire
    for number in range(5):
        await keys.update(f"t{number % 2}.k{number}", b"%d" % number, 0)
    await keys.update("t1.k1", b"one", (await keys.get("t1.k1")).revision)
    await keys.delete("t0.k2")
    told, stop = await watched(keys)
    some, stop_some = await watched(keys, "t1.>")
    await until(lambda: None in told and None in some)
    before = [(entry.key, entry.value) for entry in told if entry is not None]
    assert before == [("t0.k0", b"0"), ("t1.k3", b"3"), ("t0.k4", b"4"), ("t1.k1", b"one"), ("t0.k2", None)]
    assert told[-1] is None
    assert [entry and (entry.key, entry.value) for entry in some] == [("t1.k3", b"3"), ("t1.k1", b"one"), None]
    await keys.update("t1.new", b"new", 0)
    await until(lambda: told[-1] is not None and some[-1] is not None)
    assert {entry.key for entry in (told[-1], some[-1]) if entry is not None} == {"t1.new"}
    assert sorted(entry.key for entry in await keys.listed()) == ["t0.k0", "t0.k4", "t1.k1", "t1.k3", "t1.new"]
    await stop()
    await stop_some()
    assert await (await Bucket.open(connection, SUBJECTS.keys_bucket)).listed() == []


@behaviour
async def watches_of_all_are_told_in_one_order(stage: Stage) -> None:
    _, among = await bucket(stage)
    others = [await bucket(stage, f"b{at}") for at in range(3)]
    told = [await watched(one) for _, one in others]
    for number in range(30):
        key = f"w.k{number % 5}"
        await among.update(key, b"%d" % number, (await among.get(key)).revision)
    await until(lambda: all(some[-1] is not None and some[-1].value == b"29" for some, _ in told))
    for some, stop in told:
        values = [int(entry.value) for entry in some if entry is not None and entry.value is not None]
        assert values == list(range(30))
        revisions = [entry.revision for entry in some if entry is not None]
        assert revisions == sorted(revisions)
        await stop()


@behaviour
async def a_bucket_outlives_its_server(stage: Stage) -> None:
    connection, _ = await bucket(stage)
    keys = await Bucket.open(connection, SUBJECTS.sessions_bucket)
    revision = await keys.update("k", b"kept", 0)
    stage.server.kill()
    await until(lambda: not connection.is_connected)
    with pytest.raises(Unavailable):
        await keys.get("k")
    stage.server.start()
    await until(lambda: connection.reconnects_total and connection.is_connected)
    assert await keys.get("k") == Entry("k", b"kept", revision)
    told, stop = await watched(keys)
    await until(lambda: None in told)
    assert [entry and entry.key for entry in told] == ["k", None]
    await stop()


@behaviour
async def a_bucket_that_is_not_there(stage: Stage) -> None:
    connection = await stage.open("a")
    with pytest.raises(Unavailable, match="kvfleet init"):
        await Bucket.open(connection, "absent")


@behaviour
async def a_full_bucket_forgets_its_oldest(stage: Stage) -> None:
    connection = await stage.open("a")
    await ensure_buckets(connection, SUBJECTS, patience_s=LIMIT_S, responses_bytes=65_536)
    responses = await Bucket.open(connection, SUBJECTS.responses_bucket)
    for number in range(20):
        await responses.update(f"r{number}", bytes(8_000), 0)
    kept = [entry.key for entry in await responses.listed()]
    assert kept == [f"r{number}" for number in range(20 - len(kept), 20)]
    assert 6 <= len(kept) <= 8


# Who may.


@behaviour
async def passwords(stage: Stage) -> None:
    for user, password in (("admin", "wrong"), ("nobody", "x")):
        with pytest.raises(AuthenticationFailed):
            await stage.open("a", user, password)
    assert (await stage.open("a", "worker")).is_connected


@behaviour
async def rights(stage: Stage) -> None:
    """What a user may not say reaches nobody, and what it may not hear does not reach it."""
    a, worker = await stage.open("a"), await stage.open("w", "worker")
    some = await heard(a, "free.>")
    secret = await heard(worker, "secret")
    free = await heard(worker, "free.y")
    for subject in ("free.x", "other"):
        await worker.publish(subject, subject.encode())
    others = await heard(a, "other")
    await worker.publish("other", b"again")
    await worker.synced()
    await a.publish("secret", b"x")
    await a.publish("free.y", b"y")
    await until(lambda: data(free) == [b"y"])
    await asyncio.sleep(QUIET_S)
    assert (data(some), data(others), data(secret)) == ([b"free.x", b"y"], [], [])
    assert worker.errors_total >= 3
    assert worker.is_connected


# Who is gone.


@behaviour
async def the_system_account_hears_who_comes_and_goes(stage: Stage) -> None:
    system, a = await stage.open("placement-sys", "sys"), await stage.open("a")
    came, left = await heard(system, "$SYS.ACCOUNT.*.CONNECT"), await heard(system, "$SYS.ACCOUNT.*.DISCONNECT")
    others = await heard(a, "$SYS.>")
    closed, cut = await stage.open("worker-w1", "worker"), await stage.open("worker-w2", "worker")
    await until(lambda: _named(came) >= {"worker-w1", "worker-w2"})
    await closed.close()
    await until(lambda: _named(left) == {"worker-w1"})
    cut.raw.options["allow_reconnect"] = False
    cut.raw.writer.transport.abort()
    await until(lambda: _named(left) == {"worker-w1", "worker-w2"})
    assert not others


def _named(messages: list[Message]) -> set[str]:
    """The clients that these tell of. Whoever only tries whether a server listens has no name."""
    clients = (json.loads(message.data)["client"] for message in messages)
    return {client["name"] for client in clients if "name" in client}
