"""deploy/nats: each role does its real work through kvproto's own classes, and nothing beyond it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvproto.buckets import Bucket, ensure_buckets
from kvproto.connection import Connection
from kvproto.errors import AuthenticationFailed, KvfleetError, Unavailable
from kvproto.ids import new_epoch
from kvproto.members import Lease, Members
from kvproto.messages import MemberRecord, Role, State, WorkerRecord
from kvproto.subjects import Subjects
from kvproto.testing.fixtures import ConfiguredNats, NatsServer
from tests.support.waiting import LIMIT_S, until

DEPLOY = Path(__file__).parents[3] / "deploy" / "nats"
S = Subjects()
KEY_READERS = ("worker", "vault")
READERS = ("ingress", "placement", "worker", "vault", "producer-public", "producer-acme")


def worker_record(worker: str, **changes: Any) -> WorkerRecord:
    fields: dict[str, Any] = {
        "id": worker,
        "epoch": new_epoch(),
        "lease": "",
        "state": State.READY,
        "model": "m",
        "address": "127.0.0.1:1",
        "host": "h",
        "pid": 1,
        "versions": (1, 1),
    }
    return WorkerRecord(**fields | changes)


def member_record(role: Role, member: str) -> MemberRecord:
    return MemberRecord(member, new_epoch(), "", State.READY, role, "h", 1, (1, 1))


@pytest_asyncio.fixture
async def admin(connect_as: Any) -> AsyncIterator[Connection]:
    """Has set the fleet up: the buckets exist, and are empty when the test begins."""
    connection = await connect_as("admin")
    await ensure_buckets(connection, S)
    for bucket in (S.members_bucket, S.sessions_bucket, S.keys_bucket, S.responses_bucket, S.batches_bucket):
        await connection.raw.jetstream().purge_stream(f"KV_{bucket}")
    yield connection


async def test_worker_keeps_its_lease(admin: Connection, connect_as: Any) -> None:
    bucket = await Bucket.open(await connect_as("worker"), S.members_bucket)
    lease = Lease(bucket, worker_record("w1"))
    await lease.register()
    await lease.renew()
    await lease.set(worker_record("w1", state=State.DRAINING))
    assert (await bucket.get("worker.w1")).value is not None
    await lease.release()
    assert (await bucket.get("worker.w1")).value is None


@pytest.mark.parametrize(
    ("user", "role"), [("ingress", Role.INGRESS), ("placement", Role.PLACEMENT), ("vault", Role.VAULT)]
)
async def test_members_without_blocks_keep_theirs(admin: Connection, connect_as: Any, user: str, role: Role) -> None:
    bucket = await Bucket.open(await connect_as(user), S.members_bucket)
    lease = Lease(bucket, member_record(role, "x1"))
    await lease.register()
    await lease.renew()
    await lease.release()
    assert (await bucket.get(f"{role.value}.x1")).value is None


async def test_every_role_that_follows_members_sees_a_worker_come_and_go(admin: Connection, connect_as: Any) -> None:
    bucket = await Bucket.open(await connect_as("worker"), S.members_bucket)
    early = Lease(bucket, worker_record("early"))
    await early.register()
    followed = [Members(await connect_as(user), S) for user in READERS]
    await asyncio.gather(*(members.start() for members in followed))
    try:
        for members in followed:
            assert members.view.is_alive("early")
            assert members.ring("m").owner("any key") == "early"
        late = Lease(bucket, worker_record("late"))
        await late.register()
        await until(lambda: all(members.view.is_alive("late") for members in followed))
        await late.release()
        await until(lambda: not any(members.view.is_alive("late") for members in followed))
    finally:
        for members in followed:
            await members.stop()


async def test_placement_drops_a_dead_worker(admin: Connection, connect_as: Any) -> None:
    bucket = await Bucket.open(await connect_as("worker"), S.members_bucket)
    await Lease(bucket, worker_record("w1")).register()
    members = Members(await connect_as("placement"), S)
    await members.start()
    await members.drop("w1")
    await until(lambda: not members.view.is_alive("w1"))
    assert (await bucket.get("worker.w1")).value is None
    await members.stop()


@pytest.mark.parametrize("owned", ["sessions_bucket", "responses_bucket"])
async def test_ingress_owns_sessions_and_responses(admin: Connection, connect_as: Any, owned: str) -> None:
    bucket = await Bucket.open(await connect_as("ingress"), getattr(S, owned))
    revision = await bucket.update("public.s", b"head", 0)
    await bucket.update("public.s.0", b"ids", 0)
    watch = await bucket.watch("public.s.>")
    async for entry in watch.entries():
        assert entry is not None
        assert (entry.key, entry.value) == ("public.s.0", b"ids")
        break
    await watch.stop()
    await bucket.delete("public.s", await bucket.update("public.s", b"head 2", revision))
    assert (await bucket.get("public.s")).value is None


@pytest.mark.parametrize("reader", KEY_READERS)
async def test_only_workers_and_vaults_read_keys_and_only_the_admin_writes_them(
    admin: Connection, connect_as: Any, reader: str
) -> None:
    await (await Bucket.open(admin, S.keys_bucket)).update("k", b"secret", 0)
    worker = await Bucket.open(await connect_as(reader), S.keys_bucket)
    assert (await worker.get("k")).value == b"secret"
    watch = await worker.watch()
    assert [entry.value if entry else None async for entry in _first(watch.entries(), 2)] == [b"secret", None]
    await watch.stop()

    async def refused(user: str) -> None:
        with pytest.raises(Unavailable):
            await Bucket.open(await connect_as(user), S.keys_bucket)

    async def cannot_write() -> None:
        with pytest.raises(Unavailable):
            await worker.update("k", b"mine", 0)

    await asyncio.gather(*(refused(user) for user in READERS if user not in KEY_READERS), cannot_write())
    assert (await worker.get("k")).value == b"secret"


async def test_producer_cannot_touch_records(admin: Connection, connect_as: Any) -> None:
    producer = await connect_as("producer-acme")
    members = await Bucket.open(producer, S.members_bucket)
    attempts = (
        members.update("worker.w1", b"forged", 0),
        Bucket.open(producer, S.sessions_bucket),
        ensure_buckets(producer, Subjects("mine")),
    )
    results = await asyncio.gather(*(asyncio.wait_for(a, 2.5) for a in attempts), return_exceptions=True)
    assert [isinstance(result, KvfleetError | TimeoutError) for result in results] == [True] * 3
    assert (await (await Bucket.open(admin, S.members_bucket)).get("worker.w1")).value is None


async def test_answers_reach_whoever_may_ask(admin: Connection, connect_as: Any) -> None:
    worker, placement = await connect_as("worker"), await connect_as("placement")

    async def answer_as(connection: Connection, subject: str) -> None:
        async def answer(message: Any) -> None:
            for chunk in (b"1", b"2", b"3"):
                await connection.publish(message.reply, chunk)

        await connection.subscribe(subject, answer)
        await connection.synced()

    await answer_as(worker, S.worker_admin("w1"))
    await answer_as(worker, S.blocks("w1"))
    await answer_as(worker, S.worker_generate_all("w1"))
    await answer_as(placement, S.place_all())
    await answer_as(placement, S.generate_all())
    await answer_as(placement, S.placement_stats())
    await answer_as(placement, S.placement_explain())
    for user, subject in (
        ("ingress", S.worker_admin("w1")),
        ("ingress", S.worker_generate("w1", "acme")),
        ("ingress", S.place("acme", "m")),
        ("ingress", S.placement_stats()),
        ("ingress", S.placement_explain()),
        ("placement", S.worker_admin("w1")),
        ("placement", S.blocks("w1")),
        ("placement", S.worker_generate("w1", "acme")),
        ("producer-acme", S.place("acme", "m")),
        ("producer-acme", S.generate("acme", "m")),
        ("producer-acme", S.worker_generate("w1", "acme")),
        ("admin", S.worker_admin("w1")),
        ("admin", S.placement_stats()),
        ("admin", S.placement_explain()),
    ):
        asking = await connect_as(user)
        received: list[bytes] = []

        async def receive(message: Any, received: list[bytes] = received) -> None:
            received.append(message.data)

        inbox = f"{asking.inbox_prefix}.chunks"
        await asking.subscribe(inbox, receive)
        await asking.publish(subject, b"", reply=inbox)
        await until(lambda received=received: len(received) == 3)
        assert received == [b"1", b"2", b"3"], (user, subject)


async def test_a_chosen_reply_subject_is_no_way_to_write_elsewhere(admin: Connection, connect_as: Any) -> None:
    """A producer names a record, or another tenant's subject, as its reply: the answer is refused, not written."""
    placement, worker = await connect_as("placement"), await connect_as("worker")
    asked = asyncio.Event()
    stolen: list[str] = []

    async def answer(message: Any) -> None:
        connection = placement if ".place." in message.subject else worker
        await connection.publish(message.reply, b"answer")
        asked.set()

    async def steal(message: Any) -> None:
        stolen.append(message.subject)

    await placement.subscribe(S.place_all(), answer)
    await worker.subscribe(S.worker_generate_all("w1"), answer)
    targets = (f"$KV.{S.sessions_bucket}.acme.s", f"$KV.{S.keys_bucket}.k", S.place("acme", "m"), "something.else")
    await admin.subscribe("something.else", steal)
    await admin.subscribe(S.place("acme", "m"), steal)
    await asyncio.gather(placement.synced(), worker.synced(), admin.synced())
    producer = await connect_as("producer-public")
    for subject in (S.place("public", "m"), S.worker_generate("w1", "public")):
        for target in targets:
            asked.clear()
            await producer.publish(subject, b"", reply=target)
            await asyncio.wait_for(asked.wait(), LIMIT_S)
    await asyncio.gather(placement.synced(), worker.synced(), admin.synced())
    assert stolen == []
    for bucket, key in ((S.sessions_bucket, "acme.s"), (S.keys_bucket, "k")):
        assert (await (await Bucket.open(admin, bucket)).get(key)).value is None


async def test_sys_hears_a_client_vanish_by_name(roles: Any, connect_as: Any) -> None:
    system = await connect_as("sys")
    gone: list[bytes] = []

    async def receive(message: Any) -> None:
        gone.append(message.data)

    await system.subscribe("$SYS.ACCOUNT.*.DISCONNECT", receive)
    await system.synced()
    worker = await roles.connect("worker", "w77")
    worker.raw._transport._io_writer.transport.abort()
    try:
        await until(lambda: any(b'"worker-w77"' in data for data in gone))
    finally:
        await worker.close()


async def test_wrong_credentials_are_refused(roles: Any) -> None:
    async def refused(user: str | None, password: str | None) -> None:
        with pytest.raises(AuthenticationFailed):
            await Connection.open(
                roles.url, name="x", inbox_prefix="_x", user=user, password=password, connect_timeout_s=1.0
            )

    development = [(user, user) for user in roles.inboxes]
    await asyncio.gather(
        *(refused(user, password) for user, password in [*development, ("worker", ""), ("nobody", "x"), (None, None)])
    )


def dev_passwords() -> dict[str, str]:
    lines = (DEPLOY / "dev.env").read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines if line[0] != "#")}


Variant = Callable[[Callable[[Path], None]], NatsServer]


@pytest.fixture
def variant(nats_with_config: ConfiguredNats, tmp_path: Path) -> Iterator[Variant]:
    """`variant(change)`: a server on a changed copy of deploy/nats, with the development passwords."""
    servers = []

    def start(change: Callable[[Path], None]) -> NatsServer:
        folder = shutil.copytree(DEPLOY, tmp_path / "nats")
        change(folder)
        servers.append(nats_with_config(folder / "nats-server.conf", dev_passwords()))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


async def test_another_namespace(variant: Variant) -> None:
    """README.md: its sed command, and nothing of the old namespace is left."""
    (command,) = re.findall(r"`sed -i '(.*)' roles/\*`", (DEPLOY / "README.md").read_text())

    def rename(folder: Path) -> None:
        files = [str(path) for path in (folder / "roles").iterdir()]
        subprocess.run(["sed", "-i", command.replace("NAME", "other"), *files], check=True)
        assert not any("kvf" in Path(path).read_text() for path in files)

    server = variant(rename)
    other = Subjects("other")
    opened = {
        user: await Connection.open(server.url, name=user, inbox_prefix=f"{inbox}.t", user=user, password=user)
        for user, inbox in (("admin", "_adm"), ("worker", "_wrk"), ("ingress", "_ing"))
    }
    await ensure_buckets(opened["admin"], other)
    await Lease(await Bucket.open(opened["worker"], other.members_bucket), worker_record("w1")).register()
    members = Members(opened["ingress"], other)
    await members.start()
    assert members.view.is_alive("w1")
    await members.stop()
    for connection in opened.values():
        await connection.close()


async def test_without_the_system_account(variant: Variant) -> None:
    def drop(folder: Path) -> None:
        accounts = folder / "accounts.conf"
        text = re.sub(r"  SYS \{.*?\n  \}\n", "", accounts.read_text(), flags=re.DOTALL)
        accounts.write_text(text.replace("system_account: SYS\n", ""))
        roles = folder / "roles.conf"
        roles.write_text(roles.read_text().replace("include ./roles/sys.conf\n", ""))

    server = variant(drop)
    admin = await Connection.open(server.url, name="a", inbox_prefix="_adm.a", user="admin", password="admin")
    assert await ensure_buckets(admin, S) == []
    with pytest.raises(AuthenticationFailed):
        await Connection.open(
            server.url, name="s", inbox_prefix="_plc.s", user="sys", password="sys", connect_timeout_s=1.0
        )
    await admin.close()


@pytest.mark.parametrize(("accounts", "kind"), [("accounts.conf", "PASSWORD"), ("accounts-nkeys.conf", "NKEY")])
def test_both_kinds_of_accounts_have_the_same_users(accounts: str, kind: str) -> None:
    """And every role's permissions are used, the admin's being none."""
    text = (DEPLOY / accounts).read_text()
    users = re.findall(rf"\$KVF_(\w+)_{kind}(?:, permissions: \$(\w+)_may)? \}}", text)
    roles = re.findall(r"include ./roles/([\w-]+)\.conf", (DEPLOY / "roles.conf").read_text())
    assert [(user.lower(), may) for user, may in users] == [
        ("admin", ""),
        *((role.replace("-", "_"), role.replace("-", "_")) for role in roles),
    ]
    links = ["region-link", "region-guard"]  # of servers, not of clients
    assert sorted(f"{role}.conf" for role in [*roles, *links]) == sorted(
        path.name for path in DEPLOY.glob("roles/*.conf")
    )


def test_dev_env_names_every_variable_of_the_configuration() -> None:
    files = [DEPLOY / "nats-server.conf", DEPLOY / "accounts.conf", *DEPLOY.glob("roles/*.conf")]
    used = {name for file in files for name in re.findall(r"\$(KVF_\w+)", file.read_text())}
    given = set(re.findall(r"^(KVF_\w+)=", (DEPLOY / "dev.env").read_text(), re.MULTILINE))
    assert used == given


def test_public_producer_is_the_template() -> None:
    template = (DEPLOY / "roles" / "producer.conf.template").read_text()
    assert template.replace("TENANT", "public") == (DEPLOY / "roles" / "producer-public.conf").read_text()


async def _ignore(message: Any) -> None:
    pass


async def _first(entries: AsyncIterator[Any], count: int) -> AsyncIterator[Any]:
    async with contextlib.aclosing(entries):  # type: ignore[type-var]
        async for entry in entries:
            yield entry
            count -= 1
            if not count:
                return
