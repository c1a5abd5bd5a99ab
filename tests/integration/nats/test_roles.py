"""deploy/nats: every role on every subject, publishing and subscribing; then each role doing its real work.

The table is written from the promises (who talks to whom), not from the configuration. A denial is seen twice: the
server says so, and nothing arrives.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import nats
import pytest_asyncio

from kvproto.subjects import Subjects

USERS = ("ingress", "placement", "worker", "vault", "producer-public", "producer-acme", "sys")
PRODUCERS = {"producer-public", "producer-acme"}
MEMBER_READERS = {"ingress", "placement", "worker", "vault", *PRODUCERS}
KEY_READERS = {"worker", "vault"}
NOBODY: set[str] = set()
S = Subjects()


def kv(bucket: str, key: str) -> str:
    return f"$KV.{S.bucket(bucket)}.{key}"


def api(verb: str, bucket: str, rest: str = "") -> str:
    return f"$JS.API.{verb}.KV_{S.bucket(bucket)}{rest}"


# subject: (who may publish, who may subscribe). The admin may do everything and is not in the table.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    # asking for work
    S.place("public", "m"): ({"ingress", "producer-public"}, {"placement"}),
    S.place("acme", "m"): ({"ingress", "producer-acme"}, {"placement"}),
    S.place_all(): (NOBODY, {"placement"}),
    S.generate("public", "m"): ({"producer-public"}, {"placement"}),
    S.generate("acme", "m"): ({"producer-acme"}, {"placement"}),
    S.generate_all(): (NOBODY, {"placement"}),
    # workers
    S.worker_generate("w1", "public"): ({"ingress", "placement", "producer-public"}, {"worker"}),
    S.worker_generate("w1", "acme"): ({"ingress", "placement", "producer-acme"}, {"worker"}),
    S.worker_generate("w1", "other"): ({"ingress", "placement"}, {"worker"}),
    S.worker_generate_all("w1"): (NOBODY, {"worker"}),
    S.worker_cancel("w1"): ({"ingress", "placement", *PRODUCERS}, {"worker"}),
    S.worker_resend("w1"): ({"ingress", "placement", *PRODUCERS}, {"worker"}),
    S.worker_pause("w1"): ({"ingress", *PRODUCERS}, {"worker"}),
    S.worker_admin("w1"): ({"ingress", "placement"}, {"worker"}),
    "kvf.worker.w1.unheard_of": (NOBODY, NOBODY),
    "kvf.worker.>": (NOBODY, NOBODY),
    # the state of the fleet
    S.events("w1"): ({"worker", "vault"}, {"placement"}),
    S.events_all(): (NOBODY, {"placement"}),
    S.milestones("w1"): ({"worker"}, {"placement"}),
    S.milestones_all(): (NOBODY, {"placement"}),
    S.heartbeat("w1"): ({"worker", "vault"}, MEMBER_READERS),
    S.heartbeat_all(): (NOBODY, MEMBER_READERS),
    S.blocks("w1"): ({"placement"}, {"worker", "vault"}),
    S.placement_stats(): ({"ingress"}, {"placement"}),
    S.placement_explain(): ({"ingress"}, {"placement"}),
    S.placement_bookings(): ({"placement"}, {"placement"}),
    S.placement_preload(): ({"worker"}, {"placement"}),
    S.placement_victim(): (NOBODY, {"placement"}),
    "kvf.placement.unheard_of": (NOBODY, NOBODY),
    # inboxes
    "_ing.i1.b": ({"placement", "worker"}, {"ingress"}),
    "_ing.>": (NOBODY, {"ingress"}),
    "_plc.p1.x": ({"worker", "vault"}, {"placement", "sys"}),
    "_plc.>": (NOBODY, {"placement", "sys"}),
    "_wrk.w1.x": ({"placement"}, {"worker"}),
    "_wrk.>": (NOBODY, {"worker"}),
    "_vlt.v1.x": (NOBODY, {"vault"}),
    "_vlt.>": (NOBODY, {"vault"}),
    "_prd.public.a.x": ({"placement", "worker"}, {"producer-public"}),
    "_prd.public.>": (NOBODY, {"producer-public"}),
    "_prd.acme.a.x": ({"placement", "worker"}, {"producer-acme"}),
    "_prd.acme.>": (NOBODY, {"producer-acme"}),
    "_prd.*.a.x": (NOBODY, NOBODY),
    "_prd.>": (NOBODY, NOBODY),
    "_adm.a.x": ({"placement", "worker", "vault"}, NOBODY),
    "_INBOX.x": (NOBODY, NOBODY),
    # records
    kv("members", "worker.w1"): ({"worker", "placement"}, NOBODY),
    kv("members", "placement.p1"): ({"placement"}, NOBODY),
    kv("members", "ingress.i1"): ({"ingress"}, NOBODY),
    kv("members", "vault.v1"): ({"vault"}, NOBODY),
    kv("sessions", "public.s"): ({"ingress"}, NOBODY),
    kv("sessions", "public.s.0"): ({"ingress"}, NOBODY),
    kv("keys", "k"): (NOBODY, NOBODY),
    kv("keys", "dataplane.first"): (NOBODY, NOBODY),
    kv("keys", ">"): (NOBODY, NOBODY),
    # reading them
    api("STREAM.INFO", "members"): (MEMBER_READERS, NOBODY),
    api("DIRECT.GET", "members", ".$KV.kvf_members.worker.w1"): (MEMBER_READERS, NOBODY),
    api("CONSUMER.CREATE", "members"): (MEMBER_READERS, NOBODY),
    api("STREAM.INFO", "sessions"): ({"ingress"}, NOBODY),
    api("DIRECT.GET", "sessions", ".$KV.kvf_sessions.public.s"): ({"ingress"}, NOBODY),
    api("CONSUMER.CREATE", "sessions"): ({"ingress"}, NOBODY),
    api("STREAM.INFO", "keys"): (KEY_READERS, NOBODY),
    api("DIRECT.GET", "keys", ".$KV.kvf_keys.dataplane.first"): (KEY_READERS, NOBODY),
    api("CONSUMER.CREATE", "keys"): (KEY_READERS, NOBODY),
    # changing what deployment made, or looking around
    **{
        api(verb, bucket): (NOBODY, NOBODY)
        for verb in ("STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.GET")
        for bucket in ("members", "sessions", "keys")
    },
    "$JS.API.INFO": (NOBODY, NOBODY),
    "$JS.API.STREAM.NAMES": (NOBODY, NOBODY),
    "$JS.API.STREAM.CREATE.mine": (NOBODY, NOBODY),
    "$JS.API.CONSUMER.LIST.KV_kvf_members": (NOBODY, NOBODY),
    "$SYS.REQ.SERVER.PING": (NOBODY, NOBODY),
    "$SYS.ACCOUNT.*.DISCONNECT": (NOBODY, {"sys"}),
    "$SYS.>": (NOBODY, NOBODY),
    "something.else": (NOBODY, NOBODY),
    ">": (NOBODY, NOBODY),
}

SPELLED = {subject.lower(): subject for subject in TABLE}  # nats-py tells refusals in lower case


class Client:
    """A nats-py client that remembers what it was refused and what it received."""

    def __init__(self) -> None:
        self.refused: dict[str, set[str]] = {"publish": set(), "subscription": set()}
        self.received: set[str] = set()
        self.nc: Any = None

    async def connect(self, roles: Any, user: str) -> Client:
        self.nc = await nats.connect(
            roles.url,
            user=user,
            password=roles.password(user),
            inbox_prefix=f"{roles.inboxes[user]}.table".encode(),
            error_cb=self._on_error,
            allow_reconnect=False,
        )
        return self

    async def _on_error(self, error: Exception) -> None:
        for verb, subject in re.findall(r'violation for (publish|subscription) to "([^"]+)"', str(error)):
            self.refused[verb].add(SPELLED.get(subject, subject))

    async def publish(self, subjects: Iterable[str], data: bytes = b"") -> None:
        for subject in subjects:
            await self.nc.publish(subject, data)
        await self.settle()

    async def subscribe(self, subjects: Iterable[str]) -> None:
        async def receive(message: Any) -> None:
            self.received.add(message.subject)

        for subject in subjects:
            await self.nc.subscribe(subject, cb=receive)
        await self.settle()

    async def settle(self) -> None:
        """The server has seen all, and what it answered has been handled: it answers in order."""
        await asyncio.sleep(0)
        await self.nc.flush()
        await asyncio.sleep(0.05)


def is_exact(subject: str) -> bool:
    return not set(subject) & set("*>")


def is_plain(subject: str) -> bool:
    """No record and no API of the server: publishing there only means that subscribers receive it."""
    return is_exact(subject) and not subject.startswith("$")


@pytest_asyncio.fixture
async def clients(roles: Any) -> AsyncIterator[dict[str, Client]]:
    opened = {user: await Client().connect(roles, user) for user in (*USERS, "admin")}
    yield opened
    for client in opened.values():
        await client.nc.close()


def test_table_covers_every_user(roles: Any) -> None:
    named = set[str]().union(*(publishers | subscribers for publishers, subscribers in TABLE.values()))
    assert named == set(USERS)
    assert {*USERS, "admin"} == set(roles.inboxes)


async def test_every_role_publishes_only_what_it_may(clients: dict[str, Client]) -> None:
    """All refusals are those of the table: none missing, none too many, on 7 users."""
    subjects = [subject for subject in TABLE if is_exact(subject)]
    for user in USERS:
        await clients[user].publish(subjects)
        may = {subject for subject in subjects if user in TABLE[subject][0]}
        assert clients[user].refused["publish"] == set(subjects) - may, user


async def test_every_role_subscribes_only_to_what_it_may(clients: dict[str, Client]) -> None:
    for user in USERS:
        await clients[user].subscribe(TABLE)
        may = {subject for subject, (_, subscribers) in TABLE.items() if user in subscribers}
        assert clients[user].refused["subscription"] == set(TABLE) - may, user


async def test_what_a_role_may_not_publish_reaches_nobody(clients: dict[str, Client]) -> None:
    plain = [subject for subject in TABLE if is_plain(subject)]
    admin = clients["admin"]
    await admin.subscribe(plain)
    for user in USERS:
        if user == "sys":
            continue  # another account: nothing of it is seen here at all
        admin.received.clear()
        await clients[user].publish(plain)
        await admin.settle()
        assert admin.received == {subject for subject in plain if user in TABLE[subject][0]}, user


async def test_what_a_role_may_not_hear_does_not_reach_it(clients: dict[str, Client]) -> None:
    plain = [subject for subject in TABLE if is_plain(subject)]
    for user in USERS:
        await clients[user].subscribe(TABLE)
    await clients["admin"].publish(plain)
    for user in USERS:
        await clients[user].settle()
        heard = {subject for subject in plain if user in TABLE[subject][1]} if user != "sys" else set()
        assert clients[user].received == heard, user


async def test_admin_may_do_everything_in_the_account(clients: dict[str, Client]) -> None:
    admin = clients["admin"]
    plain = [subject for subject in TABLE if is_plain(subject)]
    await admin.subscribe([">"])
    await admin.publish(plain)
    assert admin.refused == {"publish": set(), "subscription": set()}
    assert set(plain) <= admin.received


async def test_queue_groups_are_no_way_around(clients: dict[str, Client]) -> None:
    thief = clients["producer-acme"]
    for subject in (S.generate("public", "m"), S.worker_generate("w1", "public"), "_prd.public.a.x"):
        await thief.nc.subscribe(subject, queue="placement")
    await thief.settle()
    assert len(thief.refused["subscription"]) == 3
    await clients["producer-public"].publish([S.generate("public", "m")])
    await clients["ingress"].publish([S.worker_generate("w1", "public")])
    await thief.settle()
    assert thief.received == set()
