"""Loop: a fleet of real processes that is made to fail: NATS with the roles of deploy/nats, the members, a supervisor.

Every member reaches NATS through a `NatsProxy`, and others' blocks through a `SlowProxy`. The supervisor starts again
whatever has ended, and notes how it ended; vLLM servers have one of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from kvfleet.ingress.auth.api_keys import hash_key
from kvproto.buckets import Bucket, ensure_buckets
from kvproto.client import Client
from kvproto.connection import Connection
from kvproto.dataplane.keys import ensure_key
from kvproto.ids import new_process_id
from kvproto.messages import Role as MemberRole
from kvproto.messages import State
from kvproto.subjects import ADMIN_INBOX, Subjects, inbox_prefix
from kvproto.testing.nats_process import NatsProcess, ServerSpec, free_port
from tests.chaos.history import ProcessEnd
from tests.chaos.layout import FAKE, REAL, TENANTS, Layout, Place, Role
from tests.chaos.process import ROOT, MemberProcess
from tests.chaos.vllm_servers import VllmServers
from tests.support.nats_proxy import NatsProxy
from tests.support.secrets_rig import add_tenant
from tests.support.slow_proxy import SlowProxy

DEPLOY = ROOT / "deploy" / "nats"
BACKOFF_S = 0.3
START_S = 300.0  # the first process ever compiles kernels
WORKER_DRAIN_S = 2.0
INGRESS_DRAIN_S = 20.0
GRACE_S = {Role.WORKER: 12.0, Role.INGRESS: INGRESS_DRAIN_S + 10.0, Role.PLACEMENT: 10.0, Role.VAULT: 15.0}
STEP_S = {REAL: 0.025, FAKE: 0.0}  # real tokens come so slowly that faults find them on their way
TOKEN_S = 0.0003  # and prompts take so long that to fetch what is left of a lost worker pays
FAKE_TOKENS_PER_S = 150
FAKE_PREFILL_TOKENS_PER_S = 2000.0  # slow enough that prompts are prefilled at their worker
BLOCKS = 256  # on a device: so few that some are evicted
HOST_BYTES = 16 * 2**20
VAULT_BYTES = 32 * 2**20
SMALL_VAULT_BYTES = 2**20  # of the one with a disk: most of what it has lies there


def password_of(user: str) -> str:
    return f"secret-of-{user}"


def key_of(tenant: str) -> str:
    return f"sk-{tenant}"


class Fleet:
    """`start`, then `stop`; an async context manager. `ends`: what has ended so far; `epoch`: the zero of its times."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        self.layout = layout
        self.folder = folder
        self.subjects = Subjects()
        self.members: dict[str, MemberProcess] = {}
        self.ends: list[ProcessEnd] = []
        self.epoch = time.monotonic()
        self.nats: NatsProcess
        self.observer: Client  # an operator's, straight to NATS
        self.ports = {place.name: free_port() for place in layout.of_role(Role.INGRESS)}
        self.vllm = VllmServers(folder, lambda name, code, said: self._ended(name, code, "", 0.0, said))
        self._supervisor: asyncio.Task[None] | None = None
        self.ways: dict[str, NatsProxy] = {}  # to NATS, of members and clients

    def now(self) -> float:
        return time.monotonic() - self.epoch

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Returns when everybody is ready. Raises AssertionError with the logs."""
        spec = ServerSpec(_server_config(self.folder / "nats-config"), _passwords())
        self.nats = NatsProcess(self.folder / "nats", spec)
        await asyncio.to_thread(self.nats.start)
        connection = await self.connect("admin", inbox_prefix(ADMIN_INBOX, new_process_id()))
        await ensure_buckets(connection, self.subjects)
        await ensure_key(await Bucket.open(connection, self.subjects.keys_bucket))
        self.observer = await Client.over(connection, self.subjects)
        self.vllm.start(place.name for place in self.layout.places if place.has_vllm)
        for place in self.layout.processes:
            await self._add(place)
        for place in self.layout.of_role(Role.CLIENT):
            self.ways[place.name] = await self._way()
        for member in self.members.values():
            member.start()
        self._supervisor = asyncio.create_task(self._supervise(), name="supervisor")
        await self.wait_ready(self.members, START_S)

    async def stop(self) -> None:
        """Everything ends; what does not in time is killed."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        await self.vllm.stop()
        for member in self.members.values():
            member.wake()
            member.kill()
        for member in self.members.values():
            while member.is_running:
                await asyncio.sleep(0.01)
            if member.data_plane is not None:
                await asyncio.to_thread(member.data_plane.close)
        if hasattr(self, "observer"):
            with contextlib.suppress(Exception):
                await self.observer.close()
                await self.observer.connection.close()
        for proxy in self.ways.values():
            await proxy.close()
        if hasattr(self, "nats"):
            await asyncio.to_thread(self.nats.stop)

    async def __aenter__(self) -> Fleet:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def connect(self, user: str, prefix: str, url: str | None = None) -> Connection:
        return await Connection.open(
            url or self.nats.url, name=prefix, inbox_prefix=prefix, user=user, password=password_of(user)
        )

    async def _way(self) -> NatsProxy:
        proxy = NatsProxy(self.nats.url)
        await proxy.start()
        return proxy

    async def _add(self, place: Place) -> None:
        data_plane, flags = None, [f"--log-level={os.environ.get('CHAOS_LOG', 'info')}"]
        if place.role in (Role.WORKER, Role.VAULT):
            port = free_port()
            data_plane = SlowProxy(f"tcp:127.0.0.1:{port}")
            flags.append(f"--data-plane-port={port}")
        flags += _flags(place, self)
        self.ways[place.name] = proxy = await self._way()
        self.members[place.name] = MemberProcess(place, flags, _env(place.role), self.folder, proxy, data_plane)

    # ------------------------------------------------------------------ who is there

    def is_ready(self, name: str) -> bool:
        """Whether others see this very process as ready to work."""
        member = self.members[name]
        view = self.observer.members.view
        if not member.is_running or member.stopped or member.asked:
            return False
        if member.place.has_vllm and not self.vllm[name].is_up:
            return False
        if member.place.role is Role.WORKER:
            worker = view.workers.get(name)
            return worker is not None and worker.record.pid == member.pid and worker.state is State.READY
        known = view.members.get((MemberRole(member.place.role.value), name))
        return known is not None and known[0].pid == member.pid

    def are_ready(self, names: Iterable[str]) -> bool:
        return all(self.is_ready(name) for name in names)

    async def wait_ready(self, names: Iterable[str], timeout_s: float) -> None:
        names = list(names)
        end = time.monotonic() + timeout_s
        while not self.are_ready(names):
            if time.monotonic() > end:
                missing = [name for name in names if not self.is_ready(name)]
                words = "\n".join(f"== {name}\n{self._words_of(name)}" for name in missing)
                raise AssertionError(f"not ready within {timeout_s:.0f} s: {', '.join(missing)}\n{words}")
            await asyncio.sleep(0.05)

    def was_tried_again(self, request: str) -> bool:
        """Whether an ingress tried a request of its own more than once, by what it logs. A further attempt may find at
        a worker what the first one has computed there."""
        logs = [self.members[place.name].log for place in self.layout.of_role(Role.INGRESS)]
        return any(f"request {request}: attempt " in log.read_text(errors="replace") for log in logs)

    def _words_of(self, name: str) -> str:
        words = self.members[name].last_words()
        return words + (self.vllm[name].last_words() if self.members[name].place.has_vllm else "")

    # ------------------------------------------------------------------ supervisor

    async def _supervise(self) -> None:
        down: dict[str, float] = {}
        while True:
            for name, member in self.members.items():
                code = member.ended()
                if code is not None:
                    took = time.monotonic() - member.asked_at if member.asked else 0.0
                    self._ended(name, code, member.asked, took, member.last_words(3000))
                    down[name] = time.monotonic() + BACKOFF_S
                elif member.asked == "drain" and time.monotonic() - member.asked_at > GRACE_S[member.place.role]:
                    member.kill()
                    member.asked = "drain"  # it had its time: -9 is its fault
                if name in down and time.monotonic() >= down[name]:
                    del down[name]
                    member.start()
            await asyncio.sleep(0.05)

    def _ended(self, name: str, code: int, asked: str, took_s: float, said: str) -> None:
        self.ends.append(ProcessEnd(self.now(), name, code, asked, took_s, said))


def _passwords() -> dict[str, str]:
    users = {"ADMIN": "admin", "INGRESS": "ingress", "PLACEMENT": "placement", "WORKER": "worker", "VAULT": "vault"}
    users |= {f"PRODUCER_{tenant}": f"producer-{tenant}" for tenant in TENANTS}
    users["SYS"] = "sys"
    return {f"KVF_{name}_PASSWORD": password_of(user) for name, user in users.items()}


def _server_config(folder: Path) -> Path:
    """deploy/nats as it is, with a producer of each tenant, made as its README says."""
    shutil.copytree(DEPLOY, folder)
    for tenant in TENANTS:
        if not (folder / "roles" / f"producer-{tenant}.conf").exists():
            add_tenant(folder, tenant, "accounts.conf")
    return folder / "nats-server.conf"


def _env(role: Role) -> dict[str, str]:
    env = {
        "KVFLEET_NATS_USER": role.value,
        "KVFLEET_NATS_PASSWORD": password_of(role.value),
        "KVFLEET_FLEET_KEY": "chaos",
    }
    if role is Role.PLACEMENT:
        env |= {"KVFLEET_SYSTEM_USER": "sys", "KVFLEET_SYSTEM_PASSWORD": password_of("sys")}
    if role is Role.INGRESS:
        keys = [
            {"name": tenant, "sha256": hash_key(key_of(tenant)), "tenant": tenant, "admin": True} for tenant in TENANTS
        ]
        env["KVFLEET_API_KEYS"] = json.dumps({"keys": keys})
    return env


def _flags(place: Place, fleet: Fleet) -> list[str]:
    if place.role is Role.INGRESS:
        return [f"--port={fleet.ports[place.name]}", f"--drain-s={INGRESS_DRAIN_S}"]
    if place.role is Role.VAULT:
        if place.has_disk:
            disk = fleet.folder / f"{place.name}-disk"
            return [f"--max-bytes={SMALL_VAULT_BYTES}", f"--disk-dir={disk}", f"--disk-max-bytes={64 * 2**20}"]
        return [f"--max-bytes={VAULT_BYTES}"]
    if place.has_vllm:
        return ["--engine=vllm", f"--engine-url={fleet.vllm[place.name].url}", f"--drain-s={WORKER_DRAIN_S}"]
    if place.role is Role.WORKER:
        flags = [f"--drain-s={WORKER_DRAIN_S}", "--threads=1", f"--host-bytes={HOST_BYTES}", "--preload-s=1"]
        flags += [f"--chaos-step-s={STEP_S[place.model]}", f"--chaos-token-s={TOKEN_S}", f"--blocks={BLOCKS}"]
        if place.model == REAL:
            return [*flags, "--dtype=float32"]
        runner = ["--runner=fake", f"--fake-tokens-per-s={FAKE_TOKENS_PER_S}", f"--role={place.half}"]
        runner += [f"--fake-prefill-tokens-per-s={FAKE_PREFILL_TOKENS_PER_S}"]
        return [*flags, *runner, f"--served-model-name={FAKE}"]
    return []
