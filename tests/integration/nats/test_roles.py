"""deploy/nats: every role on every subject, publishing and subscribing; then each role doing its real work.

The table is written from the promises (who talks to whom), not from the configuration. A denial is seen twice: the
server says so, and nothing arrives.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any

import nats
import pytest
import pytest_asyncio

from kvproto.subjects import Subjects

USERS = ("ingress", "placement", "worker", "vault", "producer-public", "producer-acme", "sys")
PRODUCERS = {"producer-public", "producer-acme"}
MEMBER_READERS = {"ingress", "placement", "worker", "vault", *PRODUCERS}
KEY_READERS = {"worker", "vault"}
NOBODY: set[str] = set()
S = Subjects(region="us")


def kv(bucket: str, key: str) -> str:
    return f"$KV.{S.namespace}_{bucket}.{key}"


def api(verb: str, bucket: str, rest: str = "") -> str:
    return f"$JS.API.{verb}.KV_{S.namespace}_{bucket}{rest}"


# Besides those that somebody may.
STREAM_VERBS = (
    "CREATE", "UPDATE", "DELETE", "PURGE", "MSG.GET", "MSG.DELETE", "SNAPSHOT", "RESTORE", "PEER.REMOVE",
    "LEADER.STEPDOWN",
)  # fmt: skip
CONSUMER_VERBS = ("CREATE", "DURABLE.CREATE", "MSG.NEXT", "LEADER.STEPDOWN", "PAUSE", "UNPIN", "RESET")

# subject: (who may publish, who may subscribe). The admin may do everything and is not in the table.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    # asking for work
    S.place("public", "m"): ({"ingress", "producer-public"}, {"placement"}),
    S.place("acme", "m"): ({"ingress", "producer-acme"}, {"placement"}),
    S.place_all(): (NOBODY, {"placement"}),
    S.generate("public", "m"): ({"producer-public"}, {"placement"}),
    S.generate("acme", "m"): ({"producer-acme"}, {"placement"}),
    S.generate_all(): (NOBODY, {"placement"}),
    # work that may wait: taken out of the queue by its API alone
    S.batch("public", "m"): ({"producer-public"}, NOBODY),
    S.batch("acme", "m"): ({"producer-acme"}, NOBODY),
    S.batch("other", "m"): (NOBODY, NOBODY),
    S.batch_line("public", "m"): ({"ingress"}, NOBODY),
    S.batch_all(): (NOBODY, NOBODY),
    S.batch_lines_all(): (NOBODY, NOBODY),
    "$JS.API.STREAM.INFO.kvf_batch": ({"ingress"}, NOBODY),
    "$JS.API.CONSUMER.CREATE.kvf_batch.c.kvf.batch.public.m": ({"ingress"}, NOBODY),
    "$JS.API.CONSUMER.MSG.NEXT.kvf_batch.c": ({"ingress"}, NOBODY),
    "$JS.ACK.kvf_batch.c.1.1.1.1.1": ({"ingress"}, NOBODY),
    **{f"$JS.API.STREAM.{verb}.kvf_batch": (NOBODY, NOBODY) for verb in STREAM_VERBS},
    # workers
    S.worker_generate("w1", "public"): ({"ingress", "placement", "producer-public"}, {"worker"}),
    S.worker_generate("w1", "acme"): ({"ingress", "placement", "producer-acme"}, {"worker"}),
    S.worker_generate("w1", "other"): ({"ingress", "placement"}, {"worker"}),
    S.worker_generate_all("w1"): (NOBODY, {"worker"}),
    # of anybody's requests: the fleet's own roles
    S.worker_cancel("w1"): ({"ingress", "placement"}, {"worker"}),
    S.worker_resend("w1"): ({"ingress", "placement"}, {"worker"}),
    S.worker_pause("w1"): ({"ingress"}, {"worker"}),
    # of paused conversations
    S.worker_returns("w1"): ({"ingress", "placement"}, {"worker", "placement"}),
    S.returns_all(): (NOBODY, {"worker", "placement"}),
    # of a tenant's own
    **{
        word("w1", tenant): ({f"producer-{tenant}"} & PRODUCERS, {"worker"})
        for word in (S.worker_cancel, S.worker_resend, S.worker_pause)
        for tenant in ("public", "acme", "other")
    },
    S.worker_cancel_all("w1"): (NOBODY, {"worker"}),
    S.worker_resend_all("w1"): (NOBODY, {"worker"}),
    S.worker_pause_all("w1"): (NOBODY, {"worker"}),
    "kvf.worker.w1.cancel.>": (NOBODY, {"worker"}),  # to the server `*` covers `>`; deeper down nobody may publish
    "kvf.worker.w1.generate.>": (NOBODY, {"worker"}),
    "kvf.worker.*.generate.>": (NOBODY, {"worker"}),
    "kvf.worker.*.cancel.public": (NOBODY, {"worker"}),
    "kvf.place.public.m.more": (NOBODY, NOBODY),
    "kvf.place.public": (NOBODY, NOBODY),
    "kvf.generate.>": (NOBODY, NOBODY),
    "kvf.>": (NOBODY, NOBODY),
    "*.place.public.m": (NOBODY, NOBODY),
    "other.place.public.m": (NOBODY, NOBODY),
    S.worker_admin("w1"): ({"ingress", "placement"}, {"worker"}),
    "kvf.worker.w1.unheard_of": (NOBODY, NOBODY),
    "kvf.worker.>": (NOBODY, NOBODY),
    # across regions
    S.region_place("us", "public", "m"): ({"ingress", "producer-public"}, {"placement"}),
    S.region_place("eu", "acme", "m"): ({"ingress", "producer-acme"}, {"placement"}),
    S.region_place_all(): (NOBODY, {"placement"}),
    S.region_generate("us", "public", "m"): ({"placement"}, {"placement"}),
    S.region_generate_all(): (NOBODY, {"placement"}),
    S.region_worker("w1", "generate.public"): ({"ingress", "producer-public"}, {"worker"}),
    S.region_worker("w1", "generate.acme"): ({"ingress", "producer-acme"}, {"worker"}),
    S.region_worker("w1", "generate.*"): (NOBODY, {"worker"}),
    S.region_worker("w1", "cancel"): ({"ingress"}, {"worker"}),
    S.region_worker("w1", "resend"): ({"ingress"}, {"worker"}),
    S.region_worker("w1", "pause"): ({"ingress"}, {"worker"}),
    S.region_worker("w1", "cancel.acme"): ({"producer-acme"}, {"worker"}),
    S.region_worker("w1", "resend.public"): ({"producer-public"}, {"worker"}),
    S.region_worker("w1", "pause.other"): (NOBODY, {"worker"}),
    S.region_worker("w1", "admin"): ({"ingress"}, {"worker"}),
    S.region_summary("us"): ({"placement"}, {"ingress", "placement"}),
    S.region_summaries(): (NOBODY, {"ingress", "placement"}),
    "kvf.region.us.unheard_of": (NOBODY, NOBODY),
    "kvf.region.>": (NOBODY, NOBODY),
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
    S.placement_capsules(): ({"placement", "worker"}, {"placement"}),
    S.placement_watches(): ({"placement"}, {"placement"}),
    S.ingress_usage(): ({"ingress"}, {"ingress"}),
    S.embedded_scale(): (NOBODY, NOBODY),  # `kvfleet up` has no roles
    "kvf.ingress.>": (NOBODY, NOBODY),
    "kvf.ingress.unheard_of": (NOBODY, NOBODY),
    "kvf.placement.>": (NOBODY, NOBODY),
    "kvf.placement.unheard_of": (NOBODY, NOBODY),
    # inboxes
    "_ing.i1.b": ({"placement", "worker"}, {"ingress"}),
    "_ing.>": (NOBODY, {"ingress"}),
    "_plc.p1.x": ({"placement", "worker", "vault"}, {"placement", "sys"}),
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
    "_adm.>": (NOBODY, NOBODY),
    "_ing": (NOBODY, NOBODY),
    "_prd.public": ({"placement", "worker"}, NOBODY),
    "_prd.other.a.x": ({"placement", "worker"}, NOBODY),
    "_INBOX.x": (NOBODY, NOBODY),
    "_INBOX.>": (NOBODY, NOBODY),
    # records
    kv("members", "worker.w1"): ({"worker", "placement"}, NOBODY),
    kv("members", "placement.p1"): ({"placement"}, NOBODY),
    kv("members", "ingress.i1"): ({"ingress"}, NOBODY),
    kv("members", "vault.v1"): ({"vault"}, NOBODY),
    kv("sessions", "public.s"): ({"ingress"}, NOBODY),
    kv("sessions", "public.s.0"): ({"ingress"}, NOBODY),
    kv("responses", "public.r"): ({"ingress"}, NOBODY),
    kv("responses", "active.public.r"): ({"ingress"}, NOBODY),
    kv("batches", "file.public.f"): ({"ingress"}, NOBODY),
    kv("batches", "result.public.r"): ({"ingress"}, NOBODY),
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
    api("STREAM.INFO", "responses"): ({"ingress"}, NOBODY),
    api("DIRECT.GET", "responses", ".$KV.kvf_responses.public.r"): ({"ingress"}, NOBODY),
    api("CONSUMER.CREATE", "responses"): ({"ingress"}, NOBODY),
    api("STREAM.INFO", "batches"): ({"ingress"} | PRODUCERS, NOBODY),
    api("DIRECT.GET", "batches", ".$KV.kvf_batches.batch.public.b"): ({"ingress"}, NOBODY),
    api("DIRECT.GET", "batches", ".$KV.kvf_batches.result.public.r"): ({"ingress", "producer-public"}, NOBODY),
    api("DIRECT.GET", "batches", ".$KV.kvf_batches.result.acme.r"): ({"ingress", "producer-acme"}, NOBODY),
    api("CONSUMER.CREATE", "batches"): ({"ingress"}, NOBODY),
    api("STREAM.INFO", "keys"): (KEY_READERS, NOBODY),
    api("DIRECT.GET", "keys", ".$KV.kvf_keys.dataplane.first"): (KEY_READERS, NOBODY),
    api("CONSUMER.CREATE", "keys"): (KEY_READERS, NOBODY),
    **{
        subject: (readers, NOBODY)
        for bucket, readers in (
            ("members", MEMBER_READERS),
            ("sessions", {"ingress"}),
            ("responses", {"ingress"}),
            ("batches", {"ingress"}),
            ("keys", KEY_READERS),
        )
        for subject in (
            api("CONSUMER.INFO", bucket, ".c"),
            api("CONSUMER.DELETE", bucket, ".c"),
            f"$JS.FC.KV_{S.namespace}_{bucket}.c.x",
        )
    },
    # changing what deployment made, or looking around
    **{
        api(verb, bucket, rest): (NOBODY, NOBODY)
        for bucket in ("members", "sessions", "keys")
        for verb, rest in (
            *((f"STREAM.{verb}", "") for verb in STREAM_VERBS),
            *((f"CONSUMER.{verb}", "") for verb in ("NAMES", "LIST")),
            *((f"CONSUMER.{verb}", ".c") for verb in CONSUMER_VERBS),
        )
    },
    **{f"$JS.API.STREAM.{verb}.mine": (NOBODY, NOBODY) for verb in STREAM_VERBS},
    "$JS.API.CONSUMER.CREATE.mine": (NOBODY, NOBODY),
    "$JS.API.DIRECT.GET.KV_kvf_other.k": (NOBODY, NOBODY),
    "$JS.API.INFO": (NOBODY, NOBODY),
    "$JS.API.ACCOUNT.PURGE.KVF": (NOBODY, NOBODY),
    "$JS.API.STREAM.NAMES": (NOBODY, NOBODY),
    "$JS.API.STREAM.LIST": (NOBODY, NOBODY),
    "$JS.API.META.LEADER.STEPDOWN": (NOBODY, NOBODY),
    "$JS.API.SERVER.REMOVE": (NOBODY, NOBODY),
    "$JS.API.>": (NOBODY, NOBODY),
    "$JS.ACK.KV_kvf_members.c.1.1.1.1.1": (NOBODY, NOBODY),
    "$JS.EVENT.ADVISORY.>": (NOBODY, NOBODY),
    "$KV.>": (NOBODY, NOBODY),
    "$KV.kvf_members.>": (NOBODY, NOBODY),
    "$KV.kvf_other.k": (NOBODY, NOBODY),
    "$SYS.REQ.SERVER.PING": (NOBODY, NOBODY),
    "$SYS.REQ.ACCOUNT.PING.CONNZ": (NOBODY, NOBODY),
    "$SYS.REQ.SERVER.x.RELOAD": (NOBODY, NOBODY),
    "$SYS.REQ.USER.INFO": (NOBODY, NOBODY),
    "$SYS.ACCOUNT.KVF.CONNECT": (NOBODY, {"sys"}),
    "$SYS.ACCOUNT.KVF.LEAFNODE.CONNECT": (NOBODY, NOBODY),
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
        login = roles.login(user)
        options = {"nkeys_seed_str": login["nkey_seed"]} if roles.by_nkey else login
        self.nc = await nats.connect(
            roles.url,
            **options,
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


@pytest.fixture(params=["roles", "nkey_roles"])
def accounts(request: pytest.FixtureRequest) -> Any:
    """By password and by nkey: who somebody is must not change what they may."""
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture
async def clients(accounts: Any) -> AsyncIterator[dict[str, Client]]:
    opened = {user: await Client().connect(accounts, user) for user in (*USERS, "admin")}
    yield opened
    for client in opened.values():
        await client.nc.close()


def test_table_covers_every_user(roles: Any) -> None:
    named = set[str]().union(*(publishers | subscribers for publishers, subscribers in TABLE.values()))
    assert named == set(USERS)
    assert {*USERS, "admin"} == set(roles.inboxes)


def test_table_covers_every_subject_that_there_is() -> None:
    """A new method of Subjects has no row here, until somebody has thought of who may use it."""
    samples = {"tenant": "public", "model": "m", "worker": "w1", "member": "w1", "region": "us", "verb": "cancel"}
    missing = set()
    for name, method in inspect.getmembers(Subjects, inspect.isfunction):
        if name.startswith("_") or name == "bucket":
            continue
        parameters = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
        every = {one.name: samples[one.name] for one in parameters}
        least = {one.name: samples[one.name] for one in parameters if one.default is one.empty}
        missing |= {name for given in (every, least) if getattr(S, name)(**given) not in TABLE}
    assert missing == set()


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
